"""The loss inside a call: the last layer of the last stage, and how the microbatches' losses make the batch's.

    loss_fn gives      loss of the batch                               gradient that microbatch i starts from
    a mean over rows   sum of rows_i * mean_i / rows                   rows_i / rows
    total, count       sum of total_i / sum of count_i                 1 / n
    a mean over count  sum of count_i * mean_i / sum of count_i        count_i / n
    a sum              sum of sum_i                                    1

B runs before the counts of later microbatches are known: n is an estimate of their sum. B also scales the gradients by
a gradient scaler's factor, before that has scaled the loss. Release multiplies them by the correction of both.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core.torch_private import DisableTorchFunction, _foreach_mul
from splitpipe.skip.box import Key, Namespace, current
from splitpipe.training import reductions
from splitpipe.training.mean_check import MeanCheck


class _Caller(Namespace):
    """The namespace of the caller's values: equal to nothing else."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


#: A microbatch's target travels as a skip, from the caller to the last stage.
TARGET: Key = (_Caller(), "target")


class Objective(nn.Module):
    """The loss of a microbatch, as a layer."""

    def __init__(self, loss_fn: Callable[..., Any], check: MeanCheck) -> None:
        super().__init__()
        # If loss_fn is a module, it becomes one of the stage's modules; any other callable is an attribute.
        self.loss_fn = loss_fn
        self._check = check
        self.begin()

    def begin(self) -> None:
        """A call begins: a user's loss is checked for one microbatch, a loss of torch's own by its arguments."""
        self.torch_loss = torch_loss = reductions.torch_loss(self.loss_fn)
        self._checking = torch_loss is None
        if torch_loss is not None and torch_loss.smoothed is not None:
            self._check.verify_weight(torch_loss.smoothed)

    def forward(self, output: Any) -> Any:
        """The loss; the target is on its way as a skip."""
        return self.loss(output, current().pop(TARGET))

    def loss(self, output: Any, target: Any) -> Any:
        """One of: a mean; a total and a count; a mean, its count and the number of targets; a sum and None."""
        if self.torch_loss is None:
            return self._users(output, target)
        return self._torchs(self.torch_loss, output, target)

    def _users(self, output: Any, target: Any) -> Any:
        checking, self._checking = self._checking, False
        parts = self._check.parts(self.loss_fn, output, target) if checking else None
        found = self.loss_fn(output, target)
        with DisableTorchFunction():  # The user's function modes don't see these checks.
            found = _verified(found, self._check.pairs)
            if parts is not None and isinstance(found, Tensor):
                self._check.compare(found, parts)
            return found

    def _torchs(self, torch_loss: reductions.TorchLoss, output: Any, target: Any) -> Any:
        with DisableTorchFunction():
            torch_loss.verify(output, target)
            count = torch_loss.count(target)
            given = target if count is None else torch_loss.without(count, target)
        found = self.loss_fn(output, given)
        with DisableTorchFunction():
            loss = _scalar(found, "the loss", self._check.pairs)
            if count is not None:
                return loss, count, target.numel()
            return (loss, None) if torch_loss.reduction == "sum" else loss


def begun(known: Objective | None, loss_fn: Callable[..., Any], check: MeanCheck) -> Objective:
    """The objective of a loss for a call that begins: the one that is known, if it is of that loss."""
    if known is None or known.loss_fn is not loss_fn:
        return Objective(loss_fn, check)
    known.begin()
    return known


_OR_PAIR = ", or a pair (total, count) for a loss that is no such mean"
_NO_PAIR = "; pairs of total and count are known to splitpipe.SplitPipe alone"


def _verified(found: Any, pairs: bool) -> Any:
    if pairs and isinstance(found, (tuple, list)) and len(found) == 2:
        total, count = found
        if not isinstance(count, (int, float, Tensor)) or (isinstance(count, Tensor) and count.numel() != 1):
            raise TypeError(
                f"loss_fn gave {_shown(count)} as the count of its pair: expected a number, of what the total is "
                "divided by over the whole batch."
            )
        if isinstance(count, Tensor) and count.requires_grad:
            raise TypeError(
                "loss_fn gave a count that requires grad: expected a number, which the total is divided by and nothing "
                "is differentiated by. Detach it, or return a mean."
            )
        return _scalar(total, "the total of its pair", pairs), count
    return _scalar(found, "the loss", pairs)


def _scalar(found: Any, what: str, pairs: bool) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        raise TypeError(
            f"loss_fn gave {_shown(found)} as {what}: expected a tensor of one number, the mean over the microbatch's "
            f"first dimension{_OR_PAIR if pairs else _NO_PAIR}. Reduce it (reduction='mean', loss.mean())."
        )
    return found.reshape(()) if found.dim() else found


def _shown(found: object) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)} and type {found.dtype}"
    return f"a {type(found).__name__}"


class Reduction:
    """Makes the loss of the batch from the losses of microbatches, which have so many rows.

    The gradients of B are scaled by a gradient scaler's scale, or by nothing.
    """

    def __init__(self, rows: Sequence[int], scale: Tensor | None) -> None:
        self._rows = rows
        self._scale = scale
        self._parts: dict[int, tuple[Tensor, Any]] = {}
        self._kind = ""
        #: An estimate of the sum of counts, by the first microbatch that goes backward.
        self._whole: Any = None

    def add(self, microbatch: int, leaves: Sequence[Any]) -> None:
        """Notes what the objective gave for a microbatch."""
        value, count = leaves[0].detach(), leaves[1] if len(leaves) > 1 else None
        kind = _KINDS[len(leaves)] if count is not None or len(leaves) == 1 else _SUM
        if self._parts and kind != self._kind:
            one, other = sorted((kind, self._kind))
            raise TypeError(
                f"loss_fn gave {one} for one microbatch, and {other} for another: expected the same for all of them."
            )
        self._kind = kind
        self._parts[microbatch] = value, count
        if kind is _COUNTED and self._whole is None:
            self._whole = max(1, leaves[2] * sum(self._rows) / max(1, self._rows[microbatch]))

    def seed(self, microbatch: int) -> Tensor:
        """The gradient that a microbatch's backward starts from."""
        value, weight = self._parts[microbatch][0], self._weight(microbatch)
        if isinstance(weight, float):
            seed = torch.full_like(value, weight)
        else:
            seed = torch.ones_like(value) * weight.to(value.dtype)
        return seed if self._scale is None else seed * self._scale.to(seed.dtype)

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and what the gradients are to be multiplied with (None: 1)."""
        order = sorted(self._parts)
        unit = None if self._scale is None else self._scale.reciprocal()
        first = self._parts[order[0]][0]
        values = torch.stack([self._parts[i][0] for i in order]).to(_wide(first.dtype))
        weights: list[Any] = [self._weight(i) for i in order]
        if self._kind in (_MEAN, _SUM):  # The weights are Python numbers: one kernel, and no copy to the device.
            return torch.stack(_foreach_mul(values.unbind(), weights)).sum().to(first.dtype), unit
        terms = values * torch.stack([torch.as_tensor(weight, device=first.device) for weight in weights])
        counts = torch.stack([_number(self._parts[i][1], first) for i in order])
        if self._kind is _COUNTED:  # A mean over nothing is nan, and no part of the loss.
            terms = torch.where(counts == 0, 0, terms)
        # If nothing counts, the loss is nan and the gradients are 0, as in torch.
        whole = counts.sum() / self._whole
        part = torch.where(whole == 0, 1, whole).reciprocal()
        return (terms.sum() / whole).to(first.dtype), part if unit is None else part * unit

    def _weight(self, microbatch: int) -> float | Tensor:
        """The factor of a microbatch's loss in the sum of all."""
        if self._kind is _SUM:
            return 1.0
        if self._kind is _MEAN:
            whole = sum(self._rows)
            return self._rows[microbatch] / whole if whole else 1 / len(self._rows)
        value, count = self._parts[microbatch]
        if self._whole is None:
            self._whole = self._power(_number(count, value))
        weight: Tensor = (1 if self._kind is _PAIR else _number(count, value)) / self._whole
        return weight

    def _power(self, count: Tensor) -> Tensor:
        # A power of two changes no digit, and nothing overflows in half precision.
        whole = torch.where(count == 0, max(1, *self._rows), count) * len(self._rows)
        return torch.exp2(whole.clamp(min=1).log2().round())


_MEAN, _PAIR, _COUNTED, _SUM = "a mean", "a pair of total and count", "a mean over what is counted", "a sum"
#: The kind of loss, by the number of leaves that the objective gives.
_KINDS = {1: _MEAN, 2: _PAIR, 3: _COUNTED}


def _number(count: Any, like: Tensor) -> Tensor:
    dtype = _wide(like.dtype)
    if isinstance(count, Tensor):
        return count.reshape(()).to(like.device, dtype)
    return torch.full((), count, dtype=dtype, device=like.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
