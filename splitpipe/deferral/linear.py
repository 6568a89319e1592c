"""Linear layers and products with a matrix of weights on the right."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from splitpipe.core.dtensor import meshed
from splitpipe.deferral.accumulator import Pair, Total, joined
from splitpipe.deferral.function import Found, Rule, SplitFunction, tensors

#: Up to so many rows, or elements, of a microbatch are worth a copy to have fewer products.
_FEW_ROWS, _FEW_ELEMENTS = 16, 8192


class Linear(SplitFunction):
    """x @ weight.T + bias"""

    casts = True
    views = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any, **options: Any) -> Tensor:
        weight, bias = weights
        ctx.save_for_input(weight if ctx.needs_input_grad else None)
        ctx.save_for_weight(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        (weight,) = ctx.saved_for_input
        return _times(grad_output, weight)

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        _sum(totals, parts, lambda x, grad: (grad.t(), x))


class MeshedLinear(Linear):
    """x @ weight.T + bias, of DTensors, by autograd's operations: placed as its gradients are, with its collectives."""

    meshed = True
    views = False  # The memory of a DTensor is not its own.

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        weight, bias = totals
        for x, grad in _pairs(parts):
            if weight is not None:
                _place(weight, grad.t().mm(x))
            if bias is not None:
                _place(bias, grad.sum(0))


def _place(total: Total, grad: Tensor) -> None:
    """Adds to a sum, but not in place, where a sum would keep its placement: one that is whole can't take a part."""
    grad = grad.to(total.dtype)
    total.value = grad if total.value is None else total.value + grad


class MatMul(SplitFunction):
    """x @ weight + bias"""

    casts = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any, **options: Any) -> Tensor:
        weight, bias = weights
        ctx.save_for_input(weight if ctx.needs_input_grad else None)
        ctx.save_for_weight(x)
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        (weight,) = ctx.saved_for_input
        return _times(grad_output, weight.t())

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        _sum(totals, parts, lambda x, grad: (x.t(), grad))


def _sum(
    totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]], factors: Callable[[Tensor, Tensor], Pair]
) -> None:
    """Adds up the gradients of a weight, a product of these factors each, and of a bias."""
    weight, bias = totals
    pairs = _pairs(parts)
    for x, grad in pairs if len(pairs) == 1 else merged(pairs, weight):
        if weight is not None:
            weight.add_product(*factors(x, grad))
        if bias is not None:
            bias.add(grad.sum(0), fresh=True)


def _pairs(parts: Sequence[tuple[Any, Tensor]]) -> list[Pair]:
    """Input and output gradient of each part, as matrices of one row a sample."""
    return [(_rows(ctx.saved_for_weight[0]), _rows(grad)) for ctx, grad in parts]


def merged(pairs: list[Pair], weight: Total | None) -> list[Pair]:
    """The pairs, fewer of them where that is faster."""
    rows, inner = pairs[0][0].shape
    few = rows <= _FEW_ROWS or rows * (inner + pairs[0][1].shape[1]) <= _FEW_ELEMENTS
    # A total of another type (under autocast) takes a product by three kernels: product, conversion, sum.
    plain = weight is not None and weight.dtype is pairs[0][0].dtype
    if len(pairs) == 1 or (plain and not few):
        return pairs
    return list(joined(pairs))


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    return x.mm(matrix) if x.dim() == 2 else _rows(x).mm(matrix).view(*x.shape[:-1], matrix.shape[1])


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])  # Not -1: there may be no columns.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2 or weight.is_complex():
        return "its weight is no matrix of real numbers"
    if bias is not None and (not isinstance(bias, Tensor) or bias.dim() > 1):
        return "its bias is no vector"
    # By type first: most weights are plain, and a look for meshes takes longer.
    function = MeshedLinear if type(weight) is not Parameter and meshed(weight) else Linear
    return function, input, (weight, bias), {}


def _matmul(input: Tensor, other: Tensor) -> Found:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return "an argument is no tensor"
    if input.dim() == 0 or other.dim() != 2 or not other.requires_grad or other.is_complex():
        return "its second argument is no matrix of weights"
    return MatMul, input, (other, None), {}


def _mm(input: Tensor, mat2: Tensor) -> Found:
    if not tensors(input, mat2) or input.dim() != 2:
        return "an argument is no matrix"
    return _matmul(input, mat2)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Found:
    if options or not tensors(input, mat1, mat2) or mat1.dim() != 2 or mat2.dim() != 2 or mat2.is_complex():
        return "it is given more than a bias and two matrices of real numbers"
    if input.shape != mat2.shape[1:]:
        return "its first argument is no bias, one number a column"
    return MatMul, mat1, (mat2, input), {}


RULES: dict[Callable[..., Any], Rule] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
}
