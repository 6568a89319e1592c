"""Measures each layer of an nn.Sequential in training, on one copy at a time, for balance and planner.

    sample ─> [copy of layer 0] ─> value, skips ─> [copy of layer 1] ─> value, skips ─> ...
                forward, backward     detached       forward, backward

A copy is deleted before the next one is made, so a model that is too large for any device can be measured too. The
model, its gradients and buffers, the sample and the random state are only read.

A copy has everything that its layer has except gradients and the user's hooks: a hook that counts or records would
notice the runs. Hooks that torch itself installs are kept, since they compute: the hooks of the old weight_norm and
spectral_norm, of pruning, and of lazy layers.
"""
from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.overrides import TorchFunctionMode

from splitpipe.core import stream
from splitpipe.core.microbatch import flatten
from splitpipe.core.note import add_note
from splitpipe.core.tensors import Address, memory_of
from splitpipe.core.torch_private import tree_leaves, tree_map_only
from splitpipe.skip.box import Key, opened
from splitpipe.skip.pairs import pops

T = TypeVar("T")

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Flow:
    """The values between two layers: the input of the next one, and skips that haven't been popped yet."""

    value: Any
    skips: Mapping[Key, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> Flow:
        """The same flow, with ``function`` applied to each tensor."""
        skips = {key: tree_map_only(Tensor, function, skip) for key, skip in self.skips.items()}
        return Flow(tree_map_only(Tensor, function, self.value), skips)

    def tensors(self) -> list[Tensor]:
        """All tensors of the value and the skips."""
        return [leaf for leaf in tree_leaves([self.value, *self.skips.values()]) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, eq=False)
class _Saved:
    """A placeholder for a saved tensor, deleted once autograd no longer needs the tensor."""

    tensor: Tensor


def times(module: nn.Sequential, sample: object, timeout: float, device: torch.device) -> list[float]:
    """Seconds of each layer's forward and backward: the median of all runs but the first, which is a warm-up.

    Layers share the timeout equally; time that a layer doesn't use goes to those after it. If none is left, the first
    run counts.
    """
    left = timeout
    if device.type != "cpu":
        # Autograd's thread gets the device's context with its first kernel; if that were a product, cuBLAS would warn.
        with torch.enable_grad():
            torch.ones((), device=device, requires_grad=True).mul(2).backward()

    def measure(done: list[float], copied: nn.Module, flow: Flow) -> tuple[float, Flow]:
        nonlocal left
        arriving = input_flow(copied, flow)
        first, after = _step(copied, arriving, device)
        begun = perf_counter()
        runs = []
        while (spent := perf_counter() - begun) < left / (len(module) - len(done)):
            runs.append(_step(copied, arriving, device)[0])
        left -= spent
        return median(runs or [first]), output_flow(flow, arriving, after)

    return measure_layers(module, sample, device, measure)


def sizes(module: nn.Sequential, input: object, param_scale: float, device: torch.device) -> list[float]:
    """Bytes that each layer holds between forward and backward of the input: activations and state.

    Activations are the storages that autograd saves and still holds when the layer returns, each as a whole, and
    counted for the first layer that saves it. So a layer's input counts only if no earlier layer has saved it, and the
    model's input, which belongs to the caller, never does. Tensors that a custom autograd.Function keeps without
    ``save_for_backward`` aren't seen.

    Parameters count ``param_scale`` times. Frozen parameters and buffers, which need no gradient and no optimizer
    state, count at most once. State that several layers share counts for the first of them.
    """
    shared = repeated_state(module)
    counted: frozenset[Address] = frozenset()  # Storages that are alive and have been counted.

    def measure(done: list[float], copied: nn.Module, flow: Flow) -> tuple[float, Flow]:
        nonlocal counted
        if not done:
            counted = _addresses(flow)
        arriving = input_flow(copied, flow)
        entered = arriving.map(_fresh)
        origin = _origins(entered, arriving)
        after, saved = _saved(copied, entered)
        known = {address for address in origin if origin[address] in counted}
        known |= {address for _, tensor in state_of(copied) for address in memory_of(tensor)}
        new = saved.keys() - known
        state = 0.0
        for name, tensor in state_of(copied):
            if name not in shared[len(done)]:
                scale = param_scale if tensor.requires_grad else min(param_scale, 1)
                state += scale * sum(memory_of(tensor).values())
        following = output_flow(flow, arriving, after)
        counted |= known | new | {origin[address] for address in new & origin.keys()}
        counted &= _addresses(following)  # An address means nothing once its memory is freed.
        return sum(saved[address] for address in new) + state, following

    return measure_layers(module, input, device, measure)


Measure = Callable[[list[T], nn.Module, Flow], tuple[T, Flow]]


def measure_layers(
    module: nn.Sequential, sample: object, device: torch.device, measure: Measure[T], size: str = ""
) -> list[T]:
    """Measures a copy of one layer after the other, each on the output of the one before it."""
    done: list[T] = []
    with measuring(device):
        flow = Flow(sample, {}).map(lambda tensor: detached_as(tensor, tensor.to(device)))
        for name, layer in zip(module._modules, module, strict=True):
            try:
                result, flow = measure(done, copy_of(layer).to(device).train(), flow)
            except BaseException as error:
                where = f"layer {len(done)} ({name!r}, {type(layer).__name__}), in a copy on {device}{size}"
                foreign = any(_is_foreign(hook) for table in _tables(layer) for hook in table.values())
                hooks = ", whose hooks don't run" if foreign else ""
                add_note(error, f"Raised while profiling {where}{hooks}. The model is unchanged.")
                raise
            finally:
                # Under the caller's autocast, cast weights would be cached, and outlive the copy.
                torch.clear_autocast_cache()
            done.append(result)
    return done


@contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Turns autograd on, makes the device the current one, and restores the random state after the block."""
    numbered = [] if device.type == "cpu" else [device]
    # No type is passed for the CPU: None is a type since torch 2.13, and the default was another one before that.
    kind: dict[str, Any] = {} if device.type == "cpu" else {"device_type": device.type}
    # Leaving inference mode turns gradients on, even if the caller had turned them off.
    with torch.inference_mode(False), torch.accelerator.device_index(device.index):
        with torch.random.fork_rng(devices=numbered, **kind):
            yield


def input_flow(layer: nn.Module, flow: Flow) -> Flow:
    """The part of a flow that a layer takes."""
    return Flow(flow.value, {key: flow.skips[key] for key in pops(layer) if key in flow.skips})


def output_flow(flow: Flow, arriving: Flow, after: Flow) -> Flow:
    """The flow after a layer: its output, the skips that it stashed, and those that bypassed it."""
    flatten(after.value, "the output")
    for (_, name), skip in after.skips.items():
        flatten(skip, f"skip {name!r}")
    left = after.map(lambda tensor: detached_as(tensor, tensor))
    passed = {key: skip for key, skip in flow.skips.items() if key not in arriving.skips}
    return Flow(left.value, {**passed, **left.skips})


def detached_as(tensor: Tensor, value: Tensor) -> Tensor:
    """The value as a leaf that requires grad if the tensor does."""
    return value.detach().requires_grad_(tensor.requires_grad)


def _fresh(tensor: Tensor) -> Tensor:
    """A clone for one run. It isn't a leaf, so a layer may write to it in place, as to an output."""
    return detached_as(tensor, tensor).clone()


def _forward(layer: nn.Module, entered: Flow) -> Flow:
    box = dict(entered.skips)
    with opened(box):
        return Flow(layer(entered.value), box)


def _step(layer: nn.Module, arriving: Flow, device: torch.device) -> tuple[float, Flow]:
    """Seconds of one forward and backward, and the output flow of the forward."""
    entered = arriving.map(_fresh)
    synchronize(device)
    begun = perf_counter()
    after = _forward(layer, entered)
    roots = [tensor for tensor in after.tensors() if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [tensor.detach() for tensor in roots])
    synchronize(device)
    return perf_counter() - begun, after


def synchronize(device: torch.device) -> None:
    """Waits for an accelerator."""
    if device.type != "cpu":
        stream.synchronize(device)


def _saved(layer: nn.Module, entered: Flow) -> tuple[Flow, dict[Address, int]]:
    """The flow out of a layer, and the storages, with their bytes, that autograd keeps for backward."""
    saved: WeakSet[_Saved] = WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        # Detached: a saved output would otherwise keep its grad_fn, which keeps it, so it would never be freed.
        holder = _Saved(tensor.detach())
        saved.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        after = _forward(layer, entered)
    return after, {address: size for holder in saved for address, size in memory_of(holder.tensor).items()}


def repeated_state(module: nn.Sequential) -> list[set[str]]:
    """For each layer, the names of its parameters and buffers that an earlier layer has too."""
    seen: set[int] = set()
    shared = []
    for layer in module:
        shared.append({name for name, tensor in state_of(layer) if id(tensor) in seen})
        seen |= {id(tensor) for _, tensor in state_of(layer)}
    return shared


def state_of(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def _origins(entered: Flow, arriving: Flow) -> dict[Address, Address]:
    """The storages that a run was given, each with the one it was cloned from."""
    return {
        own: other
        for clone, tensor in zip(entered.tensors(), arriving.tensors(), strict=True)
        for own, other in zip(memory_of(clone), memory_of(tensor), strict=False)
    }


def _addresses(flow: Flow) -> frozenset[Address]:
    return frozenset(address for tensor in flow.tensors() for address in memory_of(tensor))


def _tables(layer: nn.Module) -> list[dict[int, Any]]:
    """The non-empty dicts of hooks of a layer and all its submodules."""
    return [table for part in layer.modules() for name in _HOOKS if (table := getattr(part, name, None))]


def _is_foreign(hook: object) -> bool:
    """True for hooks that were written outside torch."""
    return str(getattr(hook, "__module__", None)).partition(".")[0] != "torch"


def copy_of(layer: nn.Module) -> nn.Module:
    """A copy without gradients and without the user's hooks."""
    tables = _tables(layer)
    memo: dict[int, Any] = {id(table): OrderedDict() for table in tables}
    with _Detaching():
        copied = copy.deepcopy(layer, memo)
        for table in tables:
            kept = {key: copy.deepcopy(hook, memo) for key, hook in table.items() if not _is_foreign(hook)}
            memo[id(table)].update(kept)
    return copied


class _Detaching(TorchFunctionMode):
    """Lets deepcopy copy tensors that it rejects (non-leaf and uninitialised ones), without gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and id(args[0]) not in args[1]:
            tensor, memo = args
            kind: Any = type(tensor)
            if issubclass(kind, UninitializedBuffer):
                memo[id(tensor)] = kind(device=tensor.device, dtype=tensor.dtype)
            elif not tensor.is_leaf or tensor.grad is not None:
                clone = tensor.detach().clone()
                memo[id(tensor)] = clone.requires_grad_(tensor.is_leaf and tensor.requires_grad)
            if id(tensor) in memo:
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
