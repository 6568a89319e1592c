"""Convolutions in one to three dimensions, and transposed ones."""
from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from splitpipe.deferral.accumulator import Pair, Total, joined
from splitpipe.deferral.function import Found, Rule, SplitFunction, tensors

#: Multiplications of a microbatch from which on a CPU gains by a weight gradient that fills idle time.
_MANY = 2**25
#: Multiplications of a microbatch from which on a CPU gains by one weight gradient for several microbatches.
_SOME = 2**22
#: The number of microbatches that must take no more memory than the weight, for one weight gradient for all to gain.
_SEVERAL = 4
#: Bytes of a microbatch's input and output gradient beyond which a CPU computes its weight gradient alone.
_LARGE = 2**19


class Convolution(SplitFunction):
    """A convolution of x with the weight, plus the bias."""

    casts = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any, **options: Any) -> Tensor:
        weight, bias = weights
        ctx.geometry = options["geometry"]
        ctx.save_for_weight(x, weight)  # Its gradient needs the weight's shape and layout.
        return torch.convolution(x, weight, bias, *ctx.geometry)

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        x, weight = ctx.saved_for_weight
        found: Tensor = torch.ops.aten.convolution_backward(
            grad_output, x, weight, None, *ctx.geometry, (True, False, False)
        )[0]
        return found

    @classmethod
    def pays(
        cls, x: Tensor, weights: Sequence[Tensor | None], options: dict[str, Any], fills: bool, gathers: bool
    ) -> bool:
        weight = weights[0]
        if not x.is_cpu or weight is None:
            return True
        # On the CPU both gradients take as long apart as together, and the split engine takes time of its own.
        stride, _, _, transposed, _, groups = options["geometry"]
        channels: int = weight.shape[1] * groups if transposed else weight.shape[0]
        inputs, step = x.shape[0] * prod(x.shape[2:]), max(1, prod(stride))  # The numbers of one channel.
        outputs = inputs * step if transposed else inputs // step
        multiplications: int = weight.numel() * min(inputs, outputs)
        if fills:
            return multiplications >= _MANY
        few = _SEVERAL * (x.numel() + channels * outputs) <= weight.numel()
        return few and multiplications >= _SOME and gathers

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
        large = weight.is_cpu and sum([tensor.nbytes for tensor in pairs[0]]) > _LARGE
        for x, grad in pairs if large else joined(pairs):
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
        raise ValueError("torch refuses this, too")
    return tuple([operator.index(number) for number in numbers])


@lru_cache(maxsize=1024)
def _options(*geometry: object) -> dict[str, Any]:
    """The options of a convolution: stride, padding, dilation, transposed, output padding, groups."""
    return {"geometry": geometry}


def _read(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Found:
    if not tensors(input, weight, bias):
        return "an argument is no tensor"
    if input.dim() != dimensions + 2 or weight.dim() != dimensions + 2:
        return "its input has no batch dimension"
    if input.is_complex():
        return "its input is complex"
    strides, spread = _numbers(stride, dimensions), _numbers(dilation, dimensions)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        around = [step * (size - 1) for step, size in zip(spread, weight.shape[2:])]
        if strides != (1,) * dimensions or any(total % 2 for total in around):
            return "padding='same' goes with a stride of 1, and with as much padding at the end as at the start"
        padding = [total // 2 for total in around]
    widths, further = _numbers(padding, dimensions), _numbers(output_padding, dimensions)
    options = _options(strides, widths, spread, transposed, further, operator.index(groups))
    return Convolution, input, (weight, bias), options


def _convolve(
    dimensions: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Found:
    return _read(
        dimensions, input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


def _transposed(
    dimensions: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Found:
    return _read(
        dimensions, input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups,
        transposed=True, output_padding=output_padding,
    )


#: F has the same functions.
RULES: dict[Callable[..., Any], Rule] = {
    torch.conv1d: partial(_convolve, 1),
    torch.conv2d: partial(_convolve, 2),
    torch.conv3d: partial(_convolve, 3),
    torch.conv_transpose1d: partial(_transposed, 1),
    torch.conv_transpose2d: partial(_transposed, 2),
    torch.conv_transpose3d: partial(_transposed, 3),
}
