"""Measures the layers of an nn.Sequential separately, one at a time, for balance and planner.

    sample ─> [copy of layer 0] ─> value, skips ─> [copy of layer 1] ─> value, skips ─> ...

A copy is deleted before the next one is made, so a model that is too large for any device can be measured too.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from splitpipe.balance.copies import copy_of, has_hooks, measuring
from splitpipe.balance.units import FreeLoss, Times, Units, state_bytes
from splitpipe.checks import verify_python, verify_ungathered
from splitpipe.core import stream
from splitpipe.core.microbatch import batch_size, cuts, flatten, unflatten, verify_filled
from splitpipe.core.note import add_note
from splitpipe.core.stream import Place
from splitpipe.core.tensors import Address, memory_of
from splitpipe.core.torch_private import tree_leaves, tree_map_only
from splitpipe.schedule.plurals import counted
from splitpipe.skip.box import Key, opened
from splitpipe.skip.pairs import pops

T = TypeVar("T")


@dataclass(frozen=True)
class Flow:
    """The values between two layers: the input of the next one, and skips that haven't been popped yet."""

    value: Any
    skips: Mapping[Key, Any]

    def tensors(self) -> list[Tensor]:
        """All tensors of the value and the skips."""
        return [leaf for leaf in tree_leaves([self.value, *self.skips.values()]) if isinstance(leaf, Tensor)]

    def memory(self) -> dict[Address, int]:
        """The storages of its tensors."""
        return memory_of(*self.tensors())


class Single(nn.Module):
    """A layer as a module of one unit, which takes the skips that it pops, and returns those that it stashes.

    Args:
        layer: a copy of the layer.
        flow: the values before it.
        shared: the names of its parameters and buffers that an earlier layer has too.
    """

    def __init__(self, layer: nn.Module, flow: Flow, shared: Collection[str] = ()) -> None:
        super().__init__()
        self.layer = layer
        self._shared = shared
        taken = {key: flow.skips[key] for key in pops(layer) if key in flow.skips}
        #: What it is given.
        self.arriving = Flow(flow.value, taken)
        #: The arguments for a call.
        self.args = torch.zeros(1, 0), self.arriving.value, *taken.values()
        #: What passes it.
        self._passing = {key: skip for key, skip in flow.skips.items() if key not in taken}
        #: The values after it, in its first run.
        self.leaving: Flow | None = None

    def forward(self, row: Tensor, value: Any, *skips: Any) -> Any:
        """The layer's output, with its skips, if it stashes any. ``row`` shows that there is one row."""
        box = dict(zip(self.arriving.skips, skips))
        with opened(box):
            value = self.layer(value)
        if self.leaving is None:
            self.leaving = Flow(detached(value), {key: detached(skip) for key, skip in box.items()})
        return (value, list(box.values())) if box else value

    def units(self, place: Place, loss_fn: Callable[..., Any] | None = None, target: Any = None) -> Units:
        """The layer as a single unit; without ``loss_fn``, the loss costs nothing."""
        if loss_fn is None:
            loss_fn, target = FreeLoss(), 0
        return Units(self, [], [place], loss_fn, (self.args, {}), target)

    def left(self) -> Flow:
        """The layer's output, and the skips that it stashed."""
        assert self.leaving is not None
        return self.leaving

    def after(self) -> Flow:
        """The flow after the layer, with the skips that passed it."""
        left = self.left()
        flatten(left.value, "the output")
        for (_, name), skip in left.skips.items():
            flatten(skip, f"skip {name!r}")
        return Flow(left.value, {**self._passing, **left.skips})

    def trained(self, times: Times) -> Times:
        """The times, without those of a backward that computes nothing."""
        trains = any(x.requires_grad for x in self.left().tensors())
        return times if trains else Times(times.forward, 0.0, 0.0)

    def state(self) -> tuple[int, int]:
        """The bytes of its trained parameters, and of its other state, unless an earlier layer has them."""
        return state_bytes(x for name, x in state_of(self.layer) if name not in self._shared)


class Layers(NamedTuple):
    """The layers of an nn.Sequential, each measured as a copy, by itself."""

    module: nn.Sequential
    sample: Any
    rows: int

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the layers."""
        return tuple(self.module._modules)

    def measured(self, device: torch.device, measure: Callable[[int, Single], T], chunks: int = 1) -> list[T]:
        """What ``measure`` returns for each layer and its number: each runs on the output of the previous one."""
        done: list[T] = []
        shared = repeated_state(self.module)

        def run(at: int, layer: nn.Module, flow: Flow) -> Flow:
            single = Single(copy_of(layer).to(device), flow, shared[at]).train()
            done.append(measure(at, single))
            return single.after()

        with measuring(device):
            flow = Flow(detached(first_rows(self.sample, cuts(self.rows, chunks)[0][1]), device), {})
            for at, (name, layer) in enumerate(zip(self.names, self.module, strict=True)):
                try:
                    flow = run(at, layer, flow)
                except BaseException as error:
                    where = f"layer {at} ({name!r}, {type(layer).__name__}), in a copy on {device}"
                    size = f", with {counted(chunks, 'chunk')}" if chunks > 1 else ""
                    hooks = ", whose hooks don't run" if has_hooks(layer) else ""
                    add_note(error, f"Raised while profiling {where}{size}{hooks}. The model is unchanged.")
                    raise
                finally:
                    torch.clear_autocast_cache()  # Cast weights would outlive the copy.
        return done


def layers_of(module: nn.Sequential, sample: Any, whose: str) -> Layers:
    """The layers, to be run on a batch. Raises TypeError or ValueError for what can't be run, or has no rows."""
    verify_python(module)
    verify_ungathered(module)
    leaves, _ = flatten(sample, whose, batch=True)
    rows = batch_size(leaves, whose)
    verify_filled(leaves, whose)
    return Layers(module, sample, rows)


def times(layers: Layers, timeout: float, device: torch.device) -> list[float]:
    """Seconds of each layer's forward and backward: the median of all runs but the first, which is a warm-up.

    Layers run by themselves, as an op of the pipeline takes longer than a small layer. They share the timeout equally;
    time that a layer doesn't use goes to those after it. If none is left, the first run counts.
    """
    left = timeout
    if device.type != "cpu":
        # Autograd's thread gets the device's context with its first kernel; if that were a product, cuBLAS would warn.
        with torch.enable_grad():
            torch.ones((), device=device, requires_grad=True).mul(2).backward()

    def measure(at: int, single: Single) -> float:
        nonlocal left
        first = _step(single, device)
        begun = perf_counter()
        runs = []
        while (spent := perf_counter() - begun) < left / (len(layers.names) - at):
            runs.append(_step(single, device))
        left -= spent
        return median(runs or [first])

    return layers.measured(device, measure)


def _step(single: Single, device: torch.device) -> float:
    """Seconds of one forward and backward."""
    # Clones aren't leaves, so a layer may write to them in place, as to an output.
    args = tree_map_only(Tensor, lambda x: x.clone(), detached(single.args))
    _synchronize(device)
    begun = perf_counter()
    roots = [x for x in tree_leaves(single(*args)) if isinstance(x, Tensor) and x.requires_grad]
    if roots:
        torch.autograd.backward(roots, [x.detach() for x in roots])
    _synchronize(device)
    return perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        stream.synchronize(device)


def sizes(layers: Layers, chunks: int, param_scale: float, device: torch.device) -> list[float]:
    """Bytes that each layer holds between forward and backward of a microbatch: activations and state.

    Activations are the storages that autograd saves and still holds when the layer returns, each as a whole, and
    counted for the first layer that saves it. So a layer's input counts only if no earlier layer has saved it, and the
    model's input, which belongs to the caller, never does. Tensors that a custom autograd.Function keeps without
    ``save_for_backward`` aren't seen.

    Parameters count ``param_scale`` times. Frozen parameters and buffers, which need no gradient and no optimizer
    state, count at most once. State that several layers share counts for the first of them.
    """
    counted: frozenset[Address] = frozenset()  # Storages that are alive and have been counted.

    def measure(at: int, single: Single) -> float:
        nonlocal counted
        arriving = single.arriving.tensors()
        if not at:
            counted = frozenset(memory_of(*arriving))
        units = single.units(Place(device))
        [saved] = units.saved(units.recorded())
        # The storages that the run was given, each with the one of which it is a copy.
        copies = zip(units.call.latest[1:], arriving, strict=True)
        origin = {own: other for copy, x in copies for own, other in zip(memory_of(copy), memory_of(x), strict=False)}
        known = {address for address in origin if origin[address] in counted}
        new = saved.keys() - known
        counted |= known | new | {origin[address] for address in new & origin.keys()}
        counted &= single.after().memory().keys()  # An address means nothing once its memory is freed.
        return sum(saved[address] for address in new) + held(single.state(), param_scale)

    return layers.measured(device, measure, chunks)


def held(state: tuple[int, int], param_scale: float) -> float:
    """The bytes that training holds of parameters and other state; the latter counts at most once."""
    return param_scale * state[0] + min(param_scale, 1) * state[1]


def repeated_state(module: nn.Sequential) -> list[set[str]]:
    """For each layer, the names of its parameters and buffers that an earlier layer has too."""
    seen: set[int] = set()
    shared = []
    for layer in module:
        shared.append({name for name, tensor in state_of(layer) if id(tensor) in seen})
        seen |= {id(tensor) for _, tensor in state_of(layer)}
    return shared


def state_of(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a layer by name."""
    return [*layer.named_parameters(), *layer.named_buffers()]


def first_rows(batch: Any, rows: int) -> Any:
    """The first rows of a batch's tensors; what has no rows stays whole."""
    leaves, spec = flatten(batch, "the batch", batch=True)
    return unflatten([leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves], spec)


def detached(value: Any, device: torch.device | None = None) -> Any:
    """A value with tensors outside any graph, on a device; they require grad as before."""
    return tree_map_only(Tensor, lambda x: x.detach().to(device or x.device).requires_grad_(x.requires_grad), value)
