"""The loss inside a pass: the last layer of the last stage, and how the microbatches' losses make the batch's.

    loss_fn gives    loss of the batch                      gradient that microbatch i starts from
    a mean           sum of rows_i / rows * mean_i          rows_i / rows
    total, count     sum of total_i / sum of count_i        a power of two near 1 / (m * count_0), since the counts are
                                                            not known yet: the rest comes with the release

A gradient is computed before the counts of later microbatches are known, and before a gradient scaler has scaled the
loss. Both are factors, which the release puts right.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.skip.box import Key, current
from splitpipe.skip.namespace import Namespace


class _Caller(Namespace):
    """Where the caller's values come from: equal to nothing else."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


#: A microbatch's target travels as a skip, from the caller to the last stage.
TARGET: Key = (_Caller(), "target")


class Objective(nn.Module):
    """The loss of a microbatch, as a layer.

    Args:
        loss_fn: called with output and target.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        # As a module of its own it takes part in what is known of a stage's modules; any other callable is a value.
        self.loss_fn = loss_fn

    def forward(self, output: Any) -> Any:
        """A mean, or a pair of total and count."""
        found = self.loss_fn(output, current().pop(TARGET))
        with torch._C.DisableTorchFunction():  # What is asked of it here is nobody's business.
            return _verified(found)


def _verified(found: Any) -> Any:
    if isinstance(found, (tuple, list)) and len(found) == 2:
        total, count = found
        if not isinstance(count, (int, float, Tensor)) or isinstance(count, Tensor) and count.numel() != 1:
            raise TypeError(
                f"loss_fn gave {_shown(count)} as the count of its pair: expected a number, of what the total is "
                "divided by over the whole batch."
            )
        if isinstance(count, Tensor) and count.requires_grad:
            raise TypeError(
                "loss_fn gave a count that requires grad: expected a number, which the total is divided by and nothing "
                "is differentiated by. Detach it, or return a mean."
            )
        return _scalar(total, "the total of its pair"), count
    return _scalar(found, "the loss")


def _scalar(found: Any, what: str) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        raise TypeError(
            f"loss_fn gave {_shown(found)} as {what}: expected a tensor of one number, the mean over the microbatch's "
            "first dimension, or a pair (total, count) for a loss that is no such mean. Reduce it "
            "(reduction='mean', loss.mean())."
        )
    return found.reshape(()) if found.dim() else found


def _shown(found: object) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)} and type {found.dtype}"
    return f"a {type(found).__name__}"


class Reduction:
    """Losses of microbatches, on their way to that of the batch.

    Args:
        rows: of each microbatch.
        scale: what the gradients of B are scaled by: a gradient scaler's, or None.
    """

    def __init__(self, rows: Sequence[int], scale: Tensor | None) -> None:
        self._rows = rows
        self._scale = scale
        self._parts: dict[int, tuple[Tensor, Any]] = {}
        self._start: Tensor | None = None

    def add(self, microbatch: int, leaves: Sequence[Any]) -> None:
        """Notes what the objective gave for a microbatch."""
        count = leaves[1] if len(leaves) > 1 else None
        if self._parts and (count is None) != (next(iter(self._parts.values()))[1] is None):
            raise TypeError(
                "loss_fn gave a mean for one microbatch, and a pair of total and count for another: expected the same "
                "for all of them."
            )
        self._parts[microbatch] = leaves[0].detach(), count

    def seed(self, microbatch: int) -> Tensor:
        """The gradient that a microbatch's backward starts from."""
        value, count = self._parts[microbatch]
        if count is None:
            seed = torch.full_like(value, self._share(microbatch))
        else:
            if self._start is None:
                self._start = self._power(value, count)
            seed = self._start.to(value.dtype)
        return seed if self._scale is None else seed * self._scale.to(seed.dtype)

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and what the gradients are to be multiplied with (None: 1)."""
        order = sorted(self._parts)
        unit = None if self._scale is None else self._scale.reciprocal()
        if self._parts[order[0]][1] is None:
            loss = torch.stack([self._parts[i][0] * self._share(i) for i in order]).sum()
            return loss, unit
        total = torch.stack([self._parts[i][0] for i in order]).sum()
        counts = [self._parts[i][1] for i in order]
        count = torch.stack([_wide(count, total) for count in counts]).sum()
        if self._start is not None:
            part = (self._start * count).reciprocal()
            unit = part if unit is None else part * unit
        return total / count.to(total.dtype), unit

    def _share(self, microbatch: int) -> float:
        whole = sum(self._rows)
        return self._rows[microbatch] / whole if whole else 1 / len(self._rows)

    def _power(self, value: Tensor, count: Any) -> Tensor:
        # A power of two changes no digit, and nothing overflows in half precision.
        whole = (_wide(count, value) * len(self._rows)).clamp(min=1)
        return torch.exp2(-whole.log2().round())


def _wide(count: Any, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    if isinstance(count, Tensor):
        return count.reshape(()).to(like.device, dtype)
    return torch.full((), count, dtype=dtype, device=like.device)
