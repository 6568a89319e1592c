"""What B leaves for W where a schedule says when each is to run.

    B of a microbatch    leaves a part for each call of a split function
    W of a microbatch    computes the weight gradients of its parts, adds them to the worker's sums, and frees them

A ledger belongs to one stage in one pass. Nothing here is autograd's: a call's only edges are to its input and to a
gate, a node that leads nowhere; asked for its gradient, autograd goes through calls whose input needs none.

Guarantee: one thread at a time touches a ledger and its sums. F, B and W of a stage run in its worker,
or in an autograd thread while that worker waits for it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.graph import unleaf
from splitpipe.core.note import add_note
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.deferral.pending import Part, Slot
from splitpipe.deferral.stash import wanted
from splitpipe.deferral.streams import Lane

#: Goes backward from some tensors, or their edges, given the gradients.
Backward = Callable[[Sequence[Any], Sequence[Tensor]], None]


class Ledger:
    """The parts of one stage, by microbatch, until their W.

    Args:
        sums: of the stage.
        lane: the stage's streams.
        fused: microbatches whose weight gradients are computed right after the input gradient of each layer: BW.
        backward: goes on from the gradients of weights that are no parameters.
    """

    def __init__(self, sums: Sums, lane: Lane, fused: Collection[int], backward: Backward) -> None:
        self._sums = sums
        self._backward = backward
        self._lane = lane
        self.fused = fused
        self._gate: Tensor | None = None
        self._totals: dict[Slot, list[Total | None]] = {}
        #: Weights that are no parameters, which the gradients of their slot go on through.
        self._computed: dict[Slot, list[tuple[GradientEdge, Total]]] = {}
        self._parts: dict[int, dict[Slot, list[Part]]] = {}  # By microbatch.
        #: Of functions that count over the whole batch.
        self._whole: dict[Slot, list[Part]] = {}

    @property
    def gate(self) -> GradientEdge | None:
        """The edge that all calls have in common; None if no function was called."""
        return None if self._gate is None else get_gradient_edge(self._gate)

    def phony(self, slot: Slot, weights: Sequence[Tensor]) -> Tensor:
        """As of a Deposit."""
        totals = [self._sums.of(weight) if weight.is_leaf else Total(weight.dtype, weight.shape) for weight in weights]
        given = iter(totals)
        self._totals[slot] = [None if kind is None else next(given) for kind in slot.kinds]
        # Their edges: a later microbatch may write to the tensor, whose node is another one then.
        computed = [(get_gradient_edge(x), total) for x, total in zip(weights, totals) if not x.is_leaf]
        if computed:
            self._computed[slot] = computed
        if self._gate is None:
            self._gate = unleaf(torch.empty(0, device=self._lane.device, requires_grad=True))
        return self._gate

    def sink(self, microbatch: int, now: bool) -> _Sink:
        """As of a Deposit. When what is held back is computed is the schedule's decision, whoever asks for ``now``."""
        return _Sink(self, microbatch)

    def make_room(self) -> None:
        """As of a Deposit: the schedule makes room."""

    def put(self, microbatch: int, slot: Slot, part: Part) -> None:
        """Takes a part."""
        apart = self._lane.apart
        if apart:
            self._lane.join(part.tensors())
        if slot.function.whole:
            self._whole.setdefault(slot, []).append(part)
        elif microbatch in self.fused and slot not in self._computed:
            with stream.use(self._lane.compute) if apart else nullcontext():
                self._compute(slot, [part])
        else:
            self._parts.setdefault(microbatch, {}).setdefault(slot, []).append(part)

    def weigh(self, microbatches: Sequence[int]) -> None:
        """W: computes and frees what some microbatches have left, those of equal weights together."""
        piles: dict[Slot, list[Part]] = {}
        for microbatch in microbatches:
            for slot, parts in self._parts.pop(microbatch, {}).items():
                piles.setdefault(slot, []).extend(parts)
        while piles:
            slot = next(iter(piles))
            self._compute(slot, piles.pop(slot))

    def close(self) -> None:
        """The last W is done: computes what counts over the whole batch."""
        for slot, parts in self._whole.items():
            self._compute(slot, parts)
        self._whole = {}

    @property
    def keeps(self) -> bool:
        """Whether some W goes through nodes of autograd that B may go through as well, so that B mustn't free them."""
        return bool(self._computed)

    def held(self, microbatch: int) -> int:
        """How many bytes the parts of a microbatch hold."""
        return sum(part.size for parts in self._parts.get(microbatch, {}).values() for part in parts)

    def _compute(self, slot: Slot, parts: Sequence[Part]) -> None:
        totals = self._totals[slot]
        try:
            for part in parts:
                part.verify()
            with torch.no_grad():  # Autocast is off where workers are between forwards.
                slot.function.accumulate(totals, [(part.ctx, part.grad) for part in parts])
            if slot in self._computed:
                del self._totals[slot]
                self._go_on(self._computed.pop(slot))
        except BaseException as error:
            add_note(error, f"in the weight gradient of {slot}")
            raise

    def _go_on(self, computed: Sequence[tuple[GradientEdge, Total]]) -> None:
        """From the gradients of computed weights to those of what they were computed from."""
        found = [(edge, total.value) for edge, total in computed if total.value is not None]
        if found:
            self._backward([edge for edge, _ in found], [grad for _, grad in found])


class _Sink:
    __slots__ = ("_ledger", "_microbatch", "fills")
    leads = False

    def __init__(self, ledger: Ledger, microbatch: int) -> None:
        self._ledger = ledger
        self._microbatch = microbatch
        self.fills = microbatch not in ledger.fused

    @property
    def gathers(self) -> bool:
        """As of a Sink."""
        return self.fills

    def put(self, slot: Slot, ctx: Any, grad: Tensor, phony: Any) -> None:
        """As of a Sink: a layer that differentiates inside its forward leaves nothing."""
        if wanted(phony):
            # With its node each would hold the graph before it, as far as the stage's input.
            ctx.saved_for_weight = tuple([_apart(x) for x in ctx.saved_for_weight])
            self._ledger.put(self._microbatch, slot, Part(ctx, grad, None))


def _apart(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.grad_fn is None else x.detach()
