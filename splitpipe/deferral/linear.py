"""Linear layers, and products with a matrix of weights on the right."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from splitpipe.deferral.accumulator import Pair, Total, joined

#: Up to this many rows, or elements, per microbatch, a copy is worth it to have fewer products.
_FEW_ROWS, _FEW_ELEMENTS = 16, 8192


class Linear:
    """The gradients of weight and bias in x @ weight.T + bias."""

    @staticmethod
    def accumulate(totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the gradients of all calls to the sums."""
        _sum(totals, parts, lambda x, grad: (grad.t(), x))


class MeshedLinear:
    """Like Linear for DTensors, with autograd's operations: the same placements and collectives as its gradients."""

    @staticmethod
    def accumulate(totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the gradients of all calls to the sums."""
        weight, bias = totals
        for x, grad in _pairs(parts):
            if weight is not None:
                _place(weight, grad.t().mm(x))
            if bias is not None:
                _place(bias, grad.sum(0))


def _place(total: Total, grad: Tensor) -> None:
    """Adds to a sum; not in place if the sum would keep its placement, since a whole one can't take a part."""
    grad = grad.to(total.dtype)
    total.value = grad if total.value is None else total.value + grad


class MatMul:
    """The gradients in x @ weight + bias."""

    @staticmethod
    def accumulate(totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the gradients of all calls to the sums."""
        _sum(totals, parts, lambda x, grad: (x.t(), grad))


def _sum(
    totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]], factors: Callable[[Tensor, Tensor], Pair]
) -> None:
    """Adds up the gradients of a weight, each a product of these factors, and of a bias."""
    weight, bias = totals
    pairs = _pairs(parts)
    for x, grad in pairs if len(pairs) == 1 else merged(pairs, weight):
        if weight is not None:
            weight.add_product(*factors(x, grad))
        if bias is not None:
            bias.add_rows(grad)


def _pairs(parts: Sequence[tuple[Any, Tensor]]) -> list[Pair]:
    """Input and output gradient of each part, as matrices with one row per sample."""
    return [(_rows(ctx.saved_for_weight[0]), _rows(grad)) for ctx, grad in parts]


def merged(pairs: list[Pair], weight: Total | None) -> list[Pair]:
    """The pairs, fewer of them where that is faster."""
    rows, inner = pairs[0][0].shape
    few = rows <= _FEW_ROWS or rows * (inner + pairs[0][1].shape[1]) <= _FEW_ELEMENTS
    # A total with another dtype (under autocast) takes three kernels for a product: product, conversion, sum.
    plain = weight is not None and weight.dtype is pairs[0][0].dtype
    if len(pairs) == 1 or (plain and not few):
        return pairs
    return list(joined(pairs))


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])  # Not -1, since there may be no columns.
