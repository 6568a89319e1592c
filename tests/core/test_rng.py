"""A microbatch draws the numbers of its seed in every manner; the default generator outside of it stays as it is."""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from splitpipe.core import generator
from splitpipe.core.rng import DeviceState, Manner, Numbers, Run, Seeds

QUIET, SEEN, UNSEEN, UNKNOWN = Manner.QUIET, Manner.SEEN, Manner.UNSEEN, Manner.UNKNOWN
Call = Callable[[], Any]


def built(make: Callable[[], Any]) -> Any:
    """A layer whose parameters are the same whichever test asks for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make()


X = torch.linspace(-2, 2, 48).view(4, 2, 6)
ATTENTION = built(lambda: nn.MultiheadAttention(6, 2, dropout=0.5))
LSTM = built(lambda: nn.LSTM(6, 6, num_layers=2, dropout=0.5))
GRU = built(lambda: nn.GRU(6, 6, num_layers=2, dropout=0.5))
ENCODER = built(lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5))
LINEAR = built(lambda: nn.Linear(6, 6))


def leaf() -> Tensor:
    return X.clone().requires_grad_()


def without_grad() -> Tensor:
    with torch.no_grad():
        return F.dropout(X)


def seeding() -> Tensor:
    torch.manual_seed(5)
    return F.dropout(X)


def both() -> tuple[Tensor, Tensor, Tensor]:
    return F.dropout(X), torch.ops.aten.bernoulli(X.sigmoid()), F.dropout(X)


LAYERS: dict[str, tuple[Manner, Call]] = {
    "linear": (QUIET, lambda: LINEAR(X)),
    "dropout": (SEEN, lambda: F.dropout(X)),
    "dropout module": (SEEN, lambda: nn.Dropout(0.3)(X)),
    "dropout in place": (SEEN, lambda: F.dropout(X.clone(), inplace=True)),
    "dropout1d": (SEEN, lambda: F.dropout1d(X)),
    "dropout2d": (SEEN, lambda: F.dropout2d(X[None])),
    "alpha dropout": (SEEN, lambda: F.alpha_dropout(X, training=True)),
    "feature alpha dropout": (SEEN, lambda: F.feature_alpha_dropout(X, training=True)),
    "rrelu": (SEEN, lambda: F.rrelu(X, training=True)),
    "gumbel softmax": (SEEN, lambda: F.gumbel_softmax(X, hard=True)),
    "attention": (SEEN, lambda: ATTENTION(X, X, X)),
    "scaled dot product": (SEEN, lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5)),
    "encoder layer": (SEEN, lambda: ENCODER(X)),
    "lstm": (SEEN, lambda: LSTM(X)),
    "gru": (SEEN, lambda: GRU(X)),
    "rand": (SEEN, lambda: X + torch.rand(4, 2, 6)),
    "factories": (SEEN, lambda: (torch.randn(3), torch.randint(9, (3,)), torch.randperm(9), torch.rand_like(X))),
    "multinomial": (SEEN, lambda: X.abs().view(-1).multinomial(3)),
    "in place": (SEEN, lambda: (X.clone().normal_(), X.clone().uniform_(), X.clone().bernoulli_(0.5),
                                X.clone().exponential_(), X.clone().random_(9), X.clone().geometric_(0.5),
                                X.clone().cauchy_(), X.clone().log_normal_())),
    "checkpoint": (UNSEEN, lambda: checkpoint(F.dropout, leaf(), use_reentrant=False)),
    "reentrant checkpoint": (UNSEEN, lambda: checkpoint(F.dropout, leaf(), use_reentrant=True)),
    "no_grad": (UNSEEN, without_grad),
    "initialisation": (UNSEEN, lambda: nn.init.normal_(torch.empty(3))),
    "gamma": (UNSEEN, lambda: torch.distributions.Gamma(X.abs() + 1, torch.ones(())).sample()),
    "aten": (UNSEEN, lambda: torch.ops.aten.bernoulli(X.sigmoid())),
    "seen and unseen": (UNSEEN, both),
    "seeding": (UNSEEN, seeding),
}
DRAWING = sorted(LAYERS.keys() - {"linear", "seeding"})
manners = pytest.mark.parametrize("manner", Manner, ids=lambda manner: manner.value)
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


def right(name: str) -> list[Manner]:
    """The manners in which a layer may run, once its own one is found: those that see more do too."""
    return {QUIET: list(Manner), SEEN: [UNKNOWN, QUIET, SEEN, UNSEEN], UNSEEN: [UNKNOWN, UNSEEN]}[LAYERS[name][0]]


@layers
def test_the_numbers_are_those_of_the_seed_in_every_manner(name: str) -> None:
    _, call = LAYERS[name]
    for seed in (1, 2**61):
        expected = alone(seed, call)
        for manner in right(name):
            before = default()
            run = Numbers(seed, manner, again=True).draw(call)
            assert same(run.value, expected), manner
            assert torch.equal(default(), before), manner
            if manner is not UNKNOWN:
                continue
            later = Numbers(seed, run.manner).draw(call)
            assert same(later.value, expected), run.manner
            assert torch.equal(default(), before), run.manner


@pytest.mark.parametrize("name", DRAWING)
def test_other_seeds_give_other_numbers(name: str) -> None:
    _, call = LAYERS[name]
    for manner in right(name):
        first, second = (Numbers(seed, manner, again=True).draw(call).value for seed in (1, 2))
        assert not same(first, second), manner


@layers
def test_the_first_run_finds_the_manner_and_the_next_ones_keep_it(name: str) -> None:
    manner, call = LAYERS[name]
    run = Numbers(1, UNKNOWN).draw(call)
    assert (run.manner, run.drew) == (manner, manner is not QUIET)
    later = Numbers(2, run.manner, again=True).draw(call)
    assert (later.manner, later.drew) == (manner, manner is not QUIET)


def test_dropout_that_draws_nothing_yet_is_seen_only_where_it_may_be_recomputed() -> None:
    def call() -> Tensor:
        return F.dropout(X, 0.0)

    for grad, manner in ((True, SEEN), (False, QUIET)):
        with torch.set_grad_enabled(grad):
            run = Numbers(1, UNKNOWN).draw(call)
        assert (run.manner, run.drew) == (manner, False)


def test_a_quiet_stage_that_starts_to_draw_is_found_if_there_will_be_other_runs() -> None:
    probability = [0.0]

    def call() -> Tensor:
        return X if not probability[0] else F.dropout(X, probability[0])

    assert Numbers(1, UNKNOWN).draw(call).manner is QUIET
    probability[0] = 0.5
    run = Numbers(1, QUIET, again=True).draw(call)
    assert run.manner is SEEN and run.drew and same(run.value, alone(1, call))


def test_a_quiet_stage_without_other_runs_is_left_alone() -> None:
    run = Numbers(1, QUIET).draw(lambda: tuple(_get_current_function_mode_stack()))
    assert run == Run((), False, QUIET)


@pytest.mark.parametrize("manner", [UNKNOWN, QUIET, UNSEEN], ids=lambda manner: manner.value)
def test_blind_runs_have_no_mode(manner: Manner) -> None:
    def call() -> tuple[Any, ...]:
        assert _get_current_function_mode_stack() == []
        return (X,) if manner is QUIET else (F.dropout(X),)

    before = default()
    numbers = Numbers(3, manner, again=True, blind=True)
    run = numbers.draw(call)
    assert same(run.value, alone(3, call)) and torch.equal(default(), before)
    assert (run.manner, run.drew) == ((QUIET, False) if manner is QUIET else (UNSEEN, True))
    again: list[Any] = []
    numbers.redraw(lambda: again.append(call()))
    assert same(again[0], run.value)


def test_a_blind_run_that_draws_nothing_is_quiet() -> None:
    run = Numbers(3, UNKNOWN, blind=True).draw(lambda: 1)
    assert run == Run(1, False, QUIET)


@layers
def test_a_second_run_repeats_the_first_and_leaves_every_generator_as_it_was(name: str) -> None:
    _, call = LAYERS[name]
    own = torch.Generator().manual_seed(4)

    def layer() -> tuple[Any, Tensor]:
        return call(), torch.rand(3, generator=own)

    for manner in right(name):
        numbers = Numbers(1, manner, again=True)
        first = numbers.draw(layer).value
        torch.rand(5)
        torch.rand(5, generator=own)
        before, before_own = default(), own.get_state()
        for _ in range(2):
            again: list[Any] = []
            numbers.redraw(lambda: again.append(layer()))  # noqa: B023
            assert same(again[0], first), manner
            assert torch.equal(default(), before) and torch.equal(own.get_state(), before_own), manner


def test_generators_of_the_layers_own_draw_on_from_run_to_run() -> None:
    own = torch.Generator().manual_seed(4)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(4))
    for number, manner in enumerate((UNKNOWN, QUIET)):
        run = Numbers(1, manner, again=True).draw(lambda: torch.rand(3, generator=own))
        assert torch.equal(run.value, expected[3 * number:3 * number + 3])
        assert (run.manner, run.drew) == (QUIET, False)


@manners
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_call_that_raises_leaves_every_generator_and_the_lock(manner: Manner, error: type[BaseException]) -> None:
    own = torch.Generator().manual_seed(4)
    wrong = [False]

    def call() -> tuple[Tensor, Tensor]:
        value = torch.rand(2), torch.rand(2, generator=own)
        if wrong[0]:
            raise error
        return value

    numbers = Numbers(1, manner, again=True)
    first = numbers.draw(call)
    before, before_own = default(), own.get_state()
    wrong[0] = True
    with pytest.raises(error):
        numbers.redraw(call)
    assert torch.equal(default(), before) and torch.equal(own.get_state(), before_own)
    with pytest.raises(error):
        Numbers(1, manner, again=True).draw(call)
    assert torch.equal(default(), before) and _get_current_function_mode_stack() == []
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(lambda: Numbers(1, UNSEEN).draw(lambda: torch.rand(2))).result()
    assert torch.equal(run.value, first.value[0])


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@layers
def test_modes_of_the_users_see_what_they_see_without_us(name: str) -> None:
    _, call = LAYERS[name]
    with Recorder() as expected:
        call()
    for manner in right(name):
        with Recorder() as outer, Recorder() as inner:
            run = Numbers(1, manner, again=True).draw(call)
        assert outer.seen == inner.seen == expected.seen, manner
        assert same(run.value, alone(1, call)), manner


def test_draws_for_other_devices_are_not_ours() -> None:
    run = Numbers(1, UNKNOWN).draw(lambda: F.dropout(X.to("meta")))
    assert (run.manner, run.drew) == (QUIET, False)


def test_two_threads_that_draw_in_turns_each_get_their_own_numbers() -> None:
    turn = threading.Barrier(2, timeout=60)

    def layer() -> list[Tensor]:
        found = []
        for _ in range(5):
            turn.wait()
            found.append(F.dropout(X))
            turn.wait()
            found.append(torch.rand(3))
        return found

    def expected() -> list[Tensor]:
        return [x for _ in range(5) for x in (F.dropout(X), torch.rand(3))]

    wanted = [tuple(alone(seed, expected)) for seed in (1, 2)]
    before = default()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(Numbers(seed, SEEN).draw, layer) for seed in (1, 2)]
    assert [same(tuple(run.result().value), value) for run, value in zip(runs, wanted)] == [True, True]
    assert torch.equal(default(), before)


class Asked:
    """A lock that says when a thread has come to it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.threads: set[int] = set()
        self.second = threading.Event()

    def acquire(self, timeout: float) -> bool:
        self.threads.add(threading.get_ident())
        if len(self.threads) == 2:
            self.second.set()
        return bool(self.lock.acquire(timeout=timeout))

    def release(self) -> None:
        self.lock.release()


@pytest.mark.parametrize("manner", [UNKNOWN, UNSEEN], ids=lambda manner: manner.value)
@pytest.mark.parametrize("other", [UNKNOWN, SEEN, UNSEEN], ids=lambda manner: manner.value)
def test_who_comes_while_another_draws_alone_waits(
    manner: Manner, other: Manner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Asked(threading.RLock())
    monkeypatch.setattr(generator._gate, "lock", lock)
    inside = threading.Event()

    def first() -> tuple[Tensor, Tensor]:
        x = torch.rand(3)
        inside.set()
        assert lock.second.wait(60)
        return x, torch.rand(3)

    def second() -> tuple[Tensor, Tensor]:
        return torch.rand(3), torch.rand(3)

    def late() -> Run:
        assert inside.wait(60)
        return Numbers(2, other).draw(second)

    before = default()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(late)
        run = pool.submit(Numbers(1, manner).draw, first)
    assert same(run.result().value, alone(1, second))
    assert same(waiting.result().value, alone(2, second))
    assert torch.equal(default(), before)


@manners
def test_a_stage_may_be_a_pipeline_itself(manner: Manner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 0.01)

    def inner() -> tuple[Tensor, Tensor]:
        with ThreadPoolExecutor(1) as pool:
            here = Numbers(2, UNSEEN).draw(lambda: torch.rand(3)).value
            there = pool.submit(copy_context().run, Numbers(3, manner, again=True).draw, lambda: torch.rand(3))
            return here, there.result().value

    def outer() -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        return torch.rand(3), inner(), torch.rand(3)

    before = default()
    x, (here, there), y = Numbers(1, UNSEEN).draw(outer).value
    assert torch.equal(torch.cat((x, y)), alone(1, lambda: torch.rand(6)))
    assert torch.equal(here, alone(2, lambda: torch.rand(3))) and torch.equal(there, alone(3, lambda: torch.rand(3)))
    assert torch.equal(default(), before)


def test_a_thread_without_the_layers_context_that_the_layer_waits_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 0.01)

    def layer() -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(Numbers(2, UNSEEN).draw, lambda: torch.rand(3)).result()

    before = default()
    with pytest.raises(RuntimeError, match=r"waited 0 s for another stage .*copy_context"):
        Numbers(1, UNSEEN).draw(layer)
    assert torch.equal(default(), before)
    assert same(Numbers(1, UNSEEN).draw(lambda: torch.rand(3)).value, alone(1, lambda: torch.rand(3)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_child_of_a_fork_does_not_wait_for_a_thread_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 1.0)
    inside, done = threading.Event(), threading.Event()

    def hold() -> bool:
        inside.set()
        return done.wait(60)

    expected = alone(2, lambda: torch.rand(3))
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(Numbers(1, UNSEEN).draw, hold)
        try:
            assert inside.wait(60)
            child = os.fork()
            if child == 0:
                failed = 1
                try:
                    failed = int(not torch.equal(Numbers(2, UNSEEN).draw(lambda: torch.rand(3)).value, expected))
                finally:
                    os._exit(failed)
            _, status = os.waitpid(child, 0)
        finally:
            done.set()
        assert holding.result().value is True
    assert os.waitstatus_to_exitcode(status) == 0


def all_of(seeds: Seeds, stages: int, microbatches: int) -> list[int]:
    return [seeds.of(stage, microbatch) for stage in range(stages) for microbatch in range(microbatches)]


def test_one_state_gives_one_list_of_seeds_all_different() -> None:
    before = default()
    first, second = all_of(Seeds(3, 4), 3, 4), all_of(Seeds(3, 4), 3, 4)
    assert first == second and len(set(first)) == 12
    assert torch.equal(default(), before)


def test_the_next_pass_shares_no_seed() -> None:
    found: list[int] = []
    for _ in range(20):
        seeds = Seeds(3, 4)
        seeds.drew = True
        assert seeds.settle()
        found += all_of(seeds, 3, 4)
    assert len(set(found)) == len(found)


def test_a_pass_that_drew_nothing_leaves_the_default_generator_and_one_that_drew_moves_it() -> None:
    before = default()
    seeds = Seeds(2, 2)
    assert seeds.settle() and torch.equal(default(), before)
    seeds.drew = True
    assert seeds.settle() and not torch.equal(default(), before)


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
def test_what_drew_unwatched_is_told(drew: bool) -> None:
    seeds = Seeds(2, 2)
    torch.rand(1)
    seeds.drew = drew
    assert not seeds.settle()


def test_a_pass_of_no_microbatch_has_seeds_to_settle() -> None:
    assert Seeds(0, 0).settle()


@pytest.mark.parametrize("situation", [FakeTensorMode, lambda: torch.device("meta"), Recorder, torch.inference_mode])
def test_seeds_and_numbers_are_real_whatever_mode_the_caller_is_in(situation: Callable[[], Any]) -> None:
    expected, before = all_of(Seeds(2, 2), 2, 2), default()
    for drew in (False, True):
        with situation():
            seeds = Seeds(2, 2)
            seeds.drew = drew
            assert seeds.settle()
        assert all_of(seeds, 2, 2) == expected
        assert torch.equal(default(), before) is not drew


@manners
def test_a_stage_of_fake_tensors_draws_no_real_numbers(manner: Manner) -> None:
    before = default()
    with FakeTensorMode() as fake:
        x = fake.from_tensor(X)
        numbers = Numbers(1, manner, again=True)
        run = numbers.draw(lambda: F.dropout(x))
        numbers.redraw(lambda: F.dropout(x))
    assert run.value.shape == X.shape and not run.drew
    assert type(before) is Tensor and torch.equal(default(), before)


def test_the_cpu_has_no_device_state() -> None:
    state = DeviceState(torch.device("cpu"))
    before = default()
    with state.restored():
        torch.rand(3)
    assert not torch.equal(default(), before)


@pytest.mark.cuda
def test_a_device_repeats_its_draws_inside_and_is_as_it_was_after() -> None:
    device = torch.device("cuda", 0)
    state = DeviceState(device)
    first = torch.rand(9, device=device)
    torch.rand(5, device=device)
    before = torch.cuda.get_rng_state(device)
    with pytest.raises(KeyError), state.restored():
        assert torch.equal(torch.rand(9, device=device), first)
        raise KeyError
    assert torch.equal(torch.cuda.get_rng_state(device), before)
