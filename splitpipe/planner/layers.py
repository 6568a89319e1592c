"""What stands before and after a layer that is measured: its input is made there, and its gradients come from there."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_unflatten

from splitpipe.balance.layers import Flow, cut_off, memory_of
from splitpipe.core.tensors import is_plain, storage_of
from splitpipe.skip.box import Key, current
from splitpipe.skip.skippable import Skippable

#: What autograd is told to hold, and is no memory: W may need more than F saved, and the recorder goes by F.
BALLAST = 2**50


class Opaque:
    """Takes a tensor along that can't be cut into rows."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def rows_of(leaf: Any, rows: int) -> Any:
    """So many copies of a tensor as the rows of one; whatever else as it is.

    Args:
        leaf: of what flows.
        rows: how many.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    with torch.no_grad():
        one = leaf.detach().clone()
        if not is_plain(one):
            return Opaque(cut_off(leaf, one))
        many = one.new_empty_strided((rows, *one.shape), (one.numel(), *one.stride())).copy_(one)
    return cut_off(leaf, many)


def size_of(x: Tensor) -> int:
    """Bytes of a copy of a tensor."""
    return x.nbytes if x.layout is torch.strided else sum(memory_of(x).values())


def bytes_of(x: Tensor) -> int:
    """Bytes of all memory that a tensor holds."""
    return x.untyped_storage().nbytes() if storage_of(x) else size_of(x)


class Before(Skippable):
    """Gives the layer its input and the skips that it pops."""

    def __init__(self, keys: Sequence[Key], spec: Any) -> None:
        nn.Module.__init__(self)
        self._keys, self._spec = list(keys), spec
        self.copying = self.marking = False
        self.marked: set[int] = set()

    def stashable(self) -> list[Key]:
        return self._keys

    def forward(self, input: Any) -> Any:
        leaves = [self._own(leaf) for leaf in input[1:]]
        if self.marking:
            self.marked = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)} - {0}
        value, skips = tree_unflatten(leaves, self._spec)
        current().update(skips)
        return value

    def _own(self, leaf: Any) -> Any:
        if isinstance(leaf, Opaque):
            return leaf.tensor
        if not isinstance(leaf, Tensor):
            return leaf
        # Memory of its own counts when it is saved: the batch's does not.
        return leaf.squeeze(0).clone() if self.copying else leaf.squeeze(0)


class After(Skippable):
    """Takes the layer's output and what it stashed."""

    def __init__(self, keys: Sequence[Key]) -> None:
        nn.Module.__init__(self)
        self._keys = list(keys)
        self.noting = self.marking = False
        self.marked: set[int] = set()
        self.found: Flow | None = None

    def poppable(self) -> list[Key]:
        return self._keys

    def forward(self, input: Any) -> Flow:
        flow = Flow(input, {key: current().pop(key) for key in self._keys})
        if self.noting:
            self.found = flow.map(lambda x: cut_off(x, x))
            flow = flow.map(lambda x: _Ballast.apply(x) if x.requires_grad else x)
        elif self.marking:
            self.marked = {storage_of(x) for x in flow.tensors()} - {0}
        return flow


class _Ballast(Function):
    """The tensor; autograd is told to hold more than there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(BALLAST, dtype=torch.uint8, device="meta"))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Nothing:
    """A loss of all that requires grad, whose gradients are there before it is asked for them."""

    def __init__(self) -> None:
        self._grads: list[Tensor] = []

    def __call__(self, flow: Flow, target: object) -> Tensor:
        found = [x for x in flow.tensors() if x.requires_grad]
        if len(self._grads) != len(found):
            self._grads = [torch.ones_like(x) for x in found]
        if not found:
            return torch.zeros(())
        loss: Tensor = _Given.apply(self._grads, *found)
        return loss


class _Given(Function):
    """Zero; in backward, the gradients that were given."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.grads


class Own(nn.Module):
    """The user's loss of the layer's output."""

    def __init__(self, loss_fn: Callable[..., Any], target: object) -> None:
        super().__init__()
        self.loss_fn, self.target = loss_fn, target

    def forward(self, flow: Flow, target: object) -> Any:
        return self.loss_fn(flow.value, self.target)
