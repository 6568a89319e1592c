"""Finds and concatenates lists with one entry per row in outputs.

    rows of microbatches   lengths of a list   the list has
    3, 3, 2                3, 3, 2             one entry per row
    3, 3, 2                2, 2, 2             one entry for something else, such as a layer
    2, 2, 2                2, 2, 2             either: a run with another number of rows shows which
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain
from typing import Any

from torch import Tensor

from splitpipe.batch.tree import alike, one_level

_PLAIN = (Tensor, bool, int, float, str, type(None))


class Entries:
    """A list with one entry per row, which is a leaf while the outputs of microbatches are joined."""

    def __init__(self, values: list[Any] | tuple[Any, ...]) -> None:
        self.values = values


def concatenated(column: Sequence[Entries]) -> Any:
    """The entries of all microbatches, in one list or tuple."""
    return type(column[0].values)(chain.from_iterable(each.values for each in column))


class ListReader:
    """Finds lists with one entry per row, and remembers them from call to call."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._doubts: dict[str, Sequence[Any]] = {}

    def marked(
        self, values: list[Any], rows: Sequence[int], kind: str, again: Callable[[int], tuple[Any] | None]
    ) -> list[Any]:
        """The values of microbatches, with such lists as ``Entries``.

        ``again`` returns the output for another number of rows, or None if it can't be run; ``kind`` is the kind of
        call, on which outputs may depend.
        """
        self._doubts = {}
        found = self._mark(values, rows, kind)
        if self._doubts:
            other = 1 if rows[0] > 1 else 2
            made = again(other) if sum(rows) >= other else None
            if made is not None:
                found = self._mark([*values, *made], [*rows, other], kind)[:-1]
            for where, lists in self._doubts.items() if len(values) > 1 else ():
                if where not in self._known and not _begin_with_rows(lists, rows):
                    raise _doubt(where.removeprefix(kind), len(lists[0]), rows[0])
        return found

    def _mark(self, values: list[Any], rows: Sequence[int], where: str) -> list[Any]:
        first = values[0]
        if isinstance(first, _PLAIN) or any(type(value) is not type(first) for value in values):
            return values
        if type(first) in (list, tuple) and self._by_rows(values, rows, where):
            return list(map(Entries, values))
        if where in self._doubts and where not in self._known:
            return values  # Its contents count if it has something other than rows.
        levels = [_level(value) for value in values]
        parts = levels[0][0]
        if parts is None or any(part is None or len(part) != len(parts) for part, _ in levels):
            return values
        keys = list(first) if isinstance(first, dict) else range(len(parts))
        columns = [
            self._mark(list(column), rows, f"{where}[{key!r}]")
            for key, column in zip(keys, zip(*(part for part, _ in levels if part is not None)))
        ]
        return [
            rebuild([column[i] for column in columns]) if rebuild is not None else values[i]
            for i, (_, rebuild) in enumerate(levels)
        ]

    def _by_rows(self, values: Sequence[Any], rows: Sequence[int], where: str) -> bool:
        lengths = [len(value) for value in values]
        if lengths != [*rows]:
            if len(set(rows)) > 1 or len(set(lengths)) == 1:
                self._known[where] = False
            return False
        if len(set(rows)) > 1:
            self._known[where] = True
        elif where not in self._known and alike(values[0]):
            self._doubts[where] = values
        return self._known.get(where, False)


def _begin_with_rows(lists: Sequence[Any], rows: Sequence[int]) -> bool:
    """True if all entries are tensors whose first dimension is the rows, as in a list of layers' values."""
    return all(
        isinstance(x, Tensor) and x.dim() and x.shape[0] == count
        for entries, count in zip(lists, rows) for x in entries
    )


def _level(value: Any) -> tuple[list[Any] | None, Callable[[list[Any]], Any] | None]:
    """The children of a container, or of a dataclass that pytree doesn't know."""
    parts, rebuild = one_level(value)
    if parts is not None or not dataclasses.is_dataclass(value) or isinstance(value, type):
        return parts, rebuild
    names = [field.name for field in dataclasses.fields(value)]

    def filled(parts: list[Any]) -> Any:
        made = copy(value)
        for name, part in zip(names, parts):
            object.__setattr__(made, name, part)  # It may be frozen.
        return made

    return [getattr(value, name, None) for name in names], filled


def has_list(value: Any, rows: int) -> bool:
    """True if a list or tuple inside has as many entries as there are rows."""
    if isinstance(value, _PLAIN):
        return False
    if type(value) in (list, tuple) and len(value) == rows:
        return True
    parts, _ = _level(value)
    return any(has_list(part, rows) for part in parts or ())


def _doubt(where: str, length: int, rows: int) -> ValueError:
    """The error for a list that is ambiguous."""
    return ValueError(
        f"the output has a list of {length} at {where or 'its top'}, and each microbatch has {rows} "
        f"rows: it could have one entry per row, to be concatenated, or {length} values for all rows, to be joined one "
        "by one, and a run with other rows, which would show which, wasn't possible. Choose chunks= such that "
        "microbatches have another size, or return a tensor or a dict instead."
    )
