"""Fork and Join: an edge between two lanes of the autograd graph, so that one goes backward before the other.

    lane i-1   ── Fork ──────────>         Join gives its phony no gradient, and Fork waits for it all the same:
                   │ phony                 lane i is through with Join before lane i-1 gets past Fork.
    lane i     ── Join ──────────>

An undefined gradient makes no stream wait. So the order is one of the host's, and the devices stay free.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Fork(Function):
    """The tensor, and a phony that depends on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.detach(), torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Tensor | None:
        return grad


class Join(Function):
    """The tensor, which now depends on the phony as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


class _Unleaf(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def unleaf(x: Tensor) -> Tensor:
    """A leaf as a tensor that some node made: a layer may write to it in place, as it may to any other's output."""
    y: Tensor = _Unleaf.apply(x)
    return y


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor to go on with, and the phony to join to the lane that goes backward first."""
    forked: tuple[Tensor, Tensor] = Fork.apply(x)
    return forked


def join(x: Tensor, phony: Tensor) -> Tensor:
    """The tensor to go on with, in the lane that goes backward first."""
    joined: Tensor = Join.apply(x, phony)
    return joined
