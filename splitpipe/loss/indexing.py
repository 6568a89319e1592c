"""Rules for indices; and numbers of rows: torch.arange(len(x)), linspace or randperm, and what is computed from these.

Numbers of rows are constants where they pick an entry of each row: y[torch.arange(len(y)), labels]. But they start
again in each microbatch, so as weights of rows (torch.linspace(0, 1, len(x)) * loss) or as their order they differ from
the batch's.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.arithmetic import axes_of, single
from splitpipe.loss.counts import counted
from splitpipe.loss.facts import CONSTANT, ROWS, Facts, Made, Row, Stack, is_constant, tensors
from splitpipe.loss.row_numbers import Positions
from splitpipe.loss.terms import Number, Unknown

#: Functions that make numbers of rows.
MAKERS = frozenset("arange range linspace logspace randperm".split())
#: Functions that keep their first argument's values.
_KEEP = frozenset(
    "to float double half bfloat16 type type_as clone detach squeeze unsqueeze contiguous cpu cuda alias long int "
    "view reshape view_as reshape_as expand expand_as flatten unflatten ravel t transpose permute __get__ "
    "__getitem__".split()
)
_REPEAT = frozenset("expand expand_as broadcast_to repeat".split())
_TURN = frozenset("t transpose permute __get__".split())


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
            if known.function and any(_meets(facts, x, known.size, each) for each in rows):
                if y.is_floating_point() or y.dtype == torch.bool:  # Otherwise an index: arange(len(x)) * n + labels.
                    facts.put(y, Unknown(known.function))
            elif not rows if known.function else name in _KEEP:
                plain = known.plain and _stays_plain(name, args, x, y, known.size)
                facts.positions[id(y)] = known._replace(of=weakref.ref(y), plain=plain)


def listed(facts: Facts, x: Tensor) -> None:
    """Records a tensor of whole numbers from Python, which may be numbers of rows."""
    if x.dim() and not x.is_floating_point():
        facts.positions[id(x)] = Positions(weakref.ref(x), "", x.numel(), False)


def _stays_plain(name: str, args: Sequence[Any], x: Tensor, y: Tensor, count: int) -> bool:
    """True if the numbers 0, 1, 2, ... are still in order, and each as often as the others."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        plain = all(isinstance(each, (int, slice, type(...))) or each is None for each in index)
        return plain and y.numel() == x.numel()
    if name == "repeat_interleave":
        return x.dim() == 1 and isinstance(args[-1], int)
    if name in _REPEAT:
        return x.dim() == y.dim() and x.shape[0] == y.shape[0] == count
    alike = name in _KEEP and y.numel() == x.numel()
    return alike and (x.numel() == count or name not in _TURN and (y.dim() == 1 or y.shape[0] == count))


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
        return known is not None and known.plain and known.size == count
    return list(index) == list(range(count))


def _meets(facts: Facts, x: Tensor, count: int, other: Tensor) -> bool:
    """True if broadcasting brings ``count`` numbers to the rows of the other tensor."""
    axis = facts.axis(other)
    place = other.dim() - axis
    rows = count == other.shape[axis] > 1 and not count % facts.rows
    return rows and x.dim() >= place and x.shape[-place] == count


def indexed(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    x, index = args[0], args[1]
    if isinstance(index, list) and any(isinstance(each, (slice, type(...))) or each is None for each in index):
        index = tuple(index)  # As torch takes it.
    made, first = facts.of(x), index[0] if isinstance(index, tuple) and index else index
    if isinstance(made, Stack):
        found = made.numbers[index] if isinstance(index, (int, slice)) else Unknown(name)
        return Stack(found) if isinstance(found, tuple) else found
    if isinstance(made, Number):
        return single(made, out, name) if x.numel() > 1 else made
    number = isinstance(first, int) and not isinstance(first, bool) and x.dim() > 0
    axis = facts.axis(x) if x.dim() else 0
    if made is ROWS and number and axis == 0:
        if not x.shape[0] % facts.rows:
            return Row(first % max(1, x.shape[0]))
        if facts.divided(x):
            return Unknown("a part of the rows")
    if made is ROWS and isinstance(first, slice) and x.dim() and axis == 0 and not x.shape[0] % facts.rows:
        places = range(*first.indices(x.shape[0]))
        if not _is_joined(facts, x.shape[0], places):
            piece = _slice(facts, first, places, x.shape[0])
            if piece is not None:
                return piece
        else:
            facts.reading.joined.add(out.shape[0])
    if made is ROWS and _picks(facts, first) and x.dim() and axis == 0 and not x.shape[0] % facts.rows:
        if not in_order(facts, first, x.shape[0]):
            return Unknown("an index of rows")  # Not arange(len(x)), nor found in the batch.
    if made is ROWS and first is None and x.dim():
        facts.turn(out, axis + 1)
    if made is ROWS and isinstance(first, Tensor) and first.dtype == torch.bool and axis == 0 and out.dim():
        facts.turn(out, 0)
    if made is ROWS and number and axis and out.dim() == x.dim() - 1:
        facts.turn(out, axis - 1)
    return facts.other(name, [x, *tensors((index,))], out)


def _is_joined(facts: Facts, count: int, places: range) -> bool:
    """True for a part of joined batches of ``count`` rows that has all rows of some of them."""
    whole = places.step == 1 and len(places) > 0 and not (places.start % facts.rows or len(places) % facts.rows)
    return whole and count in facts.reading.joined


def _slice(facts: Facts, index: slice, places: range, count: int) -> Made | None:
    """What a slice of ``count`` rows is; None if it has all of them."""
    bounds = [bound for bound in (index.start, index.stop) if isinstance(bound, int)]
    counts = any(counted(facts, bound) is not None for bound in bounds)
    if len(bounds) == 2 and index.stop - index.start == 1:
        return Row(index.start)
    if facts.rows == 1 or len(places) == count:
        return None
    return Row(places.start) if len(places) == 1 and not counts else Unknown("a part of the rows")


def _picks(facts: Facts, index: Any) -> bool:
    """True for an index that wasn't found in the batch.

    What Python finds there is in the order of the rows: for example, what SciPy has matched in each of them.
    """
    if isinstance(index, Tensor):
        known, constant = _known(facts, index), facts.of(index) is CONSTANT
        if index.dtype == torch.bool or known is not None and known.function:
            return constant and known is not None
        if not constant and known is None:
            return False
        return constant and not facts.reading.arrays or not bool((index.flatten().diff() >= 0).all())
    values: Any = index.tolist() if hasattr(index, "tolist") else index  # NumPy's.
    if not isinstance(values, (list, range)) or any(isinstance(each, bool) for each in values):
        return False
    return not facts.reading.arrays or any(a > b for a, b in zip(values, values[1:]))


def places(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """The places of values that aren't 0: one line each."""
    if isinstance(out, Tensor):
        facts.turn(out, 0)
    for x in tensors((out,)):
        facts.put(x, facts.other(name, args[:1], x))
    return None


def set_entries(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    x, made = args[0], facts.of(args[-1])
    found = [each for each in map(facts.of, tensors((args[1],))) if isinstance(each, Unknown)]
    if found:
        facts.put(x, found[0])
    elif isinstance(made, Row) or made is ROWS or any(facts.of(each) is ROWS for each in tensors((args[1],))):
        plain = made is ROWS or is_constant(made) or isinstance(made, Row)
        facts.put(x, ROWS if plain else made if isinstance(made, Unknown) else Unknown(name))
        if made is ROWS and 0 < args[-1].dim() == x.dim() - 1 and isinstance(args[1], int):
            facts.turn(x, facts.axis(args[-1]) + 1)
    elif made is not CONSTANT:
        facts.put(x, made if isinstance(made, Unknown) else Unknown(name))
    return None


def apart(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Pieces along a dimension: rows, if there is one piece per row."""
    x, at = args[0], 1 if name == "unbind" else 2
    dim = (args[at] if len(args) > at else kwargs.get("dim", 0)) % max(1, x.dim())
    made = facts.of(x)
    size = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
    by_count = any(counted(facts, each) is not None for each in (size if isinstance(size, (tuple, list)) else [size]))
    # The halves of torch.cat([one, other]), of a single row each.
    halves = facts.rows == 1 and len(out) > 1 and name != "unbind" and by_count is (name == "split")
    if isinstance(made, Stack) and name == "unbind":
        pieces: Sequence[Made] = made.numbers
    elif made is ROWS and dim == facts.axis(x) and not x.shape[dim] % facts.rows and len(out) == x.shape[dim] and (
        not halves
    ):
        pieces = [Row(number) for number in range(len(out))]
    else:
        pieces = [facts.other(name, [x], piece) for piece in out]
        if made is ROWS and dim == facts.axis(x) and not x.shape[dim] % facts.rows:
            pieces = [ROWS if not piece.shape[dim] % facts.rows else Unknown("a part of the rows") for piece in out]
        if made is ROWS and dim == facts.axis(x) and facts.divided(x):
            pieces = [Unknown("a part of the rows")] * len(out)
        axis = facts.axis(x) if x.dim() else 0
        for piece in out:
            if made is ROWS and axis:
                facts.turn(piece, axis - 1 if name == "unbind" and dim < axis else axis)
    for piece, each in zip(out, pieces):
        facts.put(piece, each)
    return None


def selected(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Some entries along a dimension: if it is that of the rows, it may be any of them, unless found in the batch."""
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    index = args[2] if len(args) > 2 else kwargs.get("index")
    if facts.of(x) is ROWS and x.dim() and isinstance(dim, int) and dim % x.dim() == facts.axis(x):
        if name == "narrow" or facts.of(index) is not ROWS:
            return Unknown("a part of the rows" if name == "narrow" else name)
    return facts.other(name, list(tensors([*args, *kwargs.values()])), out)


def moved(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Rows in another order."""
    x, at = args[0], 2 if name == "roll" else 1
    dims = args[at] if len(args) > at else kwargs.get("dims")
    rows = facts.of(x) is ROWS and x.dim() > 0 and (dims is None or facts.axis(x) in axes_of(x, dims))
    return Unknown(name) if rows else facts.other(name, [x], out)
