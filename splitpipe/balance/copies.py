"""Copies of modules to measure, which no user notices: the module, its gradients and buffers are only read.

A copy has everything that its module has except gradients and the user's hooks: a hook that counts or records would
notice the runs. Hooks that torch itself installs are kept, since they compute: the hooks of the old weight_norm and
spectral_norm, of pruning, and of lazy layers.
"""
from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.overrides import TorchFunctionMode

from splitpipe.core import thread_state

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Turns autograd on, makes the device the current one, and restores the random state after the block.

    What autocast caches inside the block, it forgets: cast weights would outlive the copy.
    """
    numbered = [] if device.type == "cpu" else [device]
    # No type is passed for the CPU: None is a type since torch 2.13, and the default was another one before that.
    kind: dict[str, Any] = {} if device.type == "cpu" else {"device_type": device.type}
    # Leaving inference mode turns gradients on, even if the caller had turned them off.
    with torch.inference_mode(False), torch.accelerator.device_index(device.index):
        with torch.random.fork_rng(devices=numbered, **kind):
            # Hooks of the caller for saved tensors would see those of the copy.
            with thread_state.entered(thread_state.capture()._replace(hooks=None, hooks_disabled=None)):
                try:
                    yield
                finally:
                    torch.clear_autocast_cache()


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


def has_hooks(module: nn.Module) -> bool:
    """True if a module has hooks that its copies lack."""
    return any(_is_foreign(hook) for table in _tables(module) for hook in table.values())


def _tables(layer: nn.Module) -> list[dict[int, Any]]:
    """The non-empty dicts of hooks of a layer and all its submodules."""
    return [table for part in layer.modules() for name in _HOOKS if (table := getattr(part, name, None))]


def _is_foreign(hook: object) -> bool:
    """True for hooks that were written outside torch."""
    return str(getattr(hook, "__module__", None)).partition(".")[0] != "torch"


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
