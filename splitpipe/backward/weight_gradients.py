"""W of linear layers, products with a matrix of weights on the right, convolutions and embeddings.

Each function adds the weight gradients of several calls that use their weights alike to the sums, one per weight, or
None where no gradient is needed. ``parts``: what each call has saved, and the gradient of its output.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.backward.accumulate import Total

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
            weight.add_product(*((grad.t(), x) if turned else (x.t(), grad)))
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
