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
from splitpipe.loss.ledger import MAY_COUNT, Constant, Ledger, Meaning, Rows, TimeMajor
from splitpipe.loss.numbers import Unknown, product

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
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def loss(ledger: Ledger, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a loss, and records what it is."""
    given = {**dict(zip(_parameters(function), args)), **kwargs}
    how, count, meaning = given.get("reduction", "mean"), None, None
    with DisableTorchFunction():
        try:
            meaning = _meaning(FunctionCall(ledger, name, (), given), given)
            if isinstance(meaning, Rows) and how not in ("none", "sum"):
                count = _count(name, given)
        except torch.OutOfMemoryError:
            raise
        except ODD:
            pass  # The loss may raise its own error.
    if isinstance(count, Tensor) and given.get("weight") is not None:  # If all are 0, its gradients are NaN.
        total = function(**{**given, "reduction": "sum"})
        out = (total / count).to(total.dtype)
    else:
        out = function(*args, **kwargs)
        total = out if count is None else product(out, count)
    with DisableTorchFunction():
        if isinstance(meaning, Rows) and how != "none":
            meaning = ledger.atom(name, total.clone(), meaning) if count is None else ledger.mean(
                total, count, name, meaning, out)
        ledger.put(out, Unknown(name) if meaning is None else meaning)
    return out


def _meaning(call: FunctionCall, given: dict[str, Any]) -> Meaning | None:
    """What the losses are before they are added up; None: not recognised."""
    ledger, meanings = call.ledger, call.meanings
    unknown = next((each for each in meanings if isinstance(each, Unknown)), None)
    odd = any([isinstance(each, Rows) and each.share is not None for each in meanings]) or any(
        [given.get(old) is not None for old in ("size_average", "reduce")])  # torch's deprecated options.
    floats = [x for x in given.values() if type(x) is float]
    if ledger.may_be_read(*floats):  # delta=errors.median().item()
        return Unknown(ledger.read)
    if unknown is not None or odd:
        return unknown
    if given.get("reduction") == "sum" and (call.counting or ledger.may_count(*floats, size=True)):
        return Unknown(MAY_COUNT)
    x, weight = next(x for x in given.values() if isinstance(x, Tensor)), given.get("weight")
    if call.name in _ELEMENTS:
        if weight is not None and not call.name.startswith("binary"):
            return None  # Its mean divides by their sum.
        return call.joined(shape=torch.broadcast_shapes(*[x.shape for x in call.operands]))
    first, others = call.of(x), [y for y in call.operands if y is not x and y is not weight]
    if isinstance(first, TimeMajor) and call.name == "ctc_loss":
        known = [isinstance(each, Rows) or isinstance(each, Constant) and each.uniform for each in map(call.of, others)]
        return Rows() if all(known) else None
    if not isinstance(first, Rows) or not isinstance(call.of(weight), Constant):
        return None
    target = given.get("target")  # Classes of rows, and not of a single one; or samples.
    plain = x.dim() > 1 and isinstance(call.of(target), Rows) if call.name in _COUNTED else x.dim() == 2
    return first if plain and all([
        each.alike(first) if isinstance(each, Rows) else isinstance(each, Constant) and (
            each.uniform or call.name in _COUNTED and y is not target)
        for y, each in zip(others, map(call.of, others))
    ]) else None


def _count(name: str, given: dict[str, Any]) -> Tensor | float:
    """What a loss's mean divides by, or what is in proportion to that."""
    x, target = next(value for value in given.values() if isinstance(value, Tensor)), given.get("target")
    if name not in _COUNTED or not isinstance(target, Tensor) or target.is_floating_point():
        return float(x.shape[name == "ctc_loss"] if x.dim() else 1)
    ignored, weight = given.get("ignore_index"), given.get("weight")
    counts = target != (-100 if ignored is None else ignored)
    count: Any = counts.sum() if weight is None else torch.where(
        counts, weight.detach()[torch.where(counts, target, 0)], 0).sum()
    return count.full_tensor() if is_dtensor(count) else count  # type: ignore[no-any-return]
