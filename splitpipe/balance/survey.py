"""Finds the calls of repeated blocks, where a module may be cut, by running a copy of it once, on one row.

Repeated blocks are children of one module, of one class: the layers of a transformer, the blocks of a ResNet. Items of
a list are blocks as a whole (a layer may contain experts, for example). In other modules, and in an nn.Sequential, what
repeats inside the children comes first. Single layers are blocks only if nothing else repeats.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from splitpipe.balance.copies import copy_of, measuring
from splitpipe.balance.units import FreeLoss, Units
from splitpipe.batch import arguments
from splitpipe.batch.division import Division
from splitpipe.batch.reading import Memory
from splitpipe.checks import verify_ungathered
from splitpipe.core.microbatch import cuts
from splitpipe.core.note import add_note
from splitpipe.core.stream import Place
from splitpipe.core.torch_private import tree_map_only
from splitpipe.engine.scheduled import loss_of
from splitpipe.partition.homes import arguments_of, verify_filled
from splitpipe.partition.repeated import no_blocks, repeated
from splitpipe.partition.resident import Shell
from splitpipe.schedule.plurals import counted

T = TypeVar("T")
#: The name of the part before the first cut.
START = "(start)"


class Surveyed(NamedTuple):
    """A copy of a module, and what a call of it has shown."""

    module: nn.Module
    cuts: list[str]  # The blocks where it may be cut, in the order of their calls.
    has_loss: bool  # Whether a schedule can run backward from its output, because it has the field ``loss``.
    batch: Division  # The arguments of a call with a whole batch.
    rows: int

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its parts, each of which runs from one possible cut to the next."""
        return START, *self.cuts

    def measured(
        self, places: Sequence[Place], measure: Callable[[Units], list[T]], chunks: int = 1,
        loss_fn: Callable[..., Any] | None = None, target: Any = None, compile: bool | Mapping[str, Any] = False,
    ) -> list[T]:
        """What ``measure`` returns for the copy with all cuts, run on one of ``chunks`` microbatches.

        Without ``loss_fn``, the loss is the module's own, or costs nothing.
        """
        if loss_fn is None and not self.has_loss:
            loss_fn, target = FreeLoss(), 0
        try:
            with measuring(places[0].device):
                call = _first(self.batch, cuts(self.rows, chunks)[0][1], places[0].device)
                return measure(Units(self.module.train(), self.cuts, places, loss_fn, call, target, compile))
        except BaseException as error:
            what = f"{type(self.module).__name__}, {counted(chunks, 'chunk')}, {places[0]}"
            add_note(error, f"Raised while profiling {what}, in a copy. The model is unchanged.")
            raise


def surveyed(module: object, sample: object, whose: str = "sample") -> Surveyed:
    """Surveys a copy of a module. The module stays as it is.

    Raises TypeError or ValueError for a module that can't be cut, or for an invalid sample.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected an nn.Module.")
    if isinstance(module, Shell):
        raise TypeError("module is a SplitPipe: expected the module that it was made from.")
    verify_ungathered(module)
    verify_filled(module)
    if not repeated(module):
        raise no_blocks(module)
    batch, rows = _batch_of(module, sample, whose)
    home = next((x.device for x in module.parameters()), torch.device("cpu"))
    with measuring(home):
        copied = copy_of(module)
        try:
            where, output = _called(copied, *_first(batch, 1, home))
            has_loss = _has_loss(output)
            if has_loss and rows > 1 and loss_of(output).dim():  # Of two rows, one number for each isn't a loss.
                has_loss = _has_loss(_called(copied, *_first(batch, 2, home))[1])
        except Exception as error:
            add_note(error, f"Raised while a copy of the {type(module).__name__} ran on one row, to find its blocks.")
            raise
    return Surveyed(copied, where, has_loss, batch, rows)


def _has_loss(output: Any) -> bool:
    try:
        loss_of(output)
    except TypeError:
        return False
    return True


def _batch_of(module: nn.Module, sample: object, whose: str) -> tuple[Division, int]:
    """A sample's arguments, and their number of rows. Raises TypeError or ValueError if it has none."""
    found = arguments.read(
        arguments.parameters_of(module.forward), *arguments_of(sample, whose), None, Memory(), whose
    )
    if not found.reading.size:
        raise ValueError(f"{whose} has no rows: expected a whole batch.")
    if found.reading.doubt is not None:
        raise found.reading.doubt
    return found.divided(1), found.reading.size


def _first(batch: Division, rows: int, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert batch.some is not None
    args, kwargs = tree_map_only(
        Tensor, lambda x: x.detach().to(device, copy=True).requires_grad_(x.requires_grad), batch.some(0, rows)
    )
    return args, kwargs


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], Any]:
    """The possible cuts of a copy of a module, and its output, from a call in eval mode."""
    names = {part: name for name, part in repeated(module).items()}
    calls: list[nn.Module] = []
    before = inside = 0

    def entered(part: nn.Module, args: Any) -> None:
        nonlocal inside
        if not inside:
            calls.append(part)
        inside += 1

    def left(part: nn.Module, args: Any, output: Any) -> None:
        nonlocal inside
        inside -= 1

    def ended(part: nn.Module, args: Any, output: Any) -> None:
        nonlocal before
        before += not calls

    handles = [part.register_forward_hook(ended) for part in module.modules() if part not in names]
    for part in names:
        handles += part.register_forward_pre_hook(entered), part.register_forward_hook(left)
    training = [part.training for part in module.modules()]
    try:
        with torch.no_grad():
            output = module.eval()(*args, **kwargs)
    finally:
        for part, mode in zip(module.modules(), training):
            part.training = mode
        for handle in handles:
            handle.remove()
    times = Counter(calls)
    # Before the first cut there must be something for the stage before it.
    cuts = [names[part] for at, part in enumerate(calls) if times[part] == 1 and (at or before)]
    if not cuts:
        raise no_blocks(module)
    return cuts, output
