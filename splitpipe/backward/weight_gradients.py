"""W of linear layers, products with a matrix of weights on the right, convolutions and embeddings.

Each function adds the weight gradients of several calls that use their weights alike to sums, one per weight, or None
where no gradient is needed. ``parts``: what each call has saved, and the gradient of its output.

A sum is added to in place as soon as it has its own memory.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class Total:
    """A growing sum of a weight's gradients.

    The first gradient's memory may be shared (a view of an output gradient): the sum refers to it, but writes nothing.
    """

    weight: Tensor
    value: Tensor | None = None
    owned: bool = False  #: Whether the sum has the value's memory for itself.

    def allocate(self) -> None:
        """Begins with zeros, on the current stream.

        A gradient outlives backward: in the weight stream's memory, activations could never use its place again.
        """
        if self.value is None and type(self.weight.data) is Tensor and self.weight.layout is torch.strided:
            self.value, self.owned = torch.zeros_like(self.weight), True

    def add(self, grad: Tensor | None, fresh: bool = False) -> None:
        """Adds a gradient that has or expands to the weight's shape; ``fresh``: its memory isn't shared."""
        if grad is None:
            return
        if grad.shape != self.weight.shape:
            grad = grad.sum_to_size(self.weight.shape)
        plain = grad.layout is torch.strided
        if self.value is None:
            self.value = grad.to(self.weight.dtype)
            self.owned = plain and (fresh or self.value is not grad)
        elif self.adds_in_place(grad):
            self.value.add_(grad)
        else:  # A dense sum accepts a sparse summand, but a sparse sum doesn't accept a dense one.
            self.value = grad + self.value if plain else self.value + grad
            self.owned = self.value.layout is torch.strided

    def adds_in_place(self, grad: Tensor) -> bool:
        """True if a gradient would be added to memory that the sum has for itself."""
        # Not to a subclass, as in autograd: a DTensor that is written to would keep its placement, whatever is added.
        return self.owned and type(self.value) is Tensor and grad.layout is torch.strided


Totals = Sequence[Total | None]
Parts = Sequence[tuple[Any, Tensor]]
#: Input and output gradient of a microbatch.
Pair = tuple[Tensor, Tensor]
#: Bytes of input and output gradient that are concatenated at once: up to there, a copy costs less than a kernel.
_TOGETHER = 8 * 2**20


def linear(totals: Totals, parts: Parts) -> None:
    """Of x @ weight.T + bias, or of x @ weight + bias if the weight isn't ``turned``."""
    (weight, bias), (turned,) = totals, parts[0][0].way
    for x, grad in joined([(ctx.saved_for_weight[0], grad) for ctx, grad in parts]):
        if weight is not None:
            a, b = (grad.t(), x) if turned else (x.t(), grad)
            if weight.value is not None and a.dtype is weight.value.dtype and weight.adds_in_place(a):
                weight.value.addmm_(a, b)
            else:
                weight.add(a.mm(b), fresh=True)
        if bias is not None:
            bias.add(grad.sum(0), fresh=True)


def convolution(totals: Totals, parts: Parts) -> None:
    """Of convolutions in one to three dimensions, including transposed ones."""
    (geometry, _), weight = parts[0][0].way, parts[0][0].saved_for_weight[1]
    wants_weight, wants_bias = [total is not None for total in totals]
    for x, grad in joined([(ctx.saved_for_weight[0], grad) for ctx, grad in parts]):
        size = [grad.shape[1]] if wants_bias else None
        found = torch.ops.aten.convolution_backward(grad, x, weight, size, *geometry, (False, wants_weight, wants_bias))
        for total, gradient in zip(totals, found[1:]):
            if total is not None:
                total.add(gradient, fresh=True)


def embedding(totals: Totals, parts: Parts) -> None:
    """Of a table whose rows are selected by numbers. There is no input gradient."""
    (total,), (rows, padding) = totals, parts[0][0].way
    assert total is not None
    pairs = [(ctx.saved_for_weight[0].reshape(-1), grad[None].flatten(0, -2)) for ctx, grad in parts]
    # The gradient has the size of the table however few rows are used: one is computed for many microbatches.
    for numbers, grads in joined(pairs):
        total.add(torch.ops.aten.embedding_dense_backward(grads, numbers, rows, padding, False), fresh=True)


def joined(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """The pairs, but fewer and longer: neighbours that are alike and small are concatenated."""
    runs: list[list[Pair]] = []
    size, kind = 0, None
    for x, grad in pairs:
        own, bytes_ = (x.shape[1:], x.dtype, grad.shape[1:], grad.dtype), x.nbytes + grad.nbytes
        if own != kind or size + bytes_ > _TOGETHER:
            runs.append([])
            size, kind = 0, own
        runs[-1].append((x, grad))
        size += bytes_
    for run in runs:
        yield run[0] if len(run) == 1 else (torch.cat([x for x, _ in run]), torch.cat([grad for _, grad in run]))
