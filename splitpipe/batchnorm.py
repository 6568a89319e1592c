"""BatchNorm that normalises each microbatch and keeps the running statistics of the whole batch.

A call of the model collects the statistics of its microbatches, and updates each layer once, at its end. So the number
of microbatches may change from call to call, and a failed call changes nothing.
"""
from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from splitpipe.checks import some
from splitpipe.core.note import add_note
from splitpipe.core.phase import is_recomputing
from splitpipe.core.torch_private import _BatchNorm, _foreach_copy_

M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger("splitpipe")


class ChannelStatistics(NamedTuple):
    """Statistics of each channel in a microbatch: the number of values, their mean and their unbiased variance."""

    layer: DeferredBatchNorm
    microbatch: int | None  #: None: one that has no number.
    number: int
    mean: Tensor
    variance: Tensor


class DeferredBatchNorm(_BatchNorm):
    """Normalises each microbatch, and keeps the running statistics that nn.BatchNorm would have for the whole batch.

    In a pipeline, running statistics are updated at the end of each forward pass, whatever the number of microbatches;
    elsewhere, by each forward. A layer that is used in several places of a model is updated once for each place, as
    nn.BatchNorm is, but only once overall in a SplitPipe inside another one.

    ``convert_deferred_batch_norm`` makes such layers from BatchNorm layers.

    Raises:
        TypeError: when it is constructed.
        ValueError: in a call, if a microbatch has only one value per channel.

    Example:
        >>> layer = DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm1d(1, momentum=None))
        >>> output = layer(torch.tensor([[1.0], [2.0], [3.0], [6.0]]))
        >>> layer.running_mean, layer.num_batches_tracked
        (tensor([3.]), tensor(1))
    """

    _original: Any  #: The class that the layer was converted from.

    def __init__(self) -> None:
        raise TypeError("expected DeferredBatchNorm.convert_deferred_batch_norm(module), which converts its layers.")

    @classmethod
    def convert_deferred_batch_norm(cls, module: M) -> M:
        """Turns every BatchNorm in a module into a deferred one, in place: each stays the same object.

        Layers without running statistics, and those with a custom ``forward``, such as nn.SyncBatchNorm, are left
        alone.

        Args:
            module: a BatchNorm, or a module that contains some, at any depth.

        Returns:
            The module.

        Raises:
            TypeError: ``module`` isn't a module.
            ValueError: a BatchNorm is parametrized, or lazy and not initialized yet. Nothing is changed then.

        Example:
            >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            >>> DeferredBatchNorm.convert_deferred_batch_norm(model)[1]
            DeferredBatchNorm(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"found module={module!r}: expected an nn.Module that contains BatchNorm layers.")
        found = {
            name: layer for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
            and type(layer).forward is _BatchNorm.forward and "forward" not in vars(layer)
        }
        faults = [
            name for name, layer in found.items()
            if is_parametrized(layer) or any([is_lazy(x) for x in (*layer.parameters(), *layer.buffers())])
        ]
        if faults:
            raise ValueError(
                f"BatchNorm layers ({some(faults)}) are parametrized or not initialized yet: expected plain ones. Run "
                "one batch through the model first, or parametrize them after the conversion."
            )
        for layer in found.values():
            vars(layer)["_original"] = type(layer)
            layer.__class__ = cls
        return module

    def _check_input_dim(self, input: Tensor) -> None:
        self._original._check_input_dim(self, input)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises one microbatch, of shape (rows, channels, ...); in training, records its statistics."""
        running = self.running_mean
        if not self.training or not self.track_running_stats or running is None:
            return super().forward(input)
        self._check_input_dim(input)
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        dtype = running.dtype
        if dtype.itemsize < 4:  # Too coarse for combining statistics; the kernel takes them in the parameters' dtype.
            dtype = torch.float32
            weight, bias = (None if x is None else x.float() for x in (weight, bias))
        # With momentum 1, the kernel stores this input's statistics here, so that it isn't read twice.
        mean, variance = torch.zeros_like(running, dtype=dtype), torch.ones_like(running, dtype=dtype)
        try:
            output = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, self.eps)
        except ValueError as error:
            add_note(error, "Each microbatch is normalised separately: use fewer chunks, or a larger batch.")
            raise
        if not is_recomputing():
            call = collecting.get()
            collected, microbatch = call or ([], None)
            number = input.numel() // max(1, input.shape[1])
            collected.append(ChannelStatistics(self, microbatch, number, mean, variance))
            if call is None:
                update(collected)
        return output


def defer(module: nn.Module, chunks: int, wanted: bool) -> None:
    """Defers every BatchNorm in a module if wanted, or else logs that each sees one microbatch at a time."""
    if wanted:
        DeferredBatchNorm.convert_deferred_batch_norm(module)
        return
    found = [
        name for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, DeferredBatchNorm) and layer.training
    ]
    if found and chunks > 1:
        _log.warning(
            "BatchNorm layers (%s) normalise each microbatch separately in training, and update their running "
            "statistics once per microbatch. deferred_batch_norm=True keeps the running statistics of the whole batch.",
            some(found),
        )


def undefer(module: nn.Module) -> None:
    """Returns every deferred BatchNorm in a module to its original class."""
    for layer in module.modules():
        if isinstance(layer, DeferredBatchNorm):
            layer.__class__ = layer._original
            del layer._original


#: In a call of a model, what layers collect, in any of its threads, and the microbatch if known.
collecting: ContextVar[tuple[list[ChannelStatistics], int | None] | None] = ContextVar(
    "splitpipe.batchnorm", default=None
)


def _joined(parts: list[ChannelStatistics]) -> tuple[Tensor, Tensor]:
    """The combined mean and variance (Chan, Golub & LeVeque 1983), without waiting for the device."""
    if len(parts) == 1:
        return parts[0].mean, parts[0].variance
    total = sum(part.number for part in parts)
    means = torch.stack([part.mean for part in parts])
    variances = torch.stack([part.variance for part in parts])
    counts = torch.cat([means.new_full((1, 1), part.number) for part in parts])
    mean = (means * (counts / total)).sum(0)
    squares = (variances * (counts - 1) + (means - mean).square() * counts).sum(0)
    return mean, squares / (total - 1)


def update(collected: Iterable[ChannelStatistics]) -> None:
    """Updates each layer once for each of its places in the model.

    Computes everything first, then writes in one call, so that no error or interrupt leaves it half done.
    """
    rounds: dict[DeferredBatchNorm, dict[int, list[ChannelStatistics]]] = {}
    calls = Counter[tuple[DeferredBatchNorm, int | None]]()
    for part in collected:
        # The k-th calls of all microbatches make one update. Without a number, each call is a new microbatch.
        key = part.layer, part.microbatch
        rounds.setdefault(part.layer, defaultdict(list))[calls[key]].append(part)
        calls[key] += part.microbatch is not None
    buffers, values = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for layer, parts in rounds.items():
            mean, variance, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
            if mean is None or variance is None or tracked is None:
                continue
            buffers += mean, variance, tracked
            wide = torch.promote_types(mean.dtype, torch.float32)
            mean, variance = mean.to(wide), variance.to(wide)
            for each in parts.values():
                tracked = tracked + 1
                weight = tracked.to(wide).reciprocal() if layer.momentum is None else layer.momentum
                if full := [part for part in each if part.number]:
                    own_mean, own_variance = _joined(full)
                    mean = own_mean * weight + mean * (1 - weight)
                    variance = own_variance * weight + variance * (1 - weight)
            values += mean, variance, tracked
        if buffers:
            _foreach_copy_(buffers, values)
