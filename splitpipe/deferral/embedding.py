"""Embeddings: the gradient of the table, which has no input gradient beside it."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from splitpipe.deferral.accumulator import Pair, Total, joined
from splitpipe.deferral.function import Found, Rule, SplitFunction


class Embedding(SplitFunction):
    """Rows of the table, by number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any, **options: Any) -> Tensor:
        (table,), padding = weights, options["padding_idx"]
        y = F.embedding(x, table, padding)  # First of all, for torch's own errors.
        ctx.rows = table.shape[0]
        ctx.padding = -1 if padding is None else padding % ctx.rows
        ctx.save_for_weight(x)
        return y

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        (total,) = totals
        assert total is not None
        alike: dict[int, list[Pair]] = defaultdict(list)  # A table may be used in several ways.
        for ctx, grad in parts:
            (numbers,) = ctx.saved_for_weight
            alike[ctx.padding].append((numbers.reshape(-1), grad.reshape(numbers.numel(), grad.shape[-1])))
        rows = parts[0][0].rows
        for padding, pairs in alike.items():
            # The gradient has the size of the table however few rows are used: one for many microbatches.
            for numbers, grads in joined(pairs):
                found = torch.ops.aten.embedding_dense_backward(grads, numbers, rows, padding, False)
                total.add(found, fresh=True)


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Found:
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return "its weight is no matrix"
    if max_norm is not None:
        return "max_norm writes to the weight in forward"
    if sparse:
        return "its gradient is sparse"
    if scale_grad_by_freq:
        return "scale_grad_by_freq counts over each microbatch"
    return Embedding, input, (weight,), {"padding_idx": padding_idx}


RULES: dict[Callable[..., Any], Rule] = {F.embedding: _embedding}
