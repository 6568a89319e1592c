"""The loss of a microbatch as its part of the batch's loss; the last stage's process has the whole target."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splitpipe.training.loss import Objective
from splitpipe.training.mean_check import MeanCheck


class Loss:
    """A microbatch's part of the loss of the batch; all microbatches are of one size."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], chunks: int) -> None:
        self._objective = Objective(loss_fn, MeanCheck(pairs=False))
        self._chunks = chunks
        self._count: Tensor | None = None

    def begin(self, target: Any) -> None:
        """Takes the target of the whole batch."""
        self._objective.begin()
        torch_loss = self._objective.torch_loss
        self._count = None if torch_loss is None else torch_loss.count(target)

    def __call__(self, output: Any, target: Any) -> Tensor:
        self._objective.begin()
        found = self._objective.loss(output, target)
        if isinstance(found, Tensor):
            return found / self._chunks
        loss: Tensor = found[0]
        count: Tensor | None = found[1]
        if count is None:  # A sum.
            return loss
        assert self._count is not None  # If a part of the target has a count, the whole has one.
        part: Tensor = torch.where(count == 0, 0, loss) * (count / self._count).to(loss.dtype)
        return part
