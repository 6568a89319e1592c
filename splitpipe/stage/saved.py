"""What a checkpointed forward saves: of each tensor a number, by which a recomputation finds its place.

Forward makes no object for what it saves, but numbers: thousands of objects a step that live until backward have
Python's garbage collector walk the whole process in every step, which took longer than the step's own work.

A number tells whether its node lives: it is an int of its own, that this list holds and the node. CPython counts who
holds it, and frees what nobody does at once. Where that failed to hold, records would stay until their frame goes.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from splitpipe.core.note import uncompiled

#: A saved tensor, and the version it was saved at.
Record = tuple[Tensor, int]
#: How a saved tensor looks.
Meta = tuple[torch.Size, torch.dtype, torch.device]

#: Numbers start here: of small ints, Python has one for all.
_FIRST = 2**20


@uncompiled
def load(record: Record) -> Tensor:
    """The tensor, unless it was written to since: hooks switch off the check that torch makes."""
    tensor, version = record
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{list(tensor.shape)} tensor of {tensor.dtype} is at version {tensor._version}; expected version "
            f"{version}."
        )
    return tensor


def version_of(x: Tensor) -> int | None:
    """The tensor's version; None of an inference tensor, which has none."""
    try:
        return x._version  # Asked first whether it is one, torch lets go of the interpreter's lock.
    except RuntimeError:
        return None


class Lasting:
    """Tensors that live on anyway, saved as themselves: parameters, and other leaves, which the graph itself keeps.

    Args:
        parameters: of the stage.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.ids = frozenset(map(id, parameters))
        self._records: dict[int, Record] = {}

    def record(self, x: Tensor) -> Record:
        """Of a tensor that lives on. For a parameter it is the same one as long as nobody writes."""
        key, version = id(x), x._version
        if key not in self.ids:
            return x, version
        known = self._records.get(key)
        if known is None or known[1] != version:
            known = self._records[key] = x, version
        return known


class Numbering:
    """The numbers that one forward has given, in order."""

    def __init__(self) -> None:
        self.metas: list[Meta] = []
        self._given: list[int] = []
        self._same: dict[Meta, Meta] = {}

    def __len__(self) -> int:
        return len(self._given)

    def give(self, x: Tensor) -> int:
        """A number for a tensor, to be held by the node that saves it."""
        meta = x.shape, x.dtype, x.device
        self.metas.append(self._same.setdefault(meta, meta))
        number = _FIRST + len(self._given)
        self._given.append(number)
        return number

    def place(self, number: int) -> int:
        """Which tensor of the forward's a number stands for."""
        return number - _FIRST

    def held(self, place: int) -> bool:
        """Whether the node that was given the number of this place still has it."""
        return sys.getrefcount(self._given[place]) > _ALONE

    def any_held(self) -> bool:
        """Whether any node still has its number."""
        return any(map(self.held, range(len(self._given))))


def _alone() -> int:
    given = [int(_FIRST)]
    given.append(_FIRST + len(given))
    return sys.getrefcount(given[1])


#: What Python counts for a number that its list alone holds.
_ALONE = _alone()
