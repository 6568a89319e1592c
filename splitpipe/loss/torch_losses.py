"""torch's own losses, and the divisors of their means, as in torch.

    loss                                       its mean divides by
    cross_entropy, nll_loss (class indices)    the targets that aren't ignored, weighted by class
    cross_entropy (probabilities)              the samples
    losses of a row of classes, or of pairs    the samples
    all other losses                           the elements

A mean of nothing is 0 / 0. It has no part in the batch's mean, but would reach the gradients of what it is multiplied
by, so it is 0 here. The mean of a whole batch in which nothing counts is still 0 / 0.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from splitpipe.core.dtensor import meshed
from splitpipe.loss.terms import Amount

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


@dataclass(frozen=True)
class LossCall:
    """A call of a loss; ``tensors`` are its output and target."""

    name: str
    function: Callable[..., Any]
    given: dict[str, Any]
    reduction: str
    tensors: Sequence[Tensor]

    @property
    def of_classes(self) -> bool:
        """Whether the second dimension has classes, if there are two."""
        return self.name in _COUNTED or self.name.startswith("multi")

    @property
    def couples(self) -> bool:
        """Whether rows meet other rows: a single sample with as many classes as rows, or shapes that broadcast."""
        x, target = self.tensors[0], self.tensors[1]
        if self.of_classes:
            return x.dim() < 2
        return self.name in _ELEMENTS and target.dim() > 0 and target.dim() != x.dim()

    def run(self) -> tuple[Tensor, Tensor | None, Amount | None]:
        """The loss; its total, if that was computed; the divisor of its mean, or None for a sum or single losses."""
        if self.reduction not in ("mean", "batchmean"):
            return self.function(**self.given), None, None
        x, target = self.tensors[0], self.tensors[1]
        if self.name not in _COUNTED or target.is_floating_point():
            samples = self._samples(x, target)
            given = self.given if samples else {**self.given, "reduction": "sum"}
            return self.function(**given), None, float(samples)
        ignored, weight = self.given.get("ignore_index"), self.given.get("weight")
        ignored = -100 if ignored is None else ignored
        with torch.no_grad():
            counts = target != ignored
            found: Any = counts.sum() if weight is None else torch.where(
                counts, weight.detach()[torch.where(counts, target, 0)], 0
            ).sum()
            count: Tensor = found.full_tensor() if meshed(found) else found
        if weight is None:
            return torch.where(count == 0, 0, self.function(**self.given)), None, count
        # If all targets' classes have weight 0, the gradients of torch's mean are 0 / 0, too.
        total = self.function(**{**self.given, "reduction": "sum"})
        return total / torch.where(count == 0, 1, count), total, count

    def _samples(self, x: Tensor, target: Tensor) -> int:
        if self.reduction == "batchmean":
            return x.shape[0] if x.dim() else 1
        if self.name in _COUNTED:
            return x.numel() // x.shape[1] if x.dim() > 1 else 1
        if self.name == "ctc_loss":
            return x.shape[1]
        if self.name in _SAMPLES:
            return x.shape[0] if x.dim() > 1 else 1
        return max(x.numel(), target.numel())


@lru_cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def read(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> LossCall | None:
    """The call of a loss; None for another function with its name."""
    name = function.__name__
    if getattr(F, name, None) is not function:
        return None
    given = {**dict(zip(_names(function), args)), **kwargs}
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)  # torch's deprecated options.
    if average is not None or reduce is not None:
        given["reduction"] = "none" if reduce is False else "sum" if average is False else "mean"
    if given.get("reduction") == "elementwise_mean":
        given["reduction"] = "mean"
    x = [value for value in given.values() if isinstance(value, Tensor)]
    if name in _ELEMENTS and name != "binary_cross_entropy_with_logits" and name != "binary_cross_entropy":
        if given.get("weight") is not None:  # Their means are divided by its sum.
            return None
    if len(x) < 2:
        return None
    both = given.get("input", x[0]), given.get("target", x[1])
    return LossCall(name, function, given, given.get("reduction", "mean"), both)
