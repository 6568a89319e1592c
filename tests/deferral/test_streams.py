"""The streams of a stage's backward, noted: which one waits for which, and what is held for how long."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from splitpipe.deferral.pending import WeightGroup
from splitpipe.deferral.stash import Stash, Stashes, _most
from splitpipe.deferral.streams import BackwardStreams, Reads
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
        patch.setattr(stream, "is_current", lambda found: found in (None, self.now))
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


def group(function: Any, weight: Tensor) -> WeightGroup:
    return WeightGroup(function, (weight,), (True,), {}, [])


def context(*saved: Tensor | None) -> Context:
    found = Context(True, (True,))
    found.save_for_weight(*saved)
    return found


def test_what_the_side_stream_reads_is_held_until_the_compute_stream_has_waited_for_it(streams: Streams) -> None:
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


def test_a_layer_is_apart_if_it_computes_on_another_stream_than_its_stage(streams: Streams) -> None:
    both = streams.both()
    assert not both.on_other_stream
    with stream.use(streams.side):
        assert both.on_other_stream
    streams.now = None
    assert not BackwardStreams(CPU, None, None).on_other_stream


@pytest.mark.parametrize("side", [False, True])
def test_what_a_layer_that_is_apart_leaves_is_waited_for_and_held(side: bool, streams: Streams) -> None:
    x, y = torch.ones(2), torch.ones(2)
    streams.now = Noted("own")
    streams.both(side).join((x, None, y))
    assert streams.compute.waited == ["own"]
    assert [(given is x, given is y, on) for given, on in streams.held] == [
        (True, False, "side" if side else "compute"), (False, True, "side" if side else "compute")
    ]


def test_the_side_stream_waits_for_the_last_part_alone_and_compute_for_the_side_stream(streams: Streams) -> None:
    function, stash = Doing(streams), Stash(streams.both(), 2**30)
    weights = group(function, torch.ones(2))
    grads = [torch.ones(2) for _ in range(3)]
    alive = [weakref.ref(x) for x in grads]
    for grad in grads:
        stash.put(weights, context(), grad, False)
    del grad, grads
    with torch.no_grad(), stream.use(streams.side):
        stash.flush(weights)
    assert function.done == [(3, "side")]
    assert (streams.side.waited, streams.compute.waited, streams.held) == ([("compute", 3)], [("side", 1)], [])
    assert streams.spent == [*(("compute", number) for number in (1, 2, 3)), ("side", 1)]
    assert all(found() is None for found in alive)


def test_compute_waits_for_the_side_stream_after_a_failed_backward_too(streams: Streams) -> None:
    stash, weights = Stash(streams.both(), 0), group(Doing(), torch.ones(2))
    stash.put(weights, context(), torch.ones(2), False)
    assert streams.compute.waited == []
    del stash
    assert streams.compute.waited == [("side", 1)]


def test_a_part_of_a_layer_that_is_apart_is_waited_for_before_it_is_marked(streams: Streams) -> None:
    stash, grad, saved = Stash(streams.both(), 2**30), torch.ones(2), torch.ones(2)
    streams.now = Noted("own")
    stash.put(group(Doing(), torch.ones(2)), context(saved, None), grad, False)
    assert (streams.compute.waited, streams.compute.marks) == (["own"], 1)
    assert [(x is grad, x is saved, on) for x, on in streams.held] == [(True, False, "side"), (False, True, "side")]


def test_what_is_computed_early_is_computed_on_the_side_stream(streams: Streams) -> None:
    function, stash = Doing(streams), Stash(streams.both(), 0)
    stash.put(group(function, torch.ones(2)), context(), torch.ones(2), False)
    assert (function.done, streams.now) == ([(1, "side")], streams.compute)


def test_what_a_second_backward_reads_again_is_held_for_the_side_stream_where_autograd_records(
    streams: Streams
) -> None:
    stash, weights, grad = Stash(streams.both(), 2**30), group(Doing(), torch.ones(2)), torch.ones(2)
    stash.put(weights, context(), grad, False)
    with torch.enable_grad():
        stash.flush(weights)
    assert [(x is grad, on) for x, on in streams.held] == [(True, "side")]


def test_an_accelerator_may_hold_a_sixteenth_of_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(total_memory=16 * 100 + 15))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    _most.cache_clear()
    try:
        function, stash = Doing(), Stash(BackwardStreams(META, None, None), None)
        weights = group(function, torch.ones(10))  # 40 bytes, which are free.
        for _ in range(35):
            stash.put(weights, context(), torch.ones(1), False)
        assert function.done == []
        stash.put(weights, context(), torch.ones(1), False)
        assert function.done == [36]
    finally:
        _most.cache_clear()


def test_flush_comes_last_on_the_side_stream_and_views_of_its_weights_on_the_compute_stream(streams: Streams) -> None:
    reserve(1)
    weight = torch.ones(2, requires_grad=True)
    phony = Stashes(streams.both(), None).phony(group(Doing(), weight), [weight])
    node: Any = phony.grad_fn
    ((view, _),) = node.next_functions
    assert (rank_of(phony), view._sequence_nr()) == (LAST, LAST)
    assert streams.used == ["compute", "side"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_weight_gradients_of_bw_are_computed_on_the_stream_of_the_stage(elsewhere: bool, streams: Streams) -> None:
    function = Doing(streams)
    ledger = Ledger(Sums(), streams.both(side=False), {0}, lambda roots, grads: None)
    weight, grad = torch.ones(2, requires_grad=True), torch.ones(2)
    weights = group(function, weight)
    ledger.phony(weights, [weight])
    if elsewhere:
        streams.now = Noted("own")
    ledger.put(weights, context(), grad, 0, False)
    assert function.done == [(1, "compute")]
    assert streams.compute.waited == (["own"] if elsewhere else [])


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
