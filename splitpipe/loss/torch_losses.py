"""torch's own losses, and what their means divide by, as in torch.

    loss                                       its mean divides by
    cross_entropy, nll_loss (class indices)    the targets that aren't ignored, weighted by class
    cross_entropy (probabilities)              the samples
    losses of a row of classes, or of pairs    the samples
    all other losses                           the elements
"""
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.dtensor import is_dtensor
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss.ledger import Constant, Ledger, Meaning, Rows, Turned
from splitpipe.loss.terms import MEAN, SUM, Count, Number, Unknown

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
    average, reduce, how = given.get("size_average"), given.get("reduce"), given.get("reduction", "mean")
    if average is not None or reduce is not None:  # torch's deprecated options.
        how = "none" if reduce is False else "sum" if average is False else "mean"
    with DisableTorchFunction():
        meaning, count = _unknown(ledger, given), None
        try:
            kind = _counted if name in _COUNTED else _of_elements if name in _ELEMENTS else _of_samples
            meaning = meaning or kind(ledger, name, given)
            if how not in ("none", "sum") and isinstance(meaning, Rows):
                count = Count(_count(name, given, how))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            meaning = None  # Odd arguments, of which the loss may raise its own error.
    if count is None or not isinstance(count.value, Tensor) or given.get("weight") is None:
        out, total = function(*args, **kwargs), None
    else:  # If all targets' classes have weight 0, the gradients of torch's mean are 0 / 0.
        total = function(**{**given, "reduction": "sum"})
        out = total / count.value
    with DisableTorchFunction():
        if isinstance(meaning, Rows) and how != "none":
            term = ledger.term(out if total is None else total, SUM if count is None else MEAN, count, name, meaning)
            meaning = Number((replace(term, divided=total is None),))
        ledger.put(out, Unknown(name) if meaning is None else meaning)
    return out


def _unknown(ledger: Ledger, given: dict[str, Any]) -> Meaning | None:
    """An argument that isn't known, or is computed from values of the batch: delta=errors.median().item()."""
    for x in given.values():
        meaning = ledger.of(x)
        if isinstance(meaning, Unknown):
            return meaning
        if isinstance(meaning, Rows) and meaning.share is not None:
            return Unknown("a loss of quotients")
        if isinstance(x, float) and ledger.may_be_read(x):
            return Unknown(ledger.reading.values)
    return None


def _counted(ledger: Ledger, name: str, given: dict[str, Any]) -> Rows | None:
    """Losses of rows of classes."""
    x, target = given["input"], given["target"]
    rows, by = ledger.of(x), ledger.of(target)
    others = [y for y in given.values() if isinstance(y, Tensor) and y is not x and y is not target]
    if x.dim() < 2 or not isinstance(rows, Rows) or not isinstance(by, Rows) or not rows.alike(by):
        return None
    return replace(rows, doubt=0) if all(isinstance(ledger.of(y), Constant) for y in others) else None


def _of_elements(ledger: Ledger, name: str, given: dict[str, Any]) -> Meaning | None:
    """Losses of elements."""
    values = [value for value in given.values() if isinstance(value, Tensor)]
    if given.get("weight") is not None and not name.startswith("binary"):
        return None  # Its mean divides by their sum.
    rows = ledger.joined(values, torch.broadcast_shapes(*[x.shape for x in values]))
    return replace(rows, doubt=0) if isinstance(rows, Rows) else rows


def _of_samples(ledger: Ledger, name: str, given: dict[str, Any]) -> Rows | None:
    """Losses of samples."""
    values = [value for value in given.values() if isinstance(value, Tensor)]
    first, *others = [ledger.of(x) for x in values if x is not given.get("weight")]
    turned = isinstance(first, Turned) and name == "ctc_loss"
    rows: Any = first.rows if isinstance(first, Turned) else first
    if not turned and (not isinstance(first, Rows) or values[0].dim() != 2):
        return None
    plain = all(
        isinstance(each, Constant) and each.uniform or isinstance(each, Rows) and (turned or each.alike(rows))
        for each in others
    )
    return Rows(rows.chosen) if plain else None


def _count(name: str, given: dict[str, Any], how: str) -> Tensor | float:
    """What a loss's mean divides by."""
    x, target = [value for value in given.values() if isinstance(value, Tensor)][:2]
    x, target = given.get("input", x), given.get("target", target)
    if how == "batchmean" or name in _SAMPLES:
        return float(x.shape[name == "ctc_loss"])
    if name not in _COUNTED:
        return float(math.prod(torch.broadcast_shapes(x.shape, target.shape)))
    if target.is_floating_point():
        return float(x.numel() // x.shape[1])
    ignored, weight = given.get("ignore_index"), given.get("weight")
    counts = target != (-100 if ignored is None else ignored)
    count: Any = counts.sum() if weight is None else torch.where(
        counts, weight.detach()[torch.where(counts, target, 0)], 0).sum()
    return count.full_tensor() if is_dtensor(count) else count  # type: ignore[no-any-return]
