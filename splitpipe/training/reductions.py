"""torch's own losses: the divisor of each, by which the microbatches' losses make exactly the batch's.

    reduction   target                 loss of the batch
    "sum"       any                    sum of sum_i
    "mean"      class indices          sum of count_i * mean_i / sum of count_i
    "mean"      any other              sum of rows_i * mean_i / rows

The count is torch's own: the targets that are not ignored, each by the weight of its class. A loss is known by its
exact type or function, and is called as it was given: its hooks fire, and a compiled loss is not compiled again.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe.core.dtensor import meshed

#: Means over targets that can be ignored, and that classes weigh.
_COUNTED: dict[Any, Any] = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
#: Means over samples, each a row of classes.
_SAMPLES: dict[Any, Any] = {
    nn.MultiMarginLoss: F.multi_margin_loss, nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
}
#: Means over elements.
_ELEMENTS: dict[Any, Any] = {
    nn.L1Loss: F.l1_loss, nn.MSELoss: F.mse_loss, nn.SmoothL1Loss: F.smooth_l1_loss, nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy, nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div, nn.PoissonNLLLoss: F.poisson_nll_loss, nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.SoftMarginLoss: F.soft_margin_loss, nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # New in torch 2.13.
    _COUNTED[nn.LinearCrossEntropyLoss] = F.linear_cross_entropy
_MODULES = _COUNTED | _SAMPLES | _ELEMENTS
_FUNCTIONS: frozenset[Any] = frozenset(_MODULES.values())
#: Their weight is one of elements, and they are divided by its sum: it would have to be cut as the batch is.
_BY_ELEMENT: frozenset[Any] = frozenset([F.l1_loss, F.mse_loss, F.huber_loss])


@dataclass(frozen=True)
class TorchLoss:
    """A loss of torch's own: the weight is of the classes, a target that is ignored does not count."""

    function: Callable[..., Any]
    reduction: str
    weight: Tensor | None
    ignored: int
    smoothing: float

    @property
    def smoothed(self) -> Tensor | None:
        """The weight, if a target whose class has weight 0 has a loss all the same (label smoothing)."""
        counted = self.reduction == "mean" and self.function is not F.nll_loss and self.smoothing
        return self.weight if counted else None

    def verify(self, output: Any, target: Any) -> None:
        """Refuses shapes that torch does not take for a batch of rows."""
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return
        if self.function not in _ELEMENTS.values():
            if output.dim() < 2:
                raise ValueError(
                    f"{self._shown(output, target)}, which it takes for a single sample: expected an output of "
                    "shape (rows, classes, ...), which is cut into microbatches along its rows."
                )
        elif target.dim() and target.dim() != output.dim():
            raise ValueError(
                f"{self._shown(output, target)}: broadcasting has each row of one meet all rows of the other, "
                "also those of other microbatches. Expected as many dimensions, as by target.unsqueeze(-1)."
            )

    def _shown(self, output: Tensor, target: Tensor) -> str:
        shapes = f"an output of shape {list(output.shape)} and a target of shape {list(target.shape)}"
        return f"{self.function.__name__} has {shapes}"

    def count(self, target: Any) -> Tensor | None:
        """The divisor of the mean over these targets; None: the number of rows."""
        if self.reduction != "mean" or self.function not in _COUNTED.values() or not isinstance(target, Tensor):
            return None
        if target.is_floating_point():  # The target has a probability for each class.
            return None
        with torch.no_grad():
            counts = target != self.ignored
            if self.weight is None:
                found = counts.sum()
            else:
                classes = torch.where(counts, target, 0)
                found = torch.where(counts, self.weight.detach()[classes], 0).sum()
            whole: Any = found
            return whole.full_tensor() if meshed(found) else found

    def without(self, count: Tensor, target: Tensor) -> Tensor:
        """The targets, all of them ignored if the classes of all weigh nothing: torch's gradient would be nan."""
        return target if self.weight is None else torch.where(count == 0, self.ignored, target)


def torch_loss(loss_fn: object) -> TorchLoss | None:
    """The loss, if it is torch's own: a module, a function, or a partial of one."""
    plain = _compiled(loss_fn)
    if isinstance(plain, nn.Module):
        # With options, a linear_cross_entropy divides its gradient by the count before it has one.
        if type(plain) not in _MODULES or "forward" in vars(plain) or getattr(plain, "options", None) is not None:
            return None
        names = "reduction", "weight", "ignore_index", "label_smoothing"
        options = {name: getattr(plain, name) for name in names if hasattr(plain, name)}
        return _from_options(_MODULES[type(plain)], options)
    if type(plain) is partial:
        function = _compiled(plain.func)
        return None if plain.args else _of(function, plain.keywords)
    return _of(plain, {})


def _of(function: object, options: Mapping[str, Any]) -> TorchLoss | None:
    if not isinstance(function, FunctionType) or function not in _FUNCTIONS:
        return None
    # With arguments that torch has deprecated (size_average, reduce) it counts as a loss of the user's own.
    if options.keys() & {"input", "target", "size_average", "reduce"}:
        return None
    if function in _BY_ELEMENT and options.get("weight") is not None:
        return None
    return _from_options(function, options)


def _from_options(function: Callable[..., Any], options: Mapping[str, Any]) -> TorchLoss:
    ignored = options.get("ignore_index")
    return TorchLoss(
        function, options.get("reduction", "mean"), options.get("weight"), -100 if ignored is None else ignored,
        options.get("label_smoothing", 0.0),
    )


def _compiled(loss_fn: Any) -> Any:
    """The function that torch.compile was given."""
    # torch has no public way back to it. Its own functions it wraps once more.
    if type(loss_fn).__name__ == "OptimizedModule":
        return loss_fn._orig_mod
    if isinstance(loss_fn, nn.Module) or not hasattr(loss_fn, "_torchdynamo_orig_callable"):
        return loss_fn
    given = loss_fn._torchdynamo_orig_callable
    inline = getattr(given, "__globals__", {}).get("__name__") == "torch._dynamo.external_utils"
    return getattr(given, "__wrapped__", given) if inline else given
