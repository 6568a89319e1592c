"""Rules for views, indices and joins: whether their results have the rows in order along the first dimension."""
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.function_call import FunctionCall, dims_of, numbers_among
from splitpipe.loss.ledger import GIVEN, VARIED, Constant, Meaning, Rows, TimeMajor
from splitpipe.loss.numbers import Number, Unknown, tensors

#: Functions that repeat entries, perhaps for each row.
REPEATING = frozenset("expand expand_as broadcast_to repeat tile repeat_interleave".split())
_DIVIDING = "unbind", "split", "chunk", "tensor_split"


def keep(call: FunctionCall) -> Meaning | None:
    """The same values in another dtype or place."""
    return None if call.name == "one_hot" and call.argument(1, "num_classes", -1) < 0 else call.meaning


def note_size(call: FunctionCall, rows: Rows) -> None:
    """Records that Python has read a size along the rows of the first argument."""
    ledger, x = call.ledger, call.args[0]
    ledger.sizes |= {len(x), x.numel()}
    if rows.chosen is not None:
        ledger.read = ledger.read or "the length of a selection"


def reshape(call: FunctionCall) -> Meaning | None:
    """Another shape, in the same order: no entry of the first dimension may have parts of several rows."""
    rows, out, ledger = call.meaning, call.out, call.ledger
    if not isinstance(rows, Rows):
        return _of_others(call)
    size = ledger.rows if rows.chosen is None else len(call.args[0])
    plain = len(call.operands) == 1 or "as" in call.name  # Or each entry is repeated as often as a tensor says.
    shape = call.args[1] if isinstance(call.args[-1], (tuple, list)) else call.args[1:]
    # Given by a number, the first dimension may be of groups of rows, unless it has the entries of some dimensions.
    groups = call.name in ("view", "reshape") and len(shape) > 0 and shape[0] != -1 and not (
        ledger.sizes and len(out) in [ledger.rows, *accumulate(call.args[0].shape, mul)])
    return rows if out.dim() and plain and not groups and len(out) and not len(out) % size else None


def turn(call: FunctionCall) -> Meaning | None:
    """Another order of dimensions, or one more: strides of a single row don't show which one is in front."""
    out, given = call.out, [*call.args[1:], *call.kwargs.values()]
    if not isinstance(call.meaning, Rows):
        return _of_others(call)
    dims = dims_of(out, [y for each in given for y in (each if isinstance(each, (tuple, list)) else [each])])
    moved = dims[0] != 0 if call.name == "permute" else 0 in dims and (bool(given) or out.dim() == 2)
    if not moved:
        return view(call)
    return TimeMajor() if out.dim() == 3 else None  # If they are the third one, ctc_loss raises an error.


def view(call: FunctionCall) -> Meaning | None:
    """Some of the entries, or each of them several times; or a piece."""
    rows, x, out = call.meaning, call.args[0], call.out
    if not isinstance(rows, Rows):
        return _of_others(call)
    if call.name in _DIVIDING and not call.argument(2 - (call.name == "unbind"), "dim", 0) % max(1, x.dim()):
        note_size(call, rows)  # Python may count the pieces.
        return None
    if call.name == "narrow" and call.ledger.may_be_read([n for n in call.scalars if abs(n) > 1]):
        return Unknown(call.ledger.read)
    if not out.dim():
        return rows if call.name == "squeeze" and call.ledger.most > 1 else None  # Of a single row.
    added = call.name in REPEATING and out.dim() != x.dim()
    return rows if len(out) == len(x) and out.stride(0) == x.stride(0) and not added else None


def _of_others(call: FunctionCall) -> Meaning | None:
    """A view of what has no rows."""
    if call.meaning is GIVEN and call.name in REPEATING or call.meaning is Constant.POSITIONS:
        return VARIED
    return None if isinstance(call.meaning, Number) else call.meaning  # loss.expand_as(rows)


VIEWS = frozenset([reshape, turn, view])


def join(call: FunctionCall) -> Meaning | None:
    """Rows that are joined along another dimension."""
    parts = tensors(call.args[:1])
    like = next((x for x in parts if isinstance(call.of(x), Rows)), parts[0])
    joined = call.joined(parts, like.shape) if len({x.dim() for x in parts}) < 2 else None
    if not isinstance(joined, Rows):  # Constants may be there for each row.
        return VARIED if isinstance(joined, Constant) else None
    [dim] = dims_of(call.out, call.argument(1, "dim", 0))
    return joined if dim or len(parts) == 1 and "cat" in call.name else None


def index(call: FunctionCall) -> Meaning | None:
    """Entries by slices and numbers, by a mask, or one of each row."""
    (x, given), rows, ledger = call.args, call.meaning, call.ledger
    places = given if isinstance(given, tuple) else (given,)
    if isinstance(rows, Unknown):  # A row that is indexed by a tensor has as many entries as that says.
        return None if any([isinstance(each, Tensor) for each in places]) else rows
    if not any([isinstance(each, (Tensor, list)) or hasattr(each, "__array__") for each in places]):
        bounds = [y for each in places for y in ((each.start, each.stop) if isinstance(each, slice) else (each,))]
        if ledger.may_be_read([y for y in numbers_among(bounds) if abs(y) > 1]):
            return Unknown(ledger.read)
        if not all([isinstance(ledger.of(y), Constant) for y in bounds]):
            return None  # x[:, :lengths.max()]
        return _cut(call, rows, places) if isinstance(rows, Rows) else _of_others(call)
    [first, *rest], kinds = places, [call.of(each) for each in places]
    if call.kinds == {Constant}:  # A table with an entry for each class.
        return GIVEN if {*kinds, rows} == {GIVEN} else None
    if rows is GIVEN and isinstance(kinds[0], Rows) and not rest:  # WEIGHT[labels]
        return kinds[0] if first.dtype != torch.bool else None
    if not isinstance(rows, Rows):
        return None
    if kinds[0] is Constant.POSITIONS and len(first) == len(x):  # x[arange(len(x)), labels]
        plain = all([
            isinstance(each, int) or isinstance(each, Tensor) and each.dim() == 1 and each.dtype != torch.bool
            and rows.alike(kind) for each, kind in zip(rest, kinds[1:])
        ])
        return rows if plain else None
    selects = not rest and first.dtype == torch.bool and first.dim() and first.shape == x.shape[: first.dim()]
    return replace(rows, chosen=first, selected=True) if selects and rows.alike(kinds[0]) else None


def _cut(call: FunctionCall, rows: Rows, places: tuple[Any, ...]) -> Meaning | None:
    """Rows indexed by numbers, slices and None."""
    x, out, first = call.args[0], call.out, places[0] if places else Ellipsis
    if first is Ellipsis:
        whole = sum([each is not None for each in places[1:]]) < x.dim()
    else:
        whole = isinstance(first, slice) and len(out) == len(x) and first.step in (None, 1) and not first.start
        whole = whole and (first.stop is None or first.stop in call.ledger.sizes)  # x[:4] may be a part of the batch.
    return rows if whole and out.dim() else None if first is None else Unknown("a part of the rows")


def gather(call: FunctionCall) -> Meaning | None:
    """Entries that an index takes from each row, or from a table, or to which it writes."""
    x, rows = call.args[0], call.of(call.argument(2, "index"))
    if call.name == "gather" and call.meaning is GIVEN and x.dim() == 1:
        return rows if isinstance(rows, Rows) else None
    plain = 0 not in dims_of(x, call.argument(1, "dim")) and isinstance(rows, Rows)
    return call.joined(shape=call.out.shape) if plain else None
