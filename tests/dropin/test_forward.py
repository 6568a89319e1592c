"""Clock cycles, lanes and skips: what runs when, what goes where, and in which order backward."""
from __future__ import annotations

import copy
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, is_recomputing
from splitpipe.dropin import forward
from splitpipe.dropin.forward import clock_cycles
from splitpipe.skip import Namespace, pop, skippable, stash
from tests.helpers.deferring import Call
from tests.helpers.twin import Note, assert_same, assert_transparent, twins


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.layer(x))
        return x.tanh()


@skippable(pop=["skip"])
class Pop(nn.Module):
    def __init__(self, use: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.use = use

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return self.layer(x) + skip.sin() if self.use else self.layer(x)


@skippable(stash=["numbers", "nothing", "nested"])
class StashOdd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("numbers", x.detach().argmax(-1))
        yield stash("nothing", None)
        yield stash("nested", (x * 2, [x.detach(), 3]))
        return x * 1


@skippable(pop=["numbers", "nothing", "nested"])
class PopOdd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        numbers = yield pop("numbers")
        nothing = yield pop("nothing")
        double, (still, three) = yield pop("nested")
        assert nothing is None and not numbers.is_floating_point() and not still.requires_grad
        return x * numbers[:, None] + double * three + still


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def test_clock_cycles_of_three_microbatches_on_two_stages() -> None:
    assert list(clock_cycles(3, 2)) == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 4), (4, 1), (3, 5), (6, 3)])
def test_clock_cycles_take_each_task_once_after_those_it_needs(m: int, n: int) -> None:
    done: set[tuple[int, int]] = set()
    for cycle in clock_cycles(m, n):
        for i, j in cycle:
            assert (i, j) not in done and (not i or (i - 1, j) in done) and (not j or (i, j - 1) in done)
        done.update(cycle)
    assert len(done) == m * n and len(list(clock_cycles(m, n))) == m + n - 1


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]])
def test_skips_across_any_number_of_stages(balance: list[int], checkpoint: str) -> None:
    module = nn.Sequential(Stash(), layer(), layer(), layer(), Pop())
    assert_transparent(module, torch.rand(5, 6), balance, chunks=3, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_skips_of_integers_none_and_nestings(checkpoint: str) -> None:
    for balance in ([4], [1, 1, 2], [1, 1, 1, 1]):
        module = nn.Sequential(layer(), StashOdd(), layer(), PopOdd())
        assert_transparent(module, torch.rand(5, 6), balance, chunks=3, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_skip_that_is_popped_and_not_used(checkpoint: str) -> None:
    fired: list[int] = []
    for balance in ([3], [1, 1, 1]):
        model = assert_transparent(nn.Sequential(Stash(), layer(), Pop(use=False)), torch.rand(5, 6), balance, chunks=3,
                                   checkpoint=checkpoint)
        skipped = model[0].module.layer.weight  # type: ignore[union-attr]
        assert skipped.grad is None
        skipped.register_hook(lambda grad: fired.append(1))
        model(torch.rand(5, 6)).sum().backward()
    assert not fired


def test_several_skips_of_one_name_in_namespaces() -> None:
    outer, inner = Namespace(), Namespace()
    module = nn.Sequential(Stash().isolate(outer), Stash().isolate(inner), layer(), Pop().isolate(inner),
                           Pop().isolate(outer))
    for balance in ([2, 3], [1, 1, 1, 1, 1]):
        assert_transparent(copy.deepcopy(module), torch.rand(5, 6), balance, chunks=2, checkpoint="always")


def test_skips_inside_of_layers() -> None:
    module = nn.Sequential(nn.Sequential(layer(), Stash()), layer(), nn.Sequential(Pop(), layer()))
    assert_transparent(module, torch.rand(5, 6), [1, 1, 1], chunks=2, checkpoint="always")


def test_skips_that_do_not_match_are_refused_when_wrapping() -> None:
    with pytest.raises(TypeError, match="skip"):
        SplitPipe(nn.Sequential(Stash(), layer()), [2], devices=["cpu"])


def numbered(rows: int) -> Tensor:
    """A batch whose rows have their number in them."""
    return torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 2)


class Numbered(nn.Module):
    """Notes the microbatch, as its rows say, and its own number in backward; makes as many nodes as it is told."""

    def __init__(self, index: int, order: list[tuple[int, int]], nodes: int = 1) -> None:
        super().__init__()
        self.index, self.order, self.nodes = index, order, nodes
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0].item())
        for _ in range(self.nodes):  # Each worker counts those that it makes.
            x = x * self.weight
        return Note.apply(x, self.order, (number, self.index))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_stage_goes_backward_in_the_reverse_order_of_its_forward(checkpoint: Any) -> None:
    order: list[tuple[int, int]] = []

    m, n = 4, 3
    layers = nn.Sequential(*[Numbered(index, order) for index in range(n)])
    model = SplitPipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint)
    model(numbered(m)).sum().backward()
    for j in range(n):
        assert [i for i, stage in order if stage == j] == list(reversed(range(m)))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("nodes", [(1, 9, 1), (9, 1, 1), (1, 1, 9)])
def test_on_the_cpu_backward_is_through_with_a_microbatch_before_it_begins_the_next(
    nodes: tuple[int, ...], checkpoint: Any
) -> None:
    order: list[tuple[int, int]] = []

    m, n = 4, 3
    layers = nn.Sequential(*[Numbered(index, order, nodes[index]) for index in range(n)])
    model = SplitPipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint)
    for _ in range(4):
        order.clear()
        model(numbered(m)).sum().backward()
        assert order == [(i, j) for i in reversed(range(m)) for j in reversed(range(n))]


@pytest.mark.parametrize("nodes", [(1, 9, 1), (9, 1, 1), (1, 1, 9)])
def test_so_it_is_where_hooks_of_the_callers_see_what_is_saved(nodes: tuple[int, ...]) -> None:
    order: list[tuple[int, int]] = []

    m, n = 4, 3
    layers = nn.Sequential(*[Numbered(index, order, nodes[index]) for index in range(n)])
    model = SplitPipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint="never")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y = model(numbered(m))
    y.sum().backward()
    assert order == [(i, j) for i in reversed(range(m)) for j in reversed(range(n))]


def test_of_two_stages_that_fail_in_one_clock_cycle_the_first_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, fail = threading.Event(), forward.Forward._fail

    def note(run: Any, error: BaseException, clock: int, stage: int) -> None:
        fail(run, error, clock, stage)
        noted.set()

    def first(x: Tensor) -> Tensor:
        if x[0, 0] == 1:
            assert noted.wait(60)
            raise KeyError
        return x

    def second(x: Tensor) -> Tensor:
        raise ValueError

    monkeypatch.setattr(forward.Forward, "_fail", note)
    model = SplitPipe(nn.Sequential(Call(first), Call(second)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    with pytest.raises(KeyError):
        model(torch.tensor([[0.0], [1.0]]))


@pytest.mark.parametrize("nodes", [1, 9])
def test_on_the_cpu_a_stage_is_recomputed_when_those_that_use_its_skips_are_through(nodes: int) -> None:
    order: list[Any] = []

    @skippable(stash=["skip"])
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Any:
            if is_recomputing():
                order.append("again")
            for _ in range(nodes):
                x = x * self.weight
            yield stash("skip", x)
            return x * 2

    @skippable(pop=["skip"])
    class Last(nn.Module):
        def forward(self, x: Tensor) -> Any:
            skip = yield pop("skip")
            return Note.apply(x, order, "through").sin() * skip

    model = SplitPipe(nn.Sequential(First(), Last()), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="always")
    for _ in range(3):
        order.clear()
        model(torch.rand(3, 2)).sum().backward()
        assert order == ["through", "again"] * 3


class Gate(nn.Module):
    """Waits in one microbatch for the others' sign, then notes, and may raise."""

    def __init__(self, at: int, waits: threading.Event | None = None, opens: threading.Event | None = None,
                 error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.waits, self.opens, self.error = at, waits, opens, error
        self.seen: list[int] = []

    def __deepcopy__(self, memo: object) -> Gate:
        return self

    def forward(self, x: Tensor) -> Tensor:
        number = len(self.seen)
        self.seen.append(number)
        if number == self.at:
            if self.waits is not None:
                assert self.waits.wait(60)
            if self.opens is not None:
                self.opens.set()
            if self.error is not None:
                raise self.error
        return x * 1


def test_a_stage_goes_on_while_the_next_one_is_late() -> None:
    passed = threading.Event()
    # The second stage's first microbatch ends when the first stage has come to its last one.
    layers = nn.Sequential(Gate(4, opens=passed), Gate(0, waits=passed))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=5)
    assert model(torch.rand(5, 2)).shape == (5, 2)


def test_without_grad_a_stage_is_at_most_two_values_ahead() -> None:
    running, most = [0, 0], [0]
    far = threading.Event()

    class Count(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, x: Tensor) -> Tensor:
            if self.index and not running[1]:
                assert far.wait(60)
            running[self.index] += 1
            most[0] = max(most[0], running[0] - running[1])
            if running[0] == 3:
                far.set()
            return x * 1

    model = SplitPipe(nn.Sequential(Count(0), Count(1)), [1, 1], devices=["cpu"] * 2, chunks=12)
    with torch.no_grad():
        model(torch.rand(12, 2))
    assert running == [12, 12] and most[0] <= 4  # Two that wait, one in each stage.


@pytest.mark.parametrize("later_first", [True, False])
def test_the_failure_of_the_earlier_clock_cycle_is_raised_whoever_was_faster(later_first: bool) -> None:
    sign = threading.Event()
    later = Gate(2, opens=sign if later_first else None, waits=None if later_first else sign, error=ValueError("2"))
    earlier = Gate(0, waits=sign if later_first else None, opens=None if later_first else sign, error=KeyError("1"))
    layers = nn.Sequential(later, earlier, Gate(9))
    model = SplitPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4)
    with pytest.raises(KeyError, match="1"):
        model(torch.rand(4, 2))
    later.error = earlier.error = None
    assert model(torch.rand(4, 2)).shape == (4, 2)


def test_an_interrupted_stage_begins_no_other_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, stop = threading.Event(), forward.Forward._stop
    monkeypatch.setattr(forward.Forward, "_stop", lambda self: (stop(self), stopped.set()))
    begun: list[Tensor] = []

    class Interrupts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            begun.append(x)
            signal.raise_signal(signal.SIGINT)
            assert stopped.wait(60)
            return x * 1

    model = SplitPipe(nn.Sequential(Interrupts()), [1], devices=["cpu"], chunks=3)
    with pytest.raises(KeyboardInterrupt):
        model(torch.rand(3, 2))
    assert len(begun) == 1


def test_what_came_before_a_failure_by_the_clock_is_done_and_what_follows_it_is_not() -> None:
    layers = nn.Sequential(Gate(9), Gate(1, error=ValueError("no")), Gate(9))
    model = SplitPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=6)
    with pytest.raises(ValueError, match="no") as info:
        model(torch.rand(6, 2))
    assert "layer '1' (Gate), stage 1 (cpu), microbatch 1 of 6" in info.value.__notes__[0]
    assert layers[1].seen == [0, 1] and layers[2].seen == [0]
    assert len(layers[0].seen) >= 3


def test_a_failure_of_a_stage_that_skips_is_raised_and_nobody_waits() -> None:
    armed = [True]

    @skippable(stash=["skip"])
    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if armed[0]:
                raise ValueError("no")
            yield stash("skip", x)
            return x * 1

    model = SplitPipe(nn.Sequential(Fail(), layer(), layer(), Pop()), [1, 1, 1, 1], devices=["cpu"] * 4, chunks=3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="no"):
            model(torch.rand(6, 6))
    armed[0] = False
    model(torch.rand(6, 6)).sum().backward()


def test_each_stage_keeps_to_one_thread_and_the_caller_computes_nothing() -> None:
    threads: dict[int, set[str]] = {0: set(), 1: set()}

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, x: Tensor) -> Tensor:
            threads[self.index].add(threading.current_thread().name)
            return x

    model = SplitPipe(nn.Sequential(Layer(0), Layer(1)), [1, 1], devices=["cpu"] * 2, chunks=3)
    for _ in range(3):
        model(torch.rand(3, 2))
    assert len(threads[0]) == len(threads[1]) == 1 and threads[0] != threads[1]
    assert threading.current_thread().name not in threads[0] | threads[1]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_keeps_the_statistics_of_the_batch(checkpoint: Any, momentum: float | None) -> None:
    module = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum), nn.Identity())
    plain, model = twins(module, [1, 1], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    assert list(model.state_dict()) == list(plain.state_dict())
    for size in (8, 7, 8, 2, 5):
        x = torch.randn(size, 3, 4, 4) * 2 + 1
        model(x).square().sum().backward()
        plain(x)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(getattr(model[0], name), getattr(plain[0], name))
    model.eval()
    plain.eval()
    assert_same(model(x), plain(x), "output")


def test_deferred_batch_norm_in_two_places_of_a_stage_is_updated_for_each() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x)
            return self.norm(2 * x + 1)

    plain, model = twins(nn.Sequential(Twice(), nn.Identity()), [1, 1], chunks=4, deferred_batch_norm=True)
    for _ in range(2):
        x = torch.randn(8, 3)
        for each in plain, model:
            each(x)
        assert_same(model[0].norm.running_mean, plain[0].norm.running_mean, "running_mean")


def dropping() -> list[nn.Module]:
    return [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=self.reentrant)


class Depth(nn.Module):
    """Stochastic depth, decided on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if torch.rand(()) < 0.5 else x * 1


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = torch.distributions.Gamma(1.0, 1.0).sample(x.shape)
        return x * noise


DRAWING = {
    "dropout": dropping,
    "attention": lambda: [nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True), nn.Dropout(0.3)],
    "checkpoint": lambda: [Checkpointed(False), nn.Tanh(), Checkpointed(False)],
    "checkpoint, reentrant": lambda: [nn.Linear(6, 6), Checkpointed(True), nn.Dropout(0.2), Checkpointed(True)],
    "host": lambda: [Depth(), nn.Dropout(0.1), Depth(), Depth()],
    "unseen": lambda: [nn.Linear(6, 6), Noise(), nn.Dropout(0.5), Noise()],
}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("name", DRAWING)
def test_a_seeded_run_repeats_and_recomputation_draws_what_forward_drew(name: str, checkpoint: Any) -> None:
    """Repeats: outputs and gradients. And the gradients of all modes agree, so that of a recomputation is right."""
    torch.manual_seed(1)
    module = nn.Sequential(*DRAWING[name]()).double()
    x = torch.rand(6, 3, 6, dtype=torch.float64)
    balance, devices = [1, len(module) - 1], ["cpu", "cpu"]
    model = SplitPipe(copy.deepcopy(module), balance, devices=devices, chunks=3, checkpoint=checkpoint)
    reference = SplitPipe(copy.deepcopy(module), balance, devices=devices, chunks=3, checkpoint="never")
    results = []
    for m in (model, model, model, reference):
        torch.manual_seed(5)
        m.zero_grad()
        outputs = []
        for _ in range(2):
            output = m(x)
            output.square().sum().backward()
            outputs.append(output.detach())
        results.append((outputs, [p.grad.clone() for p in m.parameters()], torch.rand(2)))
    for result in results[1:]:
        assert_same(result, results[0], "run")
    if name != "host":
        assert not torch.equal(results[0][0][0], results[0][0][1])


def test_masks_differ_between_microbatches_stages_and_passes() -> None:
    model = SplitPipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], devices=["cpu"] * 2, chunks=4)
    x = torch.ones(4, 64)
    first, second = model(x), model(x)
    rows = [*first, *second]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    share = (torch.stack(rows) > 0).float().mean()
    assert 0.15 < share < 0.35


def test_the_random_state_moves_on_only_if_something_drew() -> None:
    quiet = SplitPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu"] * 2, chunks=2)
    loud = SplitPipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), [1, 1], devices=["cpu"] * 2, chunks=2)
    for model, moves in ((quiet, False), (loud, True)):
        for _ in range(3):
            before = torch.get_rng_state()
            model(torch.ones(4, 2))
            assert torch.equal(before, torch.get_rng_state()) != moves
    before = torch.get_rng_state()
    loud.eval()(torch.ones(4, 2))
    assert torch.equal(before, torch.get_rng_state())


def test_buffers_shared_by_stages_are_updated_in_order() -> None:
    class Count(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            value = int(self.table)
            self.table.fill_(value + 1)
            return x * 1

    table = torch.zeros((), dtype=torch.int64)
    model = SplitPipe(nn.Sequential(Count(table), Count(table), Count(table)), [1, 1, 1], devices=["cpu"] * 3, chunks=5,
                      checkpoint="always")
    for step in range(1, 4):
        model(torch.rand(5, 2, requires_grad=True)).sum().backward()
        assert int(table) == 15 * step
