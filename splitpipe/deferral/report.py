"""The report on deferral: which parameters have their gradients deferred, and why others don't."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from splitpipe.deferral.owners import Note
from splitpipe.schedule.plurals import counted


@dataclass
class Sighting:
    """Functions seen to use one parameter: those that defer its gradient, and why others don't, or aren't compiled."""

    parameter: Callable[[], Tensor | None]
    deferred: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    uncompiled: set[str] = field(default_factory=set)


@dataclass
class Sightings:
    """The uses of a stage's parameters by its layers that have been seen."""

    _seen: dict[int, Sighting] = field(default_factory=dict)

    def deferred(self, parameter: Tensor, how: str) -> None:
        """Records a gradient that is deferred."""
        self._of(parameter).deferred.add(how)

    def left(self, parameter: Tensor, why: str) -> None:
        """Records a gradient, or a part of one, that is left to autograd."""
        self._of(parameter).left.add(why)

    def note(self, names: Container[int]) -> Note:
        """Records what a walk through a graph finds about the parameters with these identities."""

        def note(leaf: Tensor, deferred: bool, why: str) -> None:
            if isinstance(leaf, Parameter) and id(leaf) in names:
                (self.deferred if deferred else self.left)(leaf, why)

        return note

    def note_uncompiled(self, names: Container[int]) -> Callable[[Tensor, str], None]:
        """Records, for parameters with these identities, why a layer to be compiled runs uncompiled, or unsplit."""

        def note(parameter: Tensor, why: str) -> None:
            if id(parameter) in names:
                self._of(parameter).uncompiled.add(why)

        return note

    def forget(self) -> None:
        """Forgets what was seen."""
        self._seen.clear()

    def find(self, parameter: Tensor) -> Sighting | None:
        """What was recorded about a parameter."""
        sighting = self._seen.get(id(parameter))
        return sighting if sighting is not None and sighting.parameter() is parameter else None

    def _of(self, parameter: Tensor) -> Sighting:
        sighting = self.find(parameter)
        if sighting is None:
            sighting = self._seen[id(parameter)] = Sighting(_reference(parameter))
        return sighting


def _reference(parameter: Tensor) -> Callable[[], Tensor | None]:
    # A tensor with a weak reference can't be swapped, which model.to() does with DTensors, and with others if so set.
    if type(parameter) is Parameter and not torch.__future__.get_swap_module_params_on_conversion():
        return weakref.ref(parameter)
    return lambda: parameter


@dataclass(frozen=True)
class Row:
    """One parameter: ``why`` names the functions that defer its gradient, or a part of it, or is the reason why not."""

    parameter: str
    stage: int
    elements: int
    deferred: bool
    why: str


@dataclass(frozen=True)
class DeferralReport:
    """A row for every parameter, in the model's order. ``print`` shows a table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells = [("parameter", "stage", "deferred", "why")]
        cells += [(row.parameter, str(row.stage), "yes" if row.deferred else "no", row.why) for row in self.rows]
        widths = [max(map(len, column)) for column in list(zip(*cells))[:3]]
        lines = ["  ".join([*map(str.ljust, line[:3], widths), line[3]]) for line in cells]
        deferred = [row for row in self.rows if row.deferred]
        part, total = sum(row.elements for row in deferred), sum(row.elements for row in self.rows)
        share = f", {part / total:.1%} of the elements" if total else ""
        return "\n".join([*lines, f"deferred: {len(deferred)} of {counted(len(self.rows), 'parameter')}{share}"])


def row(name: str, stage: int, parameter: Tensor, sighting: Sighting | None, otherwise: str) -> Row:
    """The row of a parameter; ``otherwise`` is the reason why it isn't deferred if nothing was recorded about it."""
    if not parameter.requires_grad:
        deferred, why = False, "it is frozen"
    elif sighting is None:
        deferred, why = False, otherwise
    else:
        deferred, left = bool(sighting.deferred), ", ".join(sorted(sighting.left))
        why = ", ".join(sorted(sighting.deferred)) or left
        if deferred and left:
            why += f"; by autograd: {left}"
        why = "; ".join([each for each in (why, *sorted(sighting.uncompiled)) if each])
    return Row(name, stage, parameter.numel(), deferred, why)
