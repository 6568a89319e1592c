"""Drop-in, for a block with a separate graph: one Flush returns its weight gradients to autograd.

     parameters of the block ─> AccumulateGrad
       ^
     Flush                the block's gradients, once every B that leads to them is done
       ^ phony, one edge per microbatch
     BlockNode(i)         backward: B of one microbatch, by autograd's engine in the block's own graph

Gradients that B computes itself are summed in the stash of the graph task; those left for W are computed here at the
latest.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import queue_callback
from splitpipe.deferral.accumulator import Total
from splitpipe.deferral.pending import Node
from splitpipe.deferral.stash import Stashes


class Flush(Node):
    """A phony whose backward returns the gradients of some leaves."""

    @staticmethod
    def forward(ctx: Any, stashes: Stashes, leaves: Sequence[Tensor], *weights: Tensor) -> Tensor:
        """The phony; ``weights``: the leaves, or views of them."""
        ctx.set_materialize_grads(False)
        ctx.stashes, ctx.leaves = stashes, leaves
        return torch.empty(0, device=stashes.streams.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        stash = ctx.stashes.find()
        found: list[Total | None] = [None] * len(ctx.leaves) if stash is None else stash.gradients(ctx.leaves)
        for leaf, total in zip(ctx.leaves, found):
            if total is None:  # The loss doesn't use the output, or the layer didn't run.
                _for_gradients_alone(leaf)
        return None, None, *[None if total is None else total.value for total in found]


class _Given:
    """A hook that is called if there is a gradient."""

    def __init__(self, hook: Any, _: _Before) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Any:
        return None if grad is None else self.hook(grad)


class _Before:
    """A leaf's earlier gradient, to see whether something was added to it. Of several hooks, the first one looks."""

    def __init__(self, leaf: Tensor) -> None:
        self._grad, self._version = leaf.grad, None if leaf.grad is None else version_of(leaf.grad)
        self._added: bool | None = None

    def added(self, leaf: Tensor) -> bool:
        """True if something was added, even if a hook that was called since may have taken it."""
        if self._added is None:
            grad = leaf.grad
            self._added = grad is not self._grad or grad is not None and version_of(grad) != self._version
            self._grad = None
        return self._added


class _Accumulated:
    """A hook that is called if something was added to the leaf's gradient."""

    def __init__(self, hook: Any, before: _Before) -> None:
        self.hook = hook
        self._before = before

    def __call__(self, leaf: Tensor) -> Any:
        return self.hook(leaf) if self._before.added(leaf) else None


def _for_gradients_alone(leaf: Tensor) -> None:
    """Replaces a leaf's hooks during the running graph task, which may reach the leaf without a gradient."""
    before = _Before(leaf)
    of_leaf: list[tuple[Any, Any]] = [
        (_Given, leaf._backward_hooks), (_Accumulated, leaf._post_accumulate_grad_hooks)
    ]
    for kind, hooks in of_leaf:
        for key, hook in list((hooks or {}).items()):
            if not isinstance(hook, kind):
                hooks[key] = given = kind(hook, before)
                queue_callback(partial(_put_back, hooks, key, given))


def _put_back(hooks: dict[int, Any], key: int, given: _Given | _Accumulated) -> None:
    if hooks.get(key) is given:  # Otherwise, its handle has removed it.
        hooks[key] = given.hook
