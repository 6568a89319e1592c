"""The weights of a call, and what is kept of it until their gradients are computed.

A *slot* stands for some weights in one stage and pass, a *part* for one call with them. Where parts wait, and when
their gradients are computed, is up to a Deposit: the stash of a backward (drop-in), or the ledger of a schedule.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from splitpipe.deferral.accumulator import Total


class Part:
    """What the weight gradient of one call, in one microbatch, is computed from.

    Args:
        ctx: of the call.
        grad: of its output.
        after: the B that came before, on the compute stream.
    """

    __slots__ = ("_version", "after", "ctx", "grad", "size")

    def __init__(self, ctx: Any, grad: Tensor, after: torch.Event | None) -> None:
        self.ctx = ctx
        self.grad = grad
        self.after = after
        size, held = grad.nbytes, [grad]
        for x in ctx.saved_for_weight:
            if x is not None and type(x) is not Parameter:
                size += x.nbytes
                held.append(x)
        self.size = size
        self._version = _version(held)

    def tensors(self) -> list[Tensor]:
        """What it holds back: weights live on anyway."""
        return [self.grad, *[x for x in self.ctx.saved_for_weight if x is not None and type(x) is not Parameter]]

    def verify(self) -> None:
        """Raises a RuntimeError if a tensor was written to since. Autograd would have read it by then."""
        if self._version != _version(self.tensors()):
            raise RuntimeError(
                "a tensor was modified in place during backward, before its weight gradient was computed: "
                "expected saved activations and output gradients to stay as they are. A layer's backward overwrites "
                "what another one has saved, or its gradient; use SplitPipe(..., backward='autograd') with it."
            )


def _version(tensors: Sequence[Tensor]) -> int | None:
    """The sum of the versions, which tells as well whether one has changed: they only grow."""
    try:
        return sum([x._version for x in tensors])
    except RuntimeError:
        return None  # A backward in inference mode makes tensors whose versions nobody counts.


class Weighing(Protocol):
    """What computes weight gradients: a SplitFunction."""

    whole: bool

    def accumulate(self, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the parts' gradients."""


class Slot:
    """Some weights, in one stage and pass.

    Args:
        function: what computes their gradients.
        weights: what gradients are computed of.
        needs: which of the weights have one.
        names: of the stage's parameters, for messages.
        parameters: those of the weights that are. (Others, which are computed, it would keep from being freed.)

    Attributes:
        size: bytes of the gradients.
        computed: whether a weight with a gradient is no parameter.
    """

    __slots__ = ("_names", "computed", "function", "kinds", "needs", "parameters", "size")

    def __init__(
        self,
        function: Weighing,
        weights: Sequence[Tensor | None],
        needs: tuple[bool, ...],
        names: Names,
        parameters: Sequence[Tensor],
    ) -> None:
        self.function = function
        self.needs = needs
        self.kinds = [
            (weight.dtype, weight.shape) if weight is not None and need else None
            for weight, need in zip(weights, needs)
        ]
        self.size = sum([dtype.itemsize * shape.numel() for dtype, shape in filter(None, self.kinds)])
        self._names = names
        self.parameters = parameters
        self.computed = len(parameters) < sum(needs)

    def __str__(self) -> str:
        return self._names.of(self.parameters)


class Sink(Protocol):
    """Where the calls of one microbatch leave their parts."""

    @property
    def fills(self) -> bool:
        """Whether weight gradients are computed when the device has time: beside other passes, or between them."""

    @property
    def gathers(self) -> bool:
        """Whether parts wait for those of other microbatches, to be computed with them."""

    @property
    def leads(self) -> bool:
        """Whether any backward through the calls comes to their weights."""

    def put(self, slot: Slot, ctx: Any, grad: Tensor, phony: Any) -> None:
        """Takes a part, if the running backward is one whose weight gradients are wanted.

        Args:
            slot: of the weights.
            ctx: of the call.
            grad: of its output.
            phony: the node that the call's phony comes from.
        """


class Deposit(Protocol):
    """Where the parts of one stage wait, in one pass."""

    def phony(self, slot: Slot, weights: Sequence[Tensor]) -> Tensor:
        """What makes autograd go through the calls of a slot.

        Args:
            slot: new to the deposit.
            weights: of the slot, those that require grad.
        """

    def sink(self, microbatch: int, now: bool) -> Sink:
        """Where the parts of a microbatch go; ``now``: nothing of them should be held back."""

    def make_room(self) -> None:
        """A microbatch is about to be run again, and needs memory."""


class Names:
    """The names of a stage's parameters.

    Args:
        layers: name and module of each layer.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = [(name, weakref.ref(layer)) for name, layer in layers]

    def layer(self, number: int) -> nn.Module | None:
        """A layer, by its place in the stage; None if it is gone."""
        return self._layers[number][1]()

    def of(self, weights: Sequence[Tensor]) -> str:
        """The names of some weights."""
        names = [
            own
            for name, layer in ((name, reference()) for name, reference in self._layers)
            if layer is not None
            for own, parameter in layer.named_parameters(name)
            if any(parameter is weight for weight in weights)
        ]
        return ", ".join(names) or "a computed weight"
