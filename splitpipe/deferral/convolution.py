"""Convolutions in one to three dimensions, including transposed ones."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from splitpipe.deferral.accumulator import Pair, Total, joined

#: Multiplications per microbatch from which on a CPU gains by computing weight gradients in idle time.
_MANY = 2**25
#: Multiplications per microbatch from which on a CPU gains by one weight gradient for several microbatches.
_SOME = 2**22
#: One weight gradient for several microbatches pays if this many of them take no more memory than the weight.
_SEVERAL = 4
#: Bytes of a microbatch's input and output gradient above which a CPU computes its weight gradient separately.
_LARGE = 2**19


class Convolution:
    """The gradients of weight and bias in a convolution of x with the weight, plus the bias."""

    @staticmethod
    def pays(x: Tensor, weight: Tensor, geometry: Sequence[Any], fills: bool, gathers: bool) -> bool:
        """True if a stage gains by computing them separately: see SplitFunction.pays."""
        if not x.is_cpu:
            return True
        # On the CPU, both gradients take the same time separately as together, and splitting them takes additional
        # time.
        stride, _, _, transposed, _, groups = geometry
        channels: int = weight.shape[1] * groups if transposed else weight.shape[0]
        inputs, step = x.shape[0] * prod(x.shape[2:]), max(1, prod(stride))  # The elements of one channel.
        outputs = inputs * step if transposed else inputs // step
        multiplications: int = weight.numel() * min(inputs, outputs)
        if fills:
            return multiplications >= _MANY
        few = _SEVERAL * (x.numel() + channels * outputs) <= weight.numel()
        return few and multiplications >= _SOME and gathers

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the gradients of all calls to the sums."""
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
