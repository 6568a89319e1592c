"""BatchNorm that normalises each microbatch and keeps the running statistics of the whole batch.

A call of the model collects the statistics of its microbatches, and updates each layer once, at its end. So the number
of microbatches may change from call to call, and a failed call changes nothing.
"""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import Self

from splitpipe.checks import is_integer, number_of
from splitpipe.core.note import add_note
from splitpipe.core.phase import is_recomputing
from splitpipe.core.torch_private import _BatchNorm, _foreach_copy_

M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger("splitpipe")


@dataclass(frozen=True)
class Part:
    """Statistics of each channel: the number of values, their mean and their unbiased variance."""

    count: int
    mean: Tensor
    variance: Tensor


class DeferredBatchNorm(_BatchNorm):
    """Normalises each microbatch, and keeps the running statistics that nn.BatchNorm would have for the whole batch.

    In a SplitPipe, running statistics are updated at the end of each forward pass, whatever the number of microbatches.
    A layer used on its own updates them after every ``chunks`` forwards; switching between train and eval restarts the
    count. A layer that is used in several places of a model is updated once for each place, as nn.BatchNorm is, but
    only once overall in a SplitPipe inside another SplitPipe.

    Args:
        num_features: channels, the second dimension of the input ``(N, C, ...)``.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics. None gives all batches the same weight.
        affine: whether the layer has a learnable weight and bias, of shape ``(C,)``.
        chunks: number of microbatches per batch, for a layer used on its own.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``chunks`` or ``num_features`` is below 1, or ``eps`` or ``momentum`` is negative or not finite. In
            a call: a microbatch has only one value per channel.

    Example:
        >>> layer = DeferredBatchNorm(1, momentum=None, chunks=2)
        >>> for microbatch in torch.tensor([[1.0], [2.0], [3.0], [6.0]]).chunk(2):
        ...     output = layer(microbatch)
        >>> layer.running_mean, layer.num_batches_tracked
        (tensor([3.]), tensor(1))
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        _verify_count("chunks", chunks, "microbatches")
        _verify_count("num_features", num_features, "channels")
        number_of("eps", eps, "the number added to the variance")
        if momentum is not None:
            number_of("momentum", momentum, "the weight of a batch")
        if not isinstance(affine, bool):
            raise TypeError(f"found affine={affine!r}: expected True or False.")
        super().__init__(num_features, eps, momentum, affine)
        self._defer(chunks, None)

    def _defer(self, chunks: int, original: type[nn.Module] | None) -> None:
        self.chunks = chunks
        self._original = original
        self._pending: list[Part] = []

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M:
        """Turns every BatchNorm in a module into a deferred one, in place: each stays the same object.

        Parameters, buffers, hooks, mode and the check of the input's dimensions stay as they are. Layers without
        running statistics and layers with a custom ``forward``, such as nn.SyncBatchNorm, are left alone.

        Args:
            module: a BatchNorm, or a module that contains some, at any depth.
            chunks: as in the constructor.

        Returns:
            The module.

        Raises:
            TypeError: ``chunks`` isn't an int, or ``module`` isn't a module.
            ValueError: ``chunks`` is below 1, or a BatchNorm is parametrized, or lazy and not initialized yet. Nothing
                is changed in that case.

        Example:
            >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            >>> DeferredBatchNorm.convert_deferred_batch_norm(model)[1]
            DeferredBatchNorm(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
        """
        _verify_count("chunks", chunks, "microbatches")
        if not isinstance(module, nn.Module):
            raise TypeError(f"found module={module!r}: expected an nn.Module that contains BatchNorm layers.")
        found = [(name, layer) for name, layer in module.named_modules() if _deferrable(layer)]
        faults = [fault for name, layer in found for fault in _faults(name, layer)]
        if faults:
            raise ValueError("\n".join(faults))
        for _, layer in found:
            original = type(layer)
            layer.__class__ = cls
            cast(DeferredBatchNorm, layer)._defer(chunks, original)
        return module

    def _check_input_dim(self, input: Tensor) -> None:
        if self._original is not None:
            # The check may call other methods of its class: call it on an instance with the state of this one.
            original: Any = object.__new__(self._original)
            vars(original).update(vars(self))
            original._check_input_dim(input)
        elif input.dim() < 2:
            raise ValueError(f"found a {input.dim()}D input: expected (N, C, ...). Add the missing dimensions.")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises one microbatch, of shape (rows, channels, ...); in training, records its statistics."""
        running = self.running_mean
        if not self.training or not self.track_running_stats or running is None:
            return super().forward(input)
        self._check_input_dim(input)
        if running.dtype.itemsize < 4:
            # The kernel takes running statistics only in the parameters' dtype, which is too coarse for combining them.
            output = self._normalised(input, None, None)
            if not is_recomputing():
                self._note(_measured(input))
            return output
        # With momentum 1, the kernel stores this input's statistics here, so that it isn't read twice.
        mean, variance = torch.zeros_like(running), torch.ones_like(running)
        output = self._normalised(input, mean, variance)
        if not is_recomputing():
            self._note(Part(_count(input), mean, variance))
        return output

    def _normalised(self, input: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
        try:
            return F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        except ValueError as error:
            add_note(error, "Each microbatch is normalised separately: use fewer chunks, or a larger batch.")
            raise

    def _note(self, part: Part) -> None:
        active = _active.get()
        if active is not None:
            statistics, microbatch = active
            statistics._add(self, microbatch, part)
            return
        self._pending.append(part)
        if len(self._pending) >= self.chunks:
            pending, self._pending = self._pending, []
            _update({self: [pending]})

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, as nn.Module's does.

        Raises:
            ValueError: ``mode`` is neither True nor False.
        """
        was = self.training
        super().train(mode)
        if self.training != was:
            self._pending = []
        return self

    def reset_running_stats(self) -> None:
        """Resets the statistics, as nn.BatchNorm's does."""
        self._pending = []
        super().reset_running_stats()


def log_undeferred(module: nn.Module, chunks: int) -> None:
    """Logs that BatchNorm layers that aren't deferred see one microbatch at a time."""
    found = [
        name for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, DeferredBatchNorm) and layer.training
    ]
    if found and chunks > 1:
        _log.warning(
            "BatchNorm layers (%s%s) normalise each microbatch separately in training, and update their running "
            "statistics once per microbatch. deferred_batch_norm=True keeps the running statistics of the whole batch.",
            ", ".join(map(repr, found[:3])), f" and {len(found) - 3} more" if len(found) > 3 else "",
        )


def undefer(module: nn.Module) -> None:
    """Returns every BatchNorm in a module that was made a deferred one to its original class."""
    for layer in module.modules():
        if isinstance(layer, DeferredBatchNorm) and layer._original is not None:
            layer.__class__, own = layer._original, vars(layer)  # type: ignore[assignment]
            for name in ("chunks", "_original", "_pending"):
                del own[name]


class Statistics:
    """The statistics of one call: collected from any thread, one thread at a time per layer, committed once."""

    def __init__(self) -> None:
        self._rounds: dict[DeferredBatchNorm, list[list[Part]]] = {}
        self._calls: Counter[tuple[DeferredBatchNorm, int]] = Counter()
        self._open = True

    def collect(self, context: Context, microbatch: int | None = None) -> Context:
        """Makes layers that run in this context, or in a copy of it, add to these statistics, for this microbatch."""
        outer = context.get(_active)
        # Inside a call of another model, the outer one collects: the inner model's batch is one of its microbatches.
        owner = self if outer is None else outer[0]
        context.run(_active.set, (owner, microbatch if owner is self else None))
        return context

    def _add(self, layer: DeferredBatchNorm, microbatch: int | None, part: Part) -> None:
        if not self._open:
            return
        rounds = self._rounds.setdefault(layer, [])
        # The k-th calls of all microbatches make one update. Without a number, each call counts as a new microbatch.
        call = 0
        if microbatch is not None:
            call = self._calls[layer, microbatch]
            self._calls[layer, microbatch] += 1
        if call == len(rounds):
            rounds.append([])
        rounds[call].append(part)

    def commit(self) -> object:
        """Updates every layer once; returns the tensors that were read: keep them until their streams have waited."""
        rounds, self._rounds, self._open = self._rounds, {}, False
        _update(rounds)
        return rounds


#: The statistics being collected, and the microbatch if known.
_active: ContextVar[tuple[Statistics, int | None] | None] = ContextVar("splitpipe.batchnorm", default=None)


def _count(input: Tensor) -> int:
    return input.numel() // max(1, input.shape[1])


def _measured(input: Tensor) -> Part:
    if not input.numel():
        nothing = torch.zeros(input.shape[1], device=input.device)
        return Part(0, nothing, nothing)
    with torch.no_grad():
        dims = [dim for dim in range(input.dim()) if dim != 1]
        variance, mean = torch.var_mean(input.float(), dims)
    return Part(_count(input), mean, variance)


def _joined(parts: list[Part]) -> Part:
    """The combined statistics (Chan, Golub & LeVeque 1983), without waiting for the device."""
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: part.count)
    total = sum(part.count for part in parts)
    means = torch.stack([part.mean for part in parts])
    variances = torch.stack([part.variance for part in parts])
    alike = Counter(part.count for part in parts)
    counts = torch.cat([means.new_full((number, 1), count) for count, number in alike.items()])
    mean = (means * (counts / total)).sum(0)
    squares = (variances * (counts - 1) + (means - mean).square() * counts).sum(0)
    return Part(total, mean, squares / (total - 1))


def _update(rounds: Mapping[DeferredBatchNorm, list[list[Part]]]) -> None:
    """Computes everything first, then writes in one call, so that no error or interrupt leaves it half done."""
    with torch.no_grad():
        updates = [update for layer, parts in rounds.items() for update in _updated(layer, parts)]
        if updates:
            _foreach_copy_([buffer for buffer, _ in updates], [value for _, value in updates])


def _updated(layer: DeferredBatchNorm, rounds: list[list[Part]]) -> list[tuple[Tensor, Tensor]]:
    """The buffers of a layer, paired with their new values."""
    buffers = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if buffers[0] is None or buffers[1] is None or buffers[2] is None:
        return []
    wide = torch.promote_types(buffers[0].dtype, torch.float32)
    mean, variance, tracked = buffers[0].to(wide), buffers[1].to(wide), buffers[2]
    for parts in rounds:
        tracked = tracked + 1
        weight = tracked.to(wide).reciprocal() if layer.momentum is None else layer.momentum
        if full := [part for part in parts if part.count]:
            new = _joined(full)
            mean = new.mean * weight + mean * (1 - weight)
            variance = new.variance * weight + variance * (1 - weight)
    return [(buffers[0], mean), (buffers[1], variance), (buffers[2], tracked)]


def _verify_count(name: str, value: int, what: str) -> None:
    if not is_integer(value):
        raise TypeError(f"found {name}={value!r}: expected an int, the number of {what}.")
    if value < 1:
        raise ValueError(f"found {name}={value}: expected 1 or more, the number of {what}.")


def _deferrable(layer: nn.Module) -> bool:
    if not isinstance(layer, _BatchNorm) or not layer.track_running_stats or layer.running_mean is None:
        return False
    return type(layer).forward is _BatchNorm.forward and "forward" not in vars(layer)


def _faults(name: str, layer: nn.Module) -> Iterator[str]:
    where = f"found {type(layer).__name__} {name!r}, " if name else f"found a {type(layer).__name__}, "
    expected = "which can't be deferred: expected a plain BatchNorm."
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor in tensors):
        yield f"{where}not initialized yet, {expected} Run one batch through the model first."
    if is_parametrized(layer):
        yield f"{where}parametrized, {expected} Remove the parametrization, or add it after the conversion."
