"""The streams of a stage's backward, noted: which one waits for which, and what is held for how long."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.core import stream
from splitpipe.core.graph import LAST, rank_of, reserve
from splitpipe.deferral.accumulator import Sums
from splitpipe.deferral.function import Context
from splitpipe.deferral.owners import Weight
from splitpipe.deferral.pending import PendingGrad, WeightGroup
from splitpipe.deferral.stash import Stash, Stashes, _most
from splitpipe.deferral.streams import BackwardStreams, Reads
from splitpipe.training.flush import Flush
from splitpipe.training.ledger import Ledger
from tests.deferral.test_stash import Buffer, Logged, Scale, seen

CPU = torch.device("cpu")
#: No device has it, and no memory.
META = torch.device("meta")


@dataclass(eq=False)
class Noted:
    """A stream that notes what it waits for: others by name, and of their events the number."""

    name: str
    waited: list[Any] = field(default_factory=list)
    marks: int = 0
    device = META


class Streams:
    """The two streams of a backward, which note; this thread's, whose memory which one holds, spent events."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compute: Any = Noted("compute")
        self.side: Any = Noted("side")
        self.now: Any = self.compute
        self.used: list[str] = []
        self.held: list[tuple[Tensor, str]] = []
        self.spent: list[Any] = []
        patch.setattr(stream, "current", lambda device: self.now)
        patch.setattr(stream, "wait", lambda found, other: found.waited.append(other.name))
        patch.setattr(stream, "mark", self._mark)
        patch.setattr(stream, "wait_for", self._wait_for)
        patch.setattr(stream, "spent", self._spend)
        patch.setattr(stream, "use", self._use)
        patch.setattr(stream, "hold", lambda x, on: None if on is None else self.held.append((x, on.name)))

    def both(self, side: bool = True) -> BackwardStreams:
        return BackwardStreams(CPU, self.compute, self.side if side else None)

    def _mark(self, found: Any) -> Any:
        if found is None:
            return None
        found.marks += 1
        return found.name, found.marks

    def _wait_for(self, found: Any, event: Any) -> None:
        if found is not None and event is not None:
            assert event not in self.spent, "an event that may have been recorded again"
            found.waited.append(event)

    def _spend(self, event: Any) -> None:
        assert event not in self.spent, "an event given back twice is recorded by two at once"
        if event is not None:
            self.spent.append(event)

    @contextmanager
    def _use(self, found: Any) -> Iterator[None]:
        before = self.now
        if found is not None:
            self.now = found
            self.used.append(found.name)
        yield
        self.now = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


class Doing:
    """What computes weight gradients: it says of how many parts, on which stream."""

    def __init__(self, streams: Streams | None = None) -> None:
        self.streams = streams
        self.done: list[Any] = []

    def accumulate(self, totals: Any, parts: Any) -> None:
        self.done.append(len(parts) if self.streams is None else (len(parts), self.streams.now.name))


def stashes(both: BackwardStreams, limit: int | None = None) -> Stashes:
    return Stashes(both, limit, {}, lambda *_: None)


def made(store: Stashes, function: Any, weight: Tensor) -> WeightGroup:
    return store.make(None, function, [Weight(weight, None, ())])


def left(grad: Tensor, *saved: Tensor | None) -> PendingGrad:
    found = Context(True, (True,))
    found.save_for_weight(*saved)
    return PendingGrad(found, grad)


def test_reads_of_the_side_stream_are_held(streams: Streams) -> None:
    reads = Reads(streams.both())
    tensors = [torch.ones(2), torch.ones(2)]
    alive = [weakref.ref(x) for x in tensors]
    reads.add([tensors.pop()])
    assert (alive[0]() is None, alive[1]() is None, streams.compute.waited) == (False, False, [])
    reads.add([tensors.pop()])
    assert (alive[0]() is None, alive[1]() is None, streams.compute.waited) == (False, True, [("side", 1)])
    for _ in range(2):
        reads.release()
        assert (alive[0]() is None, streams.compute.waited) == (True, [("side", 1), ("side", 2)])
        assert streams.spent == [("side", 1), ("side", 2)]


def test_the_side_stream_and_compute_wait_for_each_other(streams: Streams) -> None:
    function, store, weight = Doing(streams), stashes(streams.both(), 2**30), torch.ones(2)
    stash, weights = Stash(store), made(store, function, weight)
    grads = [torch.ones(2) for _ in range(3)]
    alive = [weakref.ref(x) for x in grads]
    for grad in grads:
        stash.leave([(weights, left(grad))], False)
    assert (streams.side.waited, streams.compute.waited) == (["compute"] * 3, [])
    # A layer may have made it on a stream of its own.
    assert [(x is grad, on) for (x, on), grad in zip(streams.held, grads)] == [(True, "compute")] * 3
    streams.held.clear()
    del grad, grads
    with torch.no_grad(), stream.use(streams.side):
        stash.gradients([weight])
    assert function.done == [(3, "side")]
    assert streams.compute.waited == [("side", 1)]
    assert streams.spent == [("side", 1)]
    assert all(found() is None for found in alive)


def test_tensors_that_w_reads_are_held(streams: Streams) -> None:
    store = stashes(streams.both(), 0)
    stash, weights, grads = Stash(store), made(store, Doing(), torch.ones(2)), [torch.ones(2), torch.ones(2)]
    alive = [weakref.ref(x) for x in grads]
    for number in range(2):
        stash.leave([(weights, left(grads.pop(0)))], False)
        streams.held.clear()  # It keeps them itself, for this test.
        assert [found() is not None for found in alive] == [[True, True], [False, True]][number]
    assert streams.compute.waited == [("side", 1)]
    stash.drain()
    assert (streams.compute.waited, alive[1]()) == ([("side", 1), ("side", 2)], None)


def test_compute_waits_after_a_failed_backward_too(streams: Streams) -> None:
    store = stashes(streams.both(), 0)
    stash, weights = Stash(store), made(store, Doing(), torch.ones(2))
    stash.leave([(weights, left(torch.ones(2)))], False)
    assert streams.compute.waited == []
    del stash
    assert streams.compute.waited == [("side", 1)]


def test_pending_gradients_belong_to_the_compute_stream(streams: Streams) -> None:
    store, grad, saved = stashes(streams.both(), 2**30), torch.ones(2), torch.ones(2)
    Stash(store).leave([(made(store, Doing(), torch.ones(2)), left(grad, saved, None))], False)
    assert [(x is grad, x is saved, on) for x, on in streams.held] == [
        (True, False, "compute"), (False, True, "compute")
    ]


def test_early_weight_gradients_run_on_the_side_stream(streams: Streams) -> None:
    function, store = Doing(streams), stashes(streams.both(), 0)
    Stash(store).leave([(made(store, function, torch.ones(2)), left(torch.ones(2)))], False)
    assert (function.done, streams.now) == ([(1, "side")], streams.compute)


def test_an_accelerator_may_hold_a_sixteenth_of_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(total_memory=16 * 100 + 15))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    _most.cache_clear()
    try:
        function, store = Doing(), stashes(BackwardStreams(META, None, None))
        stash, weights = Stash(store), made(store, function, torch.ones(10))  # 40 bytes, which are free.
        for _ in range(35):
            stash.leave([(weights, left(torch.ones(1)))], False)
        assert function.done == []
        stash.leave([(weights, left(torch.ones(1)))], False)
        assert function.done == [36]
    finally:
        _most.cache_clear()


def test_flush_comes_last_on_the_side_stream(streams: Streams) -> None:
    reserve(1)
    weight, store = torch.ones(2, requires_grad=True), stashes(streams.both())
    phony = store.flushing([weight], partial(Flush.apply, store, [weight]))
    node: Any = phony.grad_fn
    ((view, _),) = node.next_functions
    assert (rank_of(phony), view._sequence_nr()) == (LAST, LAST)
    assert streams.used == ["compute", "side"]


def test_scheduled_pending_gradients_belong_to_the_compute_stream(streams: Streams) -> None:
    ledger, grad = Ledger(Sums(), streams.both(side=False), {0}, lambda *_: None), torch.ones(2)
    weights = ledger.make(None, Doing(), [Weight(torch.ones(2), None, ())])
    ledger.leave(weights, left(grad), 0)
    assert [(x is grad, on) for x, on in streams.held] == [(True, "compute")]
    ledger.backward_weight([0])
    assert weights.function.done == [1]


def test_a_schedule_lets_go_of_the_gradient_of_a_view_with_its_w() -> None:
    watched: list[weakref.ref[Buffer]] = []
    alive: list[int] = []

    class Kept(Logged):
        @staticmethod
        def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor]:
            alive.append(sum(reference() is not None for reference in watched))
            return (seen(ctx.saved_for_weight[0][0], watched),)

    class Viewed(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return Kept.apply(x, self.weight.view(-1), **self.options)

    gc.disable()
    try:
        layers = nn.Sequential(Scale(4, "0.0", []), Viewed(4, "1.0", []))
        model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=3, schedule="zb-h1",
                          loss_fn=nn.functional.mse_loss)
        model(torch.randn(6, 4), target=torch.randn(6, 4))
        assert alive == [0, 1, 0]  # The first one is the sum, until there is a second to add.
    finally:
        gc.enable()
