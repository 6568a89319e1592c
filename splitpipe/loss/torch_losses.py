"""torch's own losses, and what their means divide by.

The mean of cross_entropy and nll_loss of class indices divides by the targets that aren't ignored, weighted by class;
that of all others by samples or elements, whose numbers are in proportion.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.dtensor import is_dtensor
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss.function_call import ODD, FunctionCall
from splitpipe.loss.ledger import UNIFORM, Constant, Meaning, Rows, TimeMajor
from splitpipe.loss.numbers import product

#: Losses whose means divide by targets, by samples, and by elements.
_COUNTED = frozenset("cross_entropy nll_loss linear_cross_entropy".split())
_SAMPLES = frozenset(
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss cosine_embedding_loss ctc_loss".split()
)
_ELEMENTS = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss hinge_embedding_loss soft_margin_loss gaussian_nll_loss margin_ranking_loss".split()
)
NAMES = _COUNTED | _SAMPLES | _ELEMENTS


@lru_cache
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a loss's parameters."""
    return tuple(inspect.signature(function).parameters)


def compute(call: FunctionCall, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Computes a loss; ``call.total`` and ``call.count``: what its mean is a quotient of."""
    if call.kwargs.get("reduction", "mean") not in ("none", "sum"):
        with DisableTorchFunction():
            try:
                call.count = _count(call)
            except ODD:
                pass  # The loss may raise its own error.
    if not isinstance(call.count, Tensor) or call.kwargs.get("weight") is None:
        return function(*args, **kwargs)  # type: ignore[no-any-return]
    call.total = function(*call.args, **{**call.kwargs, "reduction": "sum"})
    out: Tensor = call.total / call.count  # If all weights are 0, gradients of torch's own mean are NaN.
    return out.to(call.total.dtype)


def loss(call: FunctionCall) -> Meaning | None:
    """A loss of rows, by its reduction."""
    rows, how = _entries(call), call.kwargs.get("reduction", "mean")
    if not isinstance(rows, Rows) or how == "none":
        return rows
    if how == "sum":
        return call.summed(rows)
    return call.averaged(rows, product(call.out, call.count) if call.total is None else call.total, call.count)


def _entries(call: FunctionCall) -> Meaning | None:
    """What the losses are before they are added up; None: not recognised."""
    x, weight, target = call.operands[0], call.kwargs.get("weight"), call.kwargs.get("target")
    if any([call.kwargs.get(old) is not None for old in ("size_average", "reduce")]):  # torch's deprecated options.
        return None
    if call.name in _ELEMENTS:
        if weight is not None and not call.name.startswith("binary"):
            return None  # Its mean divides by their sum.
        if call.kwargs.get("reduction") == "batchmean" and not isinstance(call.of(x), Rows):
            return None  # It divides by the length of a constant.
        return call.joined(shape=torch.broadcast_shapes(*[y.shape for y in call.operands]))
    rows, others = call.of(x), [(y, call.of(y)) for y in call.operands if y is not x and y is not weight]
    if isinstance(rows, TimeMajor) and call.name == "ctc_loss":
        return Rows() if all([isinstance(each, Rows) or each is UNIFORM for _, each in others]) else None
    if not isinstance(rows, Rows) or not isinstance(call.of(weight), Constant):
        return None
    counted = call.name in _COUNTED  # Of classes of rows, and not of a single one.
    plain = x.dim() > 1 and isinstance(call.of(target), Rows) if counted else x.dim() == 2
    return rows if plain and all([
        rows.alike(each) or isinstance(each, Constant) and (each.uniform or counted and y is not target)
        for y, each in others
    ]) else None


def _count(call: FunctionCall) -> Tensor | float:
    """What a loss's mean divides by, or what is in proportion to that."""
    x = next((y for y in call.operands if isinstance(call.of(y), (Rows, TimeMajor))), call.operands[0])
    target, weight = call.kwargs.get("target"), call.kwargs.get("weight")
    if call.name not in _COUNTED or not isinstance(target, Tensor) or target.is_floating_point():
        return float(x.shape[call.name == "ctc_loss"] if x.dim() else 1)
    ignored = call.kwargs.get("ignore_index")
    counts = target != (-100 if ignored is None else ignored)
    count: Any = counts.sum() if weight is None else torch.where(
        counts, weight.detach()[torch.where(counts, target, 0)], 0).sum()
    return count.full_tensor() if is_dtensor(count) else count  # type: ignore[no-any-return]
