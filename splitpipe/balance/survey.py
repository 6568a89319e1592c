"""Finds where a module may be cut: between the layers of an nn.Sequential, or at the calls of repeated blocks."""
from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.checks import is_layered
from splitpipe.core.note import add_note
from splitpipe.core.tensors import map_tensors
from splitpipe.microbatch.arguments import read_arguments
from splitpipe.microbatch.division import Divider, Division, read_input
from splitpipe.microbatch.gather import find_loss
from splitpipe.partition.blocks import no_blocks, repeated
from splitpipe.partition.call_hook import expose
from splitpipe.partition.placement import arguments_of, rehearsal
from splitpipe.partition.resident import is_pipeline
from splitpipe.partition.restore import restore_after
from splitpipe.piped import verify_unsplit
from splitpipe.skip.skippable import verify_skippables

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
        found: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
            lambda x: x.detach().to(device, copy=True).requires_grad_(x.requires_grad), self.batch.some(rows)
        )
        return ((found,), {}) if self.layered else found


def survey(module: nn.Module, sample: object, whose: str = "sample") -> Subject:
    """Copies a module, and finds where it may be cut. Raises for a module that can't be, or for an invalid sample."""
    verify_unsplit(module)
    if is_layered(module):
        verify_skippables(module)
        if not len(module):
            raise ValueError("the module has no layers: expected at least one.")
        batch, _ = Divider(partial(read_input, flags=None, whose=whose), None, 2).divide((sample,), {})
    elif repeated(module):
        divider = Divider(partial(read_arguments, inspect.signature(module.forward), {}, whose), None, 2)
        batch, _ = divider.divide(*arguments_of(sample))
    else:
        raise no_blocks(module)
    rows = sum(batch.rows)
    if not rows:
        raise ValueError(f"{whose} has no rows: expected a whole batch.")
    home = next((x.device for x in module.parameters()), torch.device("cpu"))
    with measuring(home):
        found = Subject(copy_of(module), tuple(module._modules), batch, rows, is_layered(module))
        return found if found.layered else _at_blocks(found, home)


def _at_blocks(subject: Subject, home: torch.device) -> Subject:
    """A module to be cut at the calls of its blocks, which a call in eval mode on two rows shows, in order."""
    module = subject.module
    names = {part: name for name, part in repeated(module).items()}
    calls: list[nn.Module] = []  # Of blocks that begin, and of others that end.
    args, kwargs = subject.arguments(min(2, subject.rows), home)
    try:
        with rehearsal(module, [home]):  # It takes these hooks off, too.
            for part in module.modules():
                if part in names:
                    part.register_forward_pre_hook(lambda part, _: calls.append(part))
                else:
                    part.register_forward_hook(lambda part, *_: calls.append(part))
            output = module(*args, **kwargs)
    except Exception as error:
        add_note(error, f"Raised while a copy of the {type(module).__name__} ran on two rows, to find its blocks.")
        raise
    times = Counter(calls)
    # Before the first cut there must be something for the stage before it.
    cuts = [names[part] for part in calls[1:] if part in names and times[part] == 1]
    if not cuts:
        raise no_blocks(module)
    with suppress(TypeError):
        find_loss(output)  # Of two rows, one number for each isn't a loss.
        subject = subject._replace(has_loss=True)
    return subject._replace(names=(START, *cuts))


@contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Turns autograd on, makes the device the current one, and restores random states after the block."""
    # Leaving inference mode turns gradients on, even if the caller had turned them off.
    with torch.inference_mode(False), torch.accelerator.device_index(device.index), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the forward left")  # The first step warns of it, in terms of the module.
        try:
            with restore_after([], [device]):
                yield
        finally:
            torch.clear_autocast_cache()  # Cast weights would outlive the copy.


def copy_of(module: nn.Module) -> nn.Module:
    """A copy, of an attached module a plain one, without gradients, and without hooks that would notice the runs.

    Modules with none but torch's keep these, which compute: those of the old weight_norm, of pruning, of lazy layers.
    """
    tables = [getattr(part, name) for part in module.modules() for name in _HOOKS]
    foreign = [each for each in tables if any(not f"{x.__module__}".startswith("torch.") for x in each.values())]
    memo: dict[int, Any] = {id(table): OrderedDict() for table in foreign}
    # deepcopy raises for tensors with a graph, such as the weights of the old weight_norm.
    computed = [x for part in module.modules() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf]
    memo.update({id(x): x.detach().clone() for x in computed})
    copied = copy.deepcopy(module, memo)
    if is_pipeline(copied):
        del vars(copied)["forward"]
        expose(copied)
    return copied
