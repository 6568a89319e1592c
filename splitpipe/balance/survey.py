"""Finds where a module may be cut: between the layers of an nn.Sequential, or at the calls of repeated blocks.

Repeated blocks are children of one module, of one class: the layers of a transformer, the blocks of a ResNet. Items of
a list are blocks as a whole (a layer may contain experts, for example). In other modules, and in an nn.Sequential with
a custom forward, what repeats inside the children comes first. Single layers are blocks only if nothing else
repeats. A copy of the module is called once, on two rows, to see which of them are called, and in which order.

No user notices it: the module, its gradients and buffers are only read. A copy lacks gradients and the user's hooks:
one that counts or records would notice the runs. Hooks that torch itself installs are kept, since they compute: those
of the old weight_norm and spectral_norm, of pruning, and of lazy layers.
"""
from __future__ import annotations

import copy
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from splitpipe.backward.rules import unchanged
from splitpipe.checks import is_layered, verify_supported
from splitpipe.core.note import add_note
from splitpipe.core.torch_private import _top_saved_tensors_default_hooks, tree_map_only
from splitpipe.microbatch.arguments import signature_of
from splitpipe.microbatch.divider import ArgumentDivider, Divider
from splitpipe.microbatch.division import Division
from splitpipe.microbatch.gather import find_loss
from splitpipe.partition.blocks import no_blocks, repeated
from splitpipe.partition.call_hook import expose
from splitpipe.partition.placement import arguments_of, verify_filled
from splitpipe.partition.resident import Resident
from splitpipe.piped import Piped
from splitpipe.skip.layout import verify_skippables

#: The name of the part before the first cut of a module that isn't an nn.Sequential.
START = "(start)"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Subject(NamedTuple):
    """A copy of a module to measure, where it may be cut, and the batch that it is called with."""

    module: nn.Module
    names: tuple[str, ...]  # Its units, from one possible cut to the next: layers, or the blocks that they begin with.
    batch: Division  # The arguments of a call with a whole batch.
    rows: int
    layered: bool  # Whether its units are the layers of an nn.Sequential.
    has_loss: bool = False  # Whether a schedule can run backward from its output, because it has the field ``loss``.

    def arguments(self, rows: int, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments of a call, with the first rows of the batch."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            Tensor, lambda x: x.detach().to(device, copy=True).requires_grad_(x.requires_grad), self.batch.some(rows)
        )
        return ((found,), {}) if self.layered else found


def survey(module: object, sample: object, whose: str = "sample") -> Subject:
    """Copies a module, and finds where it may be cut. The module stays as it is.

    Raises TypeError or ValueError for a module that can't be cut, or for an invalid sample.
    """
    if not isinstance(module, nn.Module) or isinstance(module, Resident):
        raise TypeError(f"module is a {type(module).__name__}: expected an nn.Module that isn't split yet.")
    verify_supported(module)
    verify_filled(module)
    layered = is_layered(module)
    if is_layered(module):
        verify_skippables(module)
        if not len(module):
            raise ValueError("the module has no layers: expected at least one.")
        batch, _ = Divider(None, None, 2, whose=whose).divide((sample,), {})
    elif repeated(module):
        divider = ArgumentDivider(signature_of(module.forward), None, None, 2, whose=whose)
        batch, _ = divider.divide(*arguments_of(sample))
    else:
        raise no_blocks(module)
    rows = sum(count for _, count in batch.rows)
    if not rows:
        raise ValueError(f"{whose} has no rows: expected a whole batch.")
    home = next((x.device for x in module.parameters()), torch.device("cpu"))
    with measuring(home):
        found = Subject(copy_of(module), tuple(module._modules), batch, rows, layered)
        return found if layered else _at_blocks(found, home)


def _at_blocks(subject: Subject, home: torch.device) -> Subject:
    """A module to be cut at the calls of its blocks, which a call in eval mode shows."""
    module = subject.module
    names = {part: name for name, part in repeated(module).items()}
    calls: list[nn.Module] = []
    before: list[nn.Module] = []  # What has been called by then.
    handles = [part.register_forward_pre_hook(lambda part, _: calls.append(part)) for part in names]
    others = [part for part in module.modules() if part not in names]
    handles += [part.register_forward_hook(lambda x, *_: None if calls else before.append(x)) for part in others]
    training = [part.training for part in module.modules()]
    args, kwargs = subject.arguments(min(2, subject.rows), home)
    try:
        with torch.no_grad():
            output = module.eval()(*args, **kwargs)
    except Exception as error:
        add_note(error, f"Raised while a copy of the {type(module).__name__} ran on two rows, to find its blocks.")
        raise
    for part, mode in zip(module.modules(), training):
        part.training = mode
    for handle in handles:
        handle.remove()
    times = Counter(calls)
    # Before the first cut there must be something for the stage before it.
    cuts = [names[part] for at, part in enumerate(calls) if times[part] == 1 and (at or before)]
    if not cuts:
        raise no_blocks(module)
    with suppress(TypeError):
        find_loss(output)  # Of two rows, one number for each isn't a loss.
        subject = subject._replace(has_loss=True)
    return subject._replace(names=(START, *cuts))


@contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Turns autograd on, makes the device the current one, and restores the random state after the block.

    What autocast caches inside the block, it forgets: cast weights would outlive the copy.
    """
    numbered = [] if device.type == "cpu" else [device]
    # No type is passed for the CPU: None is a type since torch 2.13, and the default was another one before that.
    kind: dict[str, Any] = {} if device.type == "cpu" else {"device_type": device.type}
    # Leaving inference mode turns gradients on, even if the caller had turned them off.
    with torch.inference_mode(False), torch.accelerator.device_index(device.index), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the forward left")  # The first step warns of it, in terms of the module.
        with torch.random.fork_rng(devices=numbered, **kind):
            # Hooks of the caller for saved tensors would see those of the copy.
            with saved_tensors_hooks(unchanged, unchanged) if _top_saved_tensors_default_hooks(True) else nullcontext():
                try:
                    yield
                finally:
                    torch.clear_autocast_cache()


def copy_of(module: nn.Module) -> nn.Module:
    """A copy without gradients and without the user's hooks, also of a pipeline."""
    # The dicts of hooks of all submodules; those that were written outside torch are left out.
    tables = [table for part in module.modules() for name in _HOOKS if (table := getattr(part, name, None))]
    memo: dict[int, Any] = {id(table): OrderedDict() for table in tables}
    # deepcopy raises for tensors with a graph, such as the weights of the old weight_norm.
    computed = [x for part in module.modules() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf]
    memo.update({id(x): x.detach().clone() for x in computed})
    copied = copy.deepcopy(module, memo)
    for table in tables:
        own = [(key, x) for key, x in table.items() if str(getattr(x, "__module__", None)).split(".")[0] == "torch"]
        memo[id(table)].update({key: copy.deepcopy(hook, memo) for key, hook in own})
    forward = vars(copied).get("forward")
    if isinstance(forward, Piped):
        del vars(copied)["forward"]
        expose(copied)
    return copied
