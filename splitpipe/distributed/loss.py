"""The loss of a microbatch as its part of the batch's, where the process of the last stage has the whole target."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splitpipe.training import reductions
from splitpipe.training.rowmean import MeanCheck


class Loss:
    """A microbatch's part of the loss of the batch; all microbatches are of one size."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], chunks: int) -> None:
        self._loss_fn = loss_fn
        self._chunks = chunks
        self._check = MeanCheck(pairs=False)
        self._count: Tensor | None = None

    def begin(self, target: Any) -> None:
        """Takes the target of the whole batch."""
        known = reductions.known(self._loss_fn)
        self._count = None if known is None else known.count(target)

    def __call__(self, output: Any, target: Any) -> Tensor:
        known = reductions.known(self._loss_fn)
        if known is None:
            parts = self._check.parts(self._loss_fn, output, target)
            loss = _scalar(self._loss_fn(output, target))
            if parts is not None:
                self._check.compare(loss, parts)
            return loss / self._chunks
        if known.smoothed is not None:
            self._check.verify_weight(known.smoothed)
        known.verify(output, target)
        count = known.count(target)
        if count is None or self._count is None:
            loss = _scalar(self._loss_fn(output, target))
            return loss if known.reduction == "sum" else loss / self._chunks
        loss = _scalar(self._loss_fn(output, known.without(count, target)))
        part: Tensor = torch.where(count == 0, 0, loss) * (count / self._count).to(loss.dtype)
        return part


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(
            f"loss_fn gave {found}: expected a tensor without dimensions, the mean over the microbatch. Pairs of "
            "total and count are known to splitpipe.SplitPipe alone."
        )
    return loss
