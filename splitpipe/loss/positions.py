"""Numbers of rows: torch.arange(len(x)), linspace or randperm, and what is computed from these.

They are constants where they pick an entry of each row: y[torch.arange(len(y)), labels]. But they start again in each
microbatch, so as weights of rows (torch.linspace(0, 1, len(x)) * loss) or as their order they differ from the batch's.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.facts import ROWS, Facts, Positions, tensors
from splitpipe.loss.terms import Unknown

#: Functions that make numbers of rows.
MAKERS = frozenset("arange range linspace logspace randperm".split())
#: Functions that keep their first argument's values.
_KEEP = frozenset(
    "to float double half bfloat16 type type_as clone detach squeeze unsqueeze contiguous cpu cuda alias long int "
    "view reshape view_as reshape_as expand expand_as flatten unflatten ravel t transpose permute __get__ "
    "__getitem__".split()
)


def note(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Records what a function has made of numbers of rows: other such numbers, or values that depend on them."""
    if name in MAKERS:
        start, step = args[0] if len(args) > 1 else kwargs.get("start", 0), args[2] if len(args) > 2 else 1
        plain = name == "arange" and start == 0 and kwargs.get("step", step) == 1
        facts.positions[id(out)] = Positions(weakref.ref(out), name, out.numel(), plain)
        return
    given = list(tensors(args[:1] if name in _KEEP else [*args, *kwargs.values()]))
    found = [(x, known) for x in given if (known := _known(facts, x))]
    rows = [x for x in given if facts.of(x) is ROWS and x.dim()] if found else []
    for y in tensors((out,)) if found else ():
        for x, known in found:
            if any(_meets(facts, x, known.size, each) for each in rows):
                if y.is_floating_point() or y.dtype == torch.bool:  # Otherwise an index: arange(len(x)) * n + labels.
                    facts.put(y, Unknown(known.function))
            elif not rows:
                plain = known.plain and name in _KEEP and y.numel() == x.numel()
                facts.positions[id(y)] = known._replace(of=weakref.ref(y), plain=plain)


def _known(facts: Facts, x: Any) -> Positions | None:
    found = facts.positions.get(id(x))
    return found if found is not None and found.of() is x else None


def made_by(facts: Facts, x: Any) -> str:
    """The function that made these numbers of rows; empty for other values."""
    known = _known(facts, x)
    return "" if known is None else known.function


def in_order(facts: Facts, index: Any, count: int) -> bool:
    """True for an index that takes all ``count`` rows in their order."""
    if isinstance(index, Tensor):
        known = _known(facts, index)
        return known is not None and known.plain and index.numel() == count
    return list(index) == list(range(count))


def _meets(facts: Facts, x: Tensor, count: int, other: Tensor) -> bool:
    """True if broadcasting brings ``count`` numbers to the rows of the other tensor."""
    axis = facts.axis(other)
    place = other.dim() - axis
    rows = count == other.shape[axis] > 1 and not count % facts.rows
    return rows and x.dim() >= place and x.shape[-place] == count
