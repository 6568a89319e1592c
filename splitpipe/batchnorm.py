"""BatchNorm that normalises each microbatch and keeps the running statistics of the whole batch.

A call of the model collects the statistics of its microbatches, and updates each layer once, at its end. So the number
of microbatches may change from call to call, and a failed call changes nothing.
"""
from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextvars import Context, ContextVar
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
    """Statistics of each channel: the number of values, their mean and their unbiased variance."""

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
            part = ChannelStatistics(input.numel() // max(1, input.shape[1]), mean, variance)
            if (active := _active.get()) is not None:
                statistics, microbatch = active
                statistics._add(self, microbatch, part)
            else:
                _update({self: {0: [part]}})
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


class Statistics:
    """The statistics of one call: collected from any thread, one thread at a time per layer, committed once."""

    def __init__(self) -> None:
        self._rounds: dict[DeferredBatchNorm, dict[int, list[ChannelStatistics]]] = {}
        self._calls: Counter[tuple[DeferredBatchNorm, int | None]] = Counter()
        self._open = True

    def collect(self, context: Context, microbatch: int | None = None) -> Context:
        """Makes layers that run in this context, or in a copy of it, add to these statistics, for this microbatch."""
        outer = context.get(_active)
        # Inside a call of another model, the outer one collects: the inner model's batch is one of its microbatches.
        owner = self if outer is None else outer[0]
        context.run(_active.set, (owner, microbatch if owner is self else None))
        return context

    def _add(self, layer: DeferredBatchNorm, microbatch: int | None, part: ChannelStatistics) -> None:
        if self._open:
            # The k-th calls of all microbatches make one update. Without a number, each call is a new microbatch.
            call = self._calls[layer, microbatch]
            if microbatch is not None:
                self._calls[layer, microbatch] += 1
            self._rounds.setdefault(layer, defaultdict(list))[call].append(part)

    def commit(self) -> object:
        """Updates every layer once; returns the tensors that were read: keep them until their streams have waited."""
        rounds, self._rounds, self._open = self._rounds, {}, False
        _update(rounds)
        return rounds


#: The statistics being collected, and the microbatch if known.
_active: ContextVar[tuple[Statistics, int | None] | None] = ContextVar("splitpipe.batchnorm", default=None)


def _joined(parts: list[ChannelStatistics]) -> ChannelStatistics:
    """The combined statistics (Chan, Golub & LeVeque 1983), without waiting for the device."""
    if len(parts) == 1:
        return parts[0]
    total = sum(part.number for part in parts)
    means = torch.stack([part.mean for part in parts])
    variances = torch.stack([part.variance for part in parts])
    counts = torch.cat([means.new_full((1, 1), part.number) for part in parts])
    mean = (means * (counts / total)).sum(0)
    squares = (variances * (counts - 1) + (means - mean).square() * counts).sum(0)
    return ChannelStatistics(total, mean, squares / (total - 1))


def _update(rounds: Mapping[DeferredBatchNorm, dict[int, list[ChannelStatistics]]]) -> None:
    """Computes everything first, then writes in one call, so that no error or interrupt leaves it half done."""
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
                    new = _joined(full)
                    mean = new.mean * weight + mean * (1 - weight)
                    variance = new.variance * weight + variance * (1 - weight)
            values += mean, variance, tracked
        if buffers:
            _foreach_copy_(buffers, values)
