"""Checks that a user's loss is a mean over rows: its value for a microbatch is compared with those for two halves.

    loss of a microbatch       and of its halves            it is
    of n rows                  a of h rows, b of the rest
    (h a + (n - h) b) / n                                   a mean: all is well
    a + b                                                   a sum: an error, the batch's loss would be too small
    anything else                                           no mean: a warning, the batch's loss would be another

A single row is compared with itself twice, which tells a sum from a mean, and nothing else. Only numbers that were
computed without drawing any are believed.
"""
from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitpipe.core import microbatch, thread_state
from splitpipe.core.generator import exclusive_generator, has_moved, set_state
from splitpipe.core.rng import DeviceState, FirstRun
from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import (
    DeviceContext,
    DisableTorchFunction,
    _get_current_dispatch_mode_stack,
    _get_current_function_mode_stack,
    _has_any_global_hook,
    tree_unflatten,
)
from splitpipe.stage.inventory import Inventory

LossFn = Callable[..., Any]

#: The number of calls that are compared, at most: each comparison makes the host wait for the device.
_PATIENCE = 10
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}

_PAIR = (
    ", or a pair (total, count), for the sum of totals / the sum of counts. Return (total, len(output)) for the mean "
    "over the batch, (total, len(output) / n) for the sum over its n rows."
)
_COUNTS = (
    "Return a pair (total, count), for the sum of totals / the sum of counts, as in "
    "F.cross_entropy(output, target, ignore_index=0, reduction='sum'), (target != 0).sum()."
)


class Part(NamedTuple):
    """Some rows of a microbatch; ``made`` copies their output and target."""

    rows: int
    made: Callable[[], tuple[Any, Any]]


class PartLosses(NamedTuple):
    """The losses of two parts of a microbatch; for a single row, the loss of the row taken twice."""

    rows: tuple[int, ...]
    losses: list[Tensor]


@dataclass
class MeanCheck:
    """The check of a model's loss, with what it has found from call to call. Copies of a model start without.

    ``pairs`` tells whether the loss may be a pair of total and count.
    """

    pairs: bool = True
    settled: bool = False
    _left: int = _PATIENCE
    _weight: tuple[weakref.ref[Tensor], int | None] | None = None

    def parts(self, loss_fn: LossFn, output: Any, target: Any) -> PartLosses | None:
        """The losses of parts of a microbatch; None if they would tell nothing, or the user could notice them."""
        if self.settled or _has_any_global_hook() or _get_current_dispatch_mode_stack():
            return None
        module = loss_fn if isinstance(loss_fn, nn.Module) else None
        inventory = None if module is None else Inventory([("loss_fn", module)])
        if hasattr(loss_fn, "_torchdynamo_orig_callable") or (inventory is not None and _observed(inventory)):
            return None
        self._left -= 1
        self.settled = not self._left
        slots = None if inventory is None else inventory.slots()
        try:
            with DisableTorchFunction():  # The user's modes see none of this.
                device, parts = _cut(output, target)
                given = {} if module is None else dict(module.named_buffers())
                buffers = {name: x.clone() for name, x in given.items()}
            if not parts:
                return None
            call = loss_fn if module is None else partial(_called, module, buffers)
            with _unnoticed(device) as drawn:
                found = [call(*part.made()) for part in parts]
            with DisableTorchFunction():
                wrote = any(not torch.equal(x, buffers[name]) for name, x in given.items())
            if slots is not None and inventory is not None:
                wrote = wrote or not slots.same(inventory.slots())
        except Exception as error:  # A loss that can't take fewer rows, or needs too much memory, can't be compared.
            error.__traceback__ = None  # Its frames hold the parts, and somebody may hold the error.
            return None
        finally:
            if slots is not None:
                slots.put()  # The loss may have made a buffer for half the rows.
        with DisableTorchFunction():
            if drawn or wrote or any(not isinstance(loss, Tensor) or loss.numel() != 1 for loss in found):
                self.settled = True  # A pair has its own divisor. A loss that draws or writes can't be compared.
                return None
            return PartLosses(tuple(part.rows for part in parts), [loss.detach().reshape(()) for loss in found])

    def compare(self, whole: Tensor, parts: PartLosses) -> None:
        """Compares the loss of a microbatch with its parts' losses; a sum is an error."""
        numbers = torch.stack([whole.detach(), *(loss.to(whole.dtype) for loss in parts.losses)]).tolist()
        if len(parts.rows) == 1:
            numbers = [numbers[1], numbers[0], numbers[0]]
            rows = (1, 1)
        else:
            rows = (parts.rows[0], parts.rows[1])
        verdict = _verdict(numbers, rows, _CLOSE.get(whole.dtype, 1e-2))
        shown = f"{numbers[0]:.6g} for {sum(rows)} rows; {numbers[1]:.6g} for {rows[0]} of them"
        shown += ", as often again" if len(parts.rows) == 1 else f", {numbers[2]:.6g} for the other {rows[1]}"
        if verdict == "sum":
            self.settled = False  # It is refused in every call.
            raise ValueError(
                f"loss_fn gives a sum over the rows of a microbatch ({shown}): expected the mean over them, by whose "
                f"number microbatches are weighted{_PAIR if self.pairs else '.'} Losses of torch's own are understood "
                "as they are: nn.MSELoss(reduction='sum')."
            )
        self.settled = self.settled or verdict is not None
        if verdict == "neither":
            warnings.warn(
                f"loss_fn gives no mean over the rows of a microbatch ({shown}). Microbatches are weighted by rows, so "
                "the loss of a batch, and its gradients, will not be those of the loss_fn of the whole batch. "
                f"{_COUNTS if self.pairs else 'Give one of torch, which counts itself.'}",
                stacklevel=2,
            )

    def verify_weight(self, weight: Tensor) -> None:
        """Refuses weights of 0 where labels are smoothed; looks at them when they have changed."""
        version = version_of(weight)
        if self._weight is not None and self._weight[0]() is weight and self._weight[1] == version:
            return
        if bool((weight == 0).any()):
            raise ValueError(
                "cross_entropy has label_smoothing, and a weight of 0 for a class: targets of that class have a loss, "
                "but a microbatch of them alone is divided by 0. Expected other weights, or a loss_fn that returns a "
                "pair: F.cross_entropy(..., weight=weight, label_smoothing=..., reduction='sum'), weight[target].sum()."
            )
        self._weight = weakref.ref(weight), version


def _verdict(numbers: Sequence[float], rows: tuple[int, int], close: float) -> str | None:
    whole, a, b = numbers
    mean, total = (rows[0] * a + rows[1] * b) / sum(rows), a + b
    size, apart = max(map(abs, numbers)), abs(a - b)
    near = close * size
    if math.isfinite(whole) and not math.isfinite(total):  # A mean over counted rows, say, of which a half has none.
        return "neither"
    if not math.isfinite(whole) or (abs(total - mean) <= near and abs(whole - mean) <= near):
        return None
    if abs(whole - total) <= near:
        # Unless one of the parts has nothing that counts, and so the loss 0.
        return "sum" if min(abs(a), abs(b)) > near else None
    # If summands cancel out, parts of a true mean disagree by rounding, which is little compared to their difference.
    if abs(whole - mean) > near and abs(whole - mean) > 1e-3 * apart:
        return "neither"
    return "mean" if apart > near else None


def _observed(inventory: Inventory) -> bool:
    """True if further calls of the modules would be noticed by hooks, or by a compiler."""
    return inventory.compiled or any(each._forward_hooks or each._forward_pre_hooks for each in inventory.named)


def _called(module: nn.Module, buffers: dict[str, Tensor], output: Any, target: Any) -> Any:
    return functional_call(module, buffers, (output, target))


def _cut(output: Any, target: Any) -> tuple[torch.device, list[Part]]:
    """The two parts of a microbatch, and the output's device; no parts, if they would tell nothing."""
    given = [microbatch.flatten(value, "it", batch=True) for value in (output, target)]
    (outputs, _), (targets, _) = given
    tensors = [x for x in (*targets, *outputs) if isinstance(x, Tensor)]
    sized = [x for x in tensors if x.dim()]
    places = [x.device for x in outputs if isinstance(x, Tensor)]
    device = places[0] if places else torch.device("cpu")
    if not sized or not places or any(type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return device, []
    # The output may have a row for each word, and the target one for each sentence.
    rows = sized[0].shape[0]
    if not rows or any(x.shape[0] % rows for x in sized) or not any(isinstance(x, Tensor) and x.dim() for x in outputs):
        return device, []

    def taken(leaf: Any, start: int, stop: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        x = leaf.detach()
        if x.dim():
            each = x.shape[0] // rows
            x = x[start * each : stop * each] if rows > 1 else torch.cat([x, x])
        # A loss may write to its arguments, and look at their requires_grad.
        return x.clone().requires_grad_(leaf.requires_grad)

    def made(start: int, stop: int) -> tuple[Any, Any]:
        with DisableTorchFunction():
            one, two = (tree_unflatten([taken(leaf, start, stop) for leaf in leaves], spec) for leaves, spec in given)
        return one, two

    spans = [(0, rows // 2), (rows // 2, rows)] if rows > 1 else [(0, 1)]
    return device, [Part(stop - start, partial(made, start, stop)) for start, stop in spans]


@contextmanager
def _unnoticed(device: torch.device) -> Iterator[list[torch.Generator | torch.device]]:
    """Puts generators and autocast's cache back after the block, and hides it from the user's function modes.

    Yields a list; after the block it has the generators, or the device, that drew in it.
    """
    drew: list[torch.Generator | torch.device] = []
    watch = FirstRun()
    stack = tuple(_get_current_function_mode_stack())
    places = tuple(mode for mode in stack if isinstance(mode, DeviceContext))
    # A loss that enables grad mode saves tensors, which a checkpoint would count with the forward's.
    with thread_state.function_modes(stack, ()), thread_state.without_hooks():
        start = torch.Generator().manual_seed(0).get_state()
        before = DeviceState(device)
        cached = torch.is_autocast_cache_enabled()
        # Autocast would keep, for the forward, what it casts here without grad mode: no gradient would come back.
        torch.set_autocast_cache_enabled(False)
        try:
            with exclusive_generator(start), torch.no_grad():
                with thread_state.function_modes((), (watch, *places)):
                    yield drew
                if has_moved(start) or watch.moved:
                    drew.append(torch.default_generator)
        finally:
            torch.set_autocast_cache_enabled(cached)
            for generator, state in watch.generators.items():
                drew.append(generator)
                set_state(state, generator)
            if before.moved:
                drew.append(device)
                before.put_back()
