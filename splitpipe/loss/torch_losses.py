"""torch's own losses, and what their means divide by.

The mean of cross_entropy and nll_loss of class indices divides by the targets that aren't ignored, weighted by class;
that of all others by samples or elements, whose numbers are in proportion.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.dtensor import is_dtensor
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss.function_call import FunctionCall
from splitpipe.loss.ledger import MAY_COUNT, Constant, Ledger, Meaning, Rows, TimeMajor
from splitpipe.loss.numbers import Amount, Unknown

_COUNTED = frozenset("cross_entropy nll_loss linear_cross_entropy".split())
_SAMPLES = frozenset(
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss cosine_embedding_loss ctc_loss".split()
)
_ELEMENTS = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss hinge_embedding_loss soft_margin_loss gaussian_nll_loss margin_ranking_loss".split()
)
#: The names of the functions.
NAMES = _COUNTED | _SAMPLES | _ELEMENTS


@lru_cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def loss(ledger: Ledger, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a loss, and records what it is."""
    given = {**dict(zip(_parameters(function), args)), **kwargs}
    how = given.get("reduction", "mean")
    count: Amount | None = None
    with DisableTorchFunction():
        call = FunctionCall(ledger, name, (), given, None)
        meaning = _unknown(call)
        try:
            kind = _counted if name in _COUNTED else _of_elements if name in _ELEMENTS else _of_samples
            meaning = meaning or kind(call)
            if isinstance(meaning, Rows):
                meaning = Unknown(MAY_COUNT) if how == "sum" and _may_count(call) else replace(meaning, counting=False)
            if how not in ("none", "sum") and isinstance(meaning, Rows):
                count = _count(name, given)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            meaning = None  # Odd arguments, of which the loss may raise its own error.
    if not isinstance(count, Tensor) or given.get("weight") is None:
        out, total = function(*args, **kwargs), None
    else:  # If all targets' classes have weight 0, the gradients of torch's mean are 0 / 0.
        total = function(**{**given, "reduction": "sum"})
        out = total / count
    with DisableTorchFunction():
        if isinstance(meaning, Rows) and how != "none":
            meaning = ledger.atom(out if total is None else total, name, meaning, count, divided=total is None)
        ledger.put(out, Unknown(name) if meaning is None else meaning)
    return out


def _unknown(call: FunctionCall) -> Meaning | None:
    """What isn't known of the arguments; Python may have computed them: delta=errors.median().item()."""
    unknown = next((each for each in call.meanings if isinstance(each, Unknown)), None)
    if any([isinstance(x, float) and call.ledger.is_read(x) for x in call.kwargs.values()]):
        return Unknown(call.ledger.host_reads.values)
    odd = any([isinstance(each, Rows) and each.share is not None for each in call.meanings]) or any(
        [call.kwargs.get(old) is not None for old in ("size_average", "reduce")])  # torch's deprecated options.
    return unknown or (Unknown(call.name) if odd else None)


def _may_count(call: FunctionCall) -> bool:
    """True for an argument that was divided by, or consists of, a number that may count rows."""
    values = [call.scalar(x) for x in call.operands]
    return call.ledger.may_count(*values) or any([isinstance(each, Rows) and each.counting for each in call.meanings])


def _counted(call: FunctionCall) -> Rows | None:
    """Losses of rows of classes."""
    x, target = call.kwargs["input"], call.kwargs["target"]
    rows, by = call.of(x), call.of(target)
    others = [call.of(y) for y in call.operands if y is not x and y is not target]
    if not isinstance(rows, Rows) or not isinstance(by, Rows) or x.dim() < 2 or not rows.alike(by):
        return None
    return rows if all([isinstance(each, Constant) for each in others]) else None


def _of_elements(call: FunctionCall) -> Meaning | None:
    """Losses of elements."""
    if call.kwargs.get("weight") is not None and not call.name.startswith("binary"):
        return None  # Its mean divides by their sum.
    return call.joined(shape=torch.broadcast_shapes(*[x.shape for x in call.operands]))


def _of_samples(call: FunctionCall) -> Rows | None:
    """Losses of samples."""
    values = [x for x in call.operands if x is not call.kwargs.get("weight")]
    first, *others = map(call.of, values)
    turned = isinstance(first, TimeMajor) and call.name == "ctc_loss"
    rows: Any = first.rows if isinstance(first, TimeMajor) else first
    plain = turned or isinstance(first, Rows) and values[0].dim() == 2
    return Rows(rows.chosen) if plain and all([
        isinstance(each, Constant) and each.uniform or isinstance(each, Rows) and (turned or each.alike(rows))
        for each in others
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
