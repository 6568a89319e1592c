"""A microbatch draws the numbers of its seed in every mode; the default generator outside of it stays as it is."""
from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from splitpipe.core import rng
from splitpipe.core.generator import Seeds
from splitpipe.core.rng import DeviceState, DisturbedError, Numbers, RngMode
from tests.core.test_thread_state import Seen

UNKNOWN, NONE, EXCLUSIVE = RngMode.UNKNOWN, RngMode.NONE, RngMode.EXCLUSIVE
Call = Callable[[], Any]


@dataclass
class Facts:
    """What is known of a stage."""

    rng: RngMode = UNKNOWN
    generators: Collection[torch.Generator] | None = None


def numbers(seed: int, mode: RngMode = UNKNOWN, **options: Any) -> Numbers:
    return Numbers(seed, Facts(mode), **options)


def drawn(seed: int, call: Call, mode: RngMode = UNKNOWN, **options: Any) -> Any:
    """The value of a first run."""
    return numbers(seed, mode, **options).draw(call)[0]


def built(make: Callable[[], Any]) -> Any:
    """A layer whose parameters are the same whichever test asks for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make()


X = torch.linspace(-2, 2, 48).view(4, 2, 6)
ATTENTION = built(lambda: nn.MultiheadAttention(6, 2, dropout=0.5))
LINEAR = built(lambda: nn.Linear(6, 6))


def leaf() -> Tensor:
    return X.clone().requires_grad_()


def without_grad() -> Tensor:
    with torch.no_grad():
        return F.dropout(X)


def seeding() -> Tensor:
    torch.manual_seed(5)
    return F.dropout(X)


def forking() -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return X * torch.rand(6)


def both() -> tuple[Tensor, Tensor, Tensor]:
    return F.dropout(X), torch.ops.aten.bernoulli(X.sigmoid()), F.dropout(X)


LAYERS: dict[str, tuple[RngMode, Call]] = {
    "linear": (NONE, lambda: LINEAR(X)),
    "dropout of nothing": (NONE, lambda: F.dropout(X, 0.0)),
    "dropout": (EXCLUSIVE, lambda: F.dropout(X)),
    "attention": (EXCLUSIVE, lambda: ATTENTION(X, X, X)),
    "factories": (EXCLUSIVE, lambda: (torch.randn(3), torch.randint(9, (3,)), torch.randperm(9), torch.rand_like(X))),
    "checkpoint": (EXCLUSIVE, lambda: checkpoint(F.dropout, leaf(), use_reentrant=False)),
    "reentrant checkpoint": (EXCLUSIVE, lambda: checkpoint(F.dropout, leaf(), use_reentrant=True)),
    "no_grad": (EXCLUSIVE, without_grad),
    "gamma": (EXCLUSIVE, lambda: torch.distributions.Gamma(X.abs() + 1, torch.ones(())).sample()),
    "several": (EXCLUSIVE, both),
    "of another device": (NONE, lambda: F.dropout(X.to("meta")).shape),
    "seeding": (EXCLUSIVE, seeding),
    "forking": (EXCLUSIVE, forking),
}
modes = pytest.mark.parametrize("mode", RngMode, ids=lambda mode: mode.value)
layers = pytest.mark.parametrize("name", LAYERS)


def default() -> Tensor:
    return torch.default_generator.get_state()


def alone(seed: int, call: Call) -> Any:
    """What the call gives in a process of its own that was seeded so."""
    kept = default()
    try:
        torch.manual_seed(seed)
        return call()
    finally:
        torch.default_generator.set_state(kept)


def same(value: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(value, expected)
    if isinstance(expected, tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    return bool(value == expected)


def test_a_free_run_that_begins_to_draw_is_repeated_with_what_it_drew() -> None:
    facts = Facts(NONE, ())
    one = Numbers(1, facts, again=True)
    value, _ = one.draw(lambda: F.dropout(X))
    assert facts.rng is UNKNOWN  # The next microbatch runs alone.
    torch.rand(5)
    before, again = default(), list[Tensor]()
    one.redraw(lambda: again.append(F.dropout(X)))
    assert torch.equal(again[-1], value) and torch.equal(default(), before)
    assert facts.rng is EXCLUSIVE


def test_a_free_run_beside_which_somebody_else_drew_is_repeated_and_stays_free() -> None:
    facts = Facts(NONE, ())
    one, other = Numbers(1, facts, again=True), []

    def call() -> Tensor:
        if not other:
            other.append(torch.rand(3))  # As by another thread.
        return X.sin()

    one.draw(call)
    one.redraw(call)
    assert facts.rng is UNKNOWN
    assert Numbers(2, facts).draw(call)[1] is False and facts.rng is NONE


def test_drawing_while_another_stage_has_the_generator_is_an_error_in_recomputation() -> None:
    facts = Facts(NONE, ())
    one = Numbers(1, facts, again=True)

    def call() -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(drawn, 2, lambda: torch.rand(3)).result()
        return F.dropout(X)

    one.draw(call)
    before = default()
    with pytest.raises(RuntimeError, match=r"begun to draw random numbers while others did.*Repeat the step"):
        one.redraw(lambda: F.dropout(X))
    assert facts.rng is EXCLUSIVE and torch.equal(default(), before)


def test_numbers_that_only_the_first_run_draws_matter_if_others_follow() -> None:
    facts, first = Facts(), [True]

    def lazily(x: Tensor) -> Tensor:
        if first.pop():
            torch.rand(3)  # As for initial weights.
        first.append(False)
        return x.sin()

    one = Numbers(1, facts, again=True)
    one.draw(lambda: lazily(X))
    one.redraw(lambda: lazily(X))
    first[:] = [True]
    other = Numbers(2, facts, again=True)
    other.draw(lambda: F.dropout(lazily(X)))
    with pytest.raises(DisturbedError, match="drew other random numbers than its first run"):
        other.redraw(lambda: F.dropout(lazily(X)))


def test_a_free_run_that_draws_less_than_was_drawn_meanwhile_is_an_error_when_repeated() -> None:
    facts = Facts(NONE, ())
    one = Numbers(1, facts, again=True)
    one.draw(lambda: (torch.rand(3), torch.rand(3)))  # One of them by another thread.
    with pytest.raises(RuntimeError, match="begun to draw"):
        one.redraw(lambda: torch.rand(3))


def test_a_stage_that_draws_in_recomputation_alone_does_so_from_its_seed_in_the_end() -> None:
    facts = Facts(NONE, ())
    for number in range(2):
        one, found = Numbers(1, facts, again=True), list[Tensor]()
        assert one.draw(lambda: 1)[1] is False
        before = default()
        one.redraw(lambda: found.append(torch.rand(3)))  # noqa: B023
        assert torch.equal(found[-1], alone(1, lambda: torch.rand(3)))
        assert facts.rng is EXCLUSIVE
        assert number == 0 or torch.equal(default(), before)


@pytest.mark.parametrize("mode", [UNKNOWN, EXCLUSIVE], ids=lambda mode: mode.value)
def test_runs_of_compiled_layers_have_no_function_mode(mode: RngMode) -> None:
    def call() -> Tensor:
        assert _get_current_function_mode_stack() == []
        return F.dropout(X)

    before, facts = default(), Facts(mode)
    one, again = Numbers(3, facts, again=True, compiled=True), list[Tensor]()
    assert same(one.draw(call)[0], alone(3, call)) and facts.rng is EXCLUSIVE
    one.redraw(lambda: again.append(call()))
    assert same(again[0], alone(3, call)) and torch.equal(default(), before)


@layers
def test_the_mode_is_found_and_both_runs_draw_from_the_seed_and_restore_all_generators(name: str) -> None:
    mode, call = LAYERS[name]
    own = torch.Generator().manual_seed(4)

    def layer() -> tuple[Any, Tensor]:
        return call(), torch.rand(3, generator=own)

    known = {given: Facts(given) for given in (UNKNOWN, EXCLUSIVE, mode)}
    for (given, facts), seed in product(known.items(), (1, 2**61, 3)):
        one = Numbers(seed, facts, again=True)
        first, drew = one.draw(layer)
        assert given is EXCLUSIVE or (facts.rng, drew) == (mode, mode is EXCLUSIVE and name != "forking")
        assert same(first[0], alone(seed, call)), given
        torch.rand(5)
        torch.rand(5, generator=own)
        before, before_own = default(), own.get_state()
        for _ in range(2):
            again: list[Any] = []
            one.redraw(lambda: again.append(layer()))  # noqa: B023
            assert same(again[0], first), given
            assert torch.equal(default(), before) and torch.equal(own.get_state(), before_own), given


def test_generators_that_layers_have_or_gave_once_are_put_back_though_nothing_is_watched_any_more() -> None:
    given, owned = torch.Generator().manual_seed(4), torch.Generator().manual_seed(5)
    facts = Facts()
    Numbers(1, facts, again=True).draw(lambda: torch.rand(3, generator=given))
    assert list(facts.generators or ()) == [given] and facts.rng is NONE

    def layer() -> tuple[Tensor, Tensor]:
        return torch.rand(3, generator=given), torch.rand(3, generator=owned)

    one, again = Numbers(1, facts, again=True, owned=[owned]), list[Any]()
    first = one.draw(layer)[0]
    states = given.get_state(), owned.get_state()
    one.redraw(lambda: again.append(layer()))
    assert same(again[0], first) and same((given.get_state(), owned.get_state()), states)


@modes
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_call_that_raises_leaves_every_generator_and_the_lock(mode: RngMode, error: type[BaseException]) -> None:
    own = torch.Generator().manual_seed(4)
    wrong = [False]

    def call() -> Tensor:
        value = torch.rand(2, generator=own) if mode is NONE else torch.rand(2)
        if wrong[0]:
            raise error
        return value

    one = numbers(1, mode, again=True)
    one.draw(call)
    before, before_own = default(), own.get_state()
    wrong[0] = True
    with pytest.raises(error):
        one.redraw(call)
    assert torch.equal(default(), before) and torch.equal(own.get_state(), before_own)
    with pytest.raises(error):
        numbers(1, mode, again=True).draw(call)
    assert torch.equal(default(), before) and _get_current_function_mode_stack() == []
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(drawn, 1, lambda: torch.rand(2)).result(), alone(1, lambda: torch.rand(2)))


def all_of(seeds: Seeds, stages: int, microbatches: int) -> list[int]:
    return [seeds.of(stage, microbatch) for stage in range(stages) for microbatch in range(microbatches)]


def test_one_state_gives_one_list_of_seeds_all_different() -> None:
    before = default()
    first, second = all_of(Seeds(3, 4), 3, 4), all_of(Seeds(3, 4), 3, 4)
    assert first == second and len(set(first)) == 12
    assert torch.equal(default(), before)
    torch.rand(1)
    assert not {*first} & {*all_of(Seeds(3, 4), 3, 4)}


@pytest.mark.parametrize("drew", [False, True])
def test_the_default_generator_goes_on_in_the_same_way_after_every_pass_that_drew(drew: bool) -> None:
    found = []
    for stages in (1, 3):
        torch.manual_seed(0)
        seeds = Seeds(stages, 4)
        seeds.drew = drew
        seeds.settle()
        found.append(default())
    assert torch.equal(*found)


@pytest.mark.parametrize("drew", [False, True])
def test_what_drew_from_the_default_generator_itself_is_told(drew: bool) -> None:
    seeds = Seeds(2, 2)
    torch.rand(1)
    seeds.drew = drew
    assert not seeds.settle()
    assert Seeds(0, 0).settle(), "of no microbatch"


@pytest.mark.parametrize("situation", [FakeTensorMode, lambda: torch.device("meta"), Seen, torch.inference_mode])
def test_seeds_and_numbers_are_real_whatever_mode_the_caller_is_in(situation: Callable[[], Any]) -> None:
    expected, before = all_of(Seeds(2, 2), 2, 2), default()
    for drew in (False, True):
        with situation():
            seeds = Seeds(2, 2)
            seeds.drew = drew
            assert seeds.settle()
        assert all_of(seeds, 2, 2) == expected
        assert torch.equal(default(), before) is not drew


@pytest.mark.cuda
@pytest.mark.parametrize("whole", [False, True])
def test_a_device_repeats_its_draws_inside_and_is_as_it_was_after(whole: bool, monkeypatch: Any) -> None:
    if whole:  # As on a device whose generator has more to it than a seed and an offset.
        monkeypatch.setattr(rng, "_generator", lambda device: None)
    device = torch.device("cuda", 0)
    state = DeviceState(device)
    assert not state.moved
    first = torch.rand(9, device=device)
    assert state.moved
    torch.cuda.manual_seed(2**64 - 3)
    torch.rand(5, device=device)
    before = torch.cuda.get_rng_state(device)
    with pytest.raises(KeyError), state.restored():
        assert not state.moved and torch.equal(torch.rand(9, device=device), first)
        torch.cuda.manual_seed(3)
        raise KeyError
    assert torch.equal(torch.cuda.get_rng_state(device), before)
