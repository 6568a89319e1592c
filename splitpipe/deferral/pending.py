"""Calls whose weight gradients are pending, grouped by the weights that they use.

A *weight group* represents the weights of a call, in one stage and one call of the model; a *pending gradient*
represents one call with them. A *store* determines where these wait and when they are computed: the stash of a backward
(drop-in), or the ledger of a schedule.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from splitpipe.core.note import add_note
from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import _SingleLevelFunction
from splitpipe.deferral.accumulator import Total
from splitpipe.deferral.function import WeightGradients


class Node(_SingleLevelFunction):
    """An autograd function of the split backward, whose backward has effects unknown to autograd.

    It isn't a Function, which checks in every call whether it is inside a torch.func transform.
    """

    apply: ClassVar[Any]

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> NoReturn:
        """Raises for compiled autograd, which calls this before it traces the node."""
        raise RuntimeError(
            "compiled autograd can't trace the split backward, which postpones weight gradients while autograd "
            "runs: expected SplitPipe(..., backward='autograd'), or a backward outside compiled autograd (without "
            "torch._dynamo.config.compiled_autograd)."
        )


#: The dtype and shape (None: any) of a gradient, and a tensor with the shape and layout of its memory, if known.
Kind = tuple[torch.dtype, torch.Size | None, Tensor | None]


class PendingGrad:
    """The inputs of one call's weight gradient; the gradient of its output is there after B."""

    __slots__ = ("_version", "_versions", "ctx", "grad", "size")

    def __init__(self, ctx: Any, grad: Tensor | None = None) -> None:
        self.ctx = ctx
        #: The bytes that it keeps alive.
        self.size = 0
        self._versions: list[int | None] = []
        for x in ctx.saved_for_weight:
            lasting = x is None or type(x) is Parameter
            self._versions.append(None if lasting else version_of(x))
            self.size += 0 if lasting else x.nbytes
        self.grad: Tensor | None = None
        self._version: int | None = None
        if grad is not None:
            self.arrived(grad)

    def take_on(self, ctx: Any) -> None:
        """Replaces ``ctx``: the call's own backward has left something else for W."""
        self.ctx = ctx
        self.size = sum([x.nbytes for x in self.tensors()])

    def arrived(self, grad: Tensor, version: int | None = None) -> None:
        """Sets the gradient of the output; ``version``: the one that it had when the call's node received it."""
        self.grad = grad
        self._version = version_of(grad) if version is None else version
        if type(grad) is not Parameter:
            self.size += grad.nbytes

    def tensors(self) -> list[Tensor]:
        """The tensors that it keeps alive, without weights, which live on anyway."""
        given = self.grad, *self.ctx.saved_for_weight
        return [x for x in given if x is not None and type(x) is not Parameter]

    def verify(self) -> None:
        """Raises a RuntimeError if a tensor has been written to since. Autograd would have read it before that."""
        saved = self.ctx.saved_for_weight
        written = self.grad is not None and version_of(self.grad) != self._version or len(saved) != len(self._versions)
        for x, then in zip(saved, self._versions):
            written = written or x is not None and type(x) is not Parameter and version_of(x) != then
        if written:
            raise RuntimeError(
                "a tensor was modified in place during backward, before its weight gradient was computed: "
                "expected saved activations and output gradients to stay as they are. A layer's backward overwrites "
                "a gradient, or what another layer has saved; use SplitPipe(..., backward='autograd') with it."
            )


def without_graph(saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Saved tensors without their nodes."""
    return tuple([x if x is None or x.grad_fn is None else x.detach() for x in saved])


class WeightGroup:
    """The weights of a call, which lead to these leaves and have these kinds; None: one that needs no gradient.

    ``parameters`` get the gradients: weights that need one, or the bases of views.
    """

    __slots__ = ("_names", "function", "kinds", "parameters", "size")

    def __init__(
        self, function: WeightGradients, leaves: Sequence[Tensor | None], kinds: Sequence[Kind | None],
        names: Mapping[int, str],
    ) -> None:
        self.function = function
        self.kinds = kinds
        self.parameters = [leaf for leaf in leaves if leaf is not None]
        #: Bytes of the gradients.
        self.size = sum([leaf.nbytes for leaf in self.parameters])
        self._names = names

    def __str__(self) -> str:
        found = [self._names[id(parameter)] for parameter in self.parameters if id(parameter) in self._names]
        return ", ".join(found) or "a parameter that doesn't belong to the layer"

    def compute(self, totals: Sequence[Total | None], pending: Sequence[PendingGrad]) -> None:
        """Adds pending gradients to the sums of the weights' gradients."""
        try:
            for each in pending:
                each.verify()
            self.function.accumulate(totals, [(each.ctx, each.grad) for each in pending])
        except BaseException as error:
            add_note(error, f"in the weight gradient of {self}")
            raise


class PendingStore(Protocol):
    """The store of one stage's pending gradients, in one call of the model."""

    def gains(self, microbatch: int) -> tuple[bool, bool]:
        """The ``fills`` and ``gathers`` of a microbatch, for SplitFunction.pays."""

    def make_room(self) -> None:
        """Called before a microbatch is recomputed, which needs memory."""
