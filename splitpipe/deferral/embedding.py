"""Embeddings: the gradient of the table. There is no input gradient."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.deferral.accumulator import Pair, Total, joined


class Embedding:
    """The gradient of a table, whose rows x selects."""

    @staticmethod
    def accumulate(totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the gradients of all calls to the sum."""
        (total,) = totals
        assert total is not None
        alike: dict[int, list[Pair]] = defaultdict(list)  # A table may be used in several ways.
        for ctx, grad in parts:
            (numbers,) = ctx.saved_for_weight
            alike[ctx.padding].append((numbers.reshape(-1), grad.reshape(numbers.numel(), grad.shape[-1])))
        rows = parts[0][0].rows
        for padding, pairs in alike.items():
            # The gradient has the size of the table however few rows are used: one is computed for many microbatches.
            for numbers, grads in joined(pairs):
                found = torch.ops.aten.embedding_dense_backward(grads, numbers, rows, padding, False)
                total.add(found, fresh=True)
