"""Convolutions in one to three dimensions, and transposed ones."""
from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from splitpipe.deferral.function import SplitFunction
from splitpipe.deferral.merge import Pair, together
from splitpipe.deferral.rule import Found, Rule, tensors
from splitpipe.deferral.total import Total


@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution, one a dimension, as torch.convolution takes them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[object, ...]:
        """In torch's order."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


class Convolution(SplitFunction):
    """A convolution of x with the weight, plus the bias."""

    casts = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        weight, bias = weights
        ctx.geometry = options["geometry"].arguments
        ctx.save_for_weight(x, weight)  # Of the weight, its gradient needs the shape and the layout.
        assert weight is not None
        return torch.convolution(x, weight, bias, *ctx.geometry)

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        x, weight = ctx.saved_for_weight
        found: Tensor = torch.ops.aten.convolution_backward(
            grad_output, x, weight, None, *ctx.geometry, (True, False, False)
        )[0]
        return found

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        alike: dict[object, list[tuple[Any, Tensor]]] = defaultdict(list)  # A weight may be used in several ways.
        for ctx, grad in parts:
            alike[ctx.geometry, ctx.saved_for_weight[1].dtype].append((ctx, grad))
        for some in alike.values():
            cls._accumulate(totals, some)

    @staticmethod
    def _accumulate(totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        ctx = parts[0][0]
        weight = ctx.saved_for_weight[1]
        pairs: list[Pair] = [(ctx.saved_for_weight[0], grad) for ctx, grad in parts]
        wants_weight, wants_bias = [total is not None for total in totals]
        for run in together(pairs):
            x, grad = run[0] if len(run) == 1 else (torch.cat([x for x, _ in run]), torch.cat([g for _, g in run]))
            size = [grad.shape[1]] if wants_bias else None
            found = torch.ops.aten.convolution_backward(
                grad, x, weight, size, *ctx.geometry, (False, wants_weight, wants_bias)
            )
            for total, gradient in zip(totals, found[1:]):
                if total is not None:
                    total.add(gradient, fresh=True)


def _numbers(value: Any, dimensions: int) -> tuple[int, ...]:
    """One number a dimension, given as one for all, or one each."""
    numbers = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(numbers) == 1:
        numbers *= dimensions
    if len(numbers) != dimensions:
        raise ValueError(f"{value!r} does not fit {dimensions} dimensions")
    return tuple([operator.index(number) for number in numbers])


def _refused(dimensions: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    if not tensors(input, weight, bias):
        return "an argument is no tensor"
    if input.dim() != dimensions + 2 or weight.dim() != dimensions + 2:
        return "its input has no batch dimension"
    return "its input is complex" if input.is_complex() else ""


def _convolve(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Found:
    reason = _refused(dimensions, input, weight, bias)
    if reason:
        return reason
    strides, spread = _numbers(stride, dimensions), _numbers(dilation, dimensions)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        if strides != (1,) * dimensions:
            return "padding='same' goes with a stride of 1"
        around = [step * (size - 1) for step, size in zip(spread, weight.shape[2:])]
        if any(total % 2 for total in around):
            # An odd number puts one more at the end than at the start: this one is added beforehand.
            input = F.pad(input, [number for total in reversed(around) for number in (0, total % 2)])
        padding = [total // 2 for total in around]
    none = (0,) * dimensions
    geometry = Geometry(strides, _numbers(padding, dimensions), spread, False, none, operator.index(groups))
    return Convolution, input, (weight, bias), {"geometry": geometry}


def _transposed(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Found:
    reason = _refused(dimensions, input, weight, bias)
    if reason:
        return reason
    strides, around, spread, further = (
        _numbers(value, dimensions) for value in (stride, padding, dilation, output_padding)
    )
    geometry = Geometry(strides, around, spread, True, further, operator.index(groups))
    return Convolution, input, (weight, bias), {"geometry": geometry}


_PLAIN = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_TRANSPOSED = {
    torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3,
    F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3,
}

RULES: dict[Callable[..., Any], Rule] = {
    **{function: partial(_convolve, dimensions) for function, dimensions in _PLAIN.items()},
    **{function: partial(_transposed, dimensions) for function, dimensions in _TRANSPOSED.items()},
}
