"""Rules for views, indices and joins: whether their results have the rows in order along the first dimension."""
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.function_call import FunctionCall, dims_of, numbers_among
from splitpipe.loss.ledger import GIVEN, VARIED, Constant, Meaning, Rows
from splitpipe.loss.numbers import Number, Unknown, tensors

RESHAPING = frozenset("view reshape view_as reshape_as flatten unflatten ravel repeat_interleave".split())
TURNING = frozenset("t T mT H mH adjoint transpose swapaxes permute movedim unsqueeze".split())
DIVIDING = frozenset("unbind split chunk tensor_split".split())
#: Functions that repeat entries, perhaps for each row.
REPEATING = frozenset("expand expand_as broadcast_to repeat tile repeat_interleave".split())


def keep(call: FunctionCall) -> Meaning | None:
    """The same values in another dtype or place, or some more entries of each row."""
    sized = call.name != "one_hot" or call.argument(1, "num_classes", -1) > 0
    longer = isinstance(call.meaning, Rows) and len(call.out) != len(call.args[0])
    return call.meaning if sized and not longer else None


def view(call: FunctionCall) -> Meaning | None:
    """Another shape or order of dimensions, some of the entries, or each of them several times; or a piece."""
    rows, x, out, name, ledger = call.meaning, call.args[0], call.out, call.name, call.ledger
    if not isinstance(rows, Rows):
        made = rows is GIVEN and name in REPEATING or rows is Constant.POSITIONS
        return VARIED if made else None if isinstance(rows, Number) else rows  # loss.expand_as(rows)
    each = [*call.args[1:], *call.kwargs.values()]
    given = [y for some in each for y in (some if isinstance(some, (tuple, list)) else [some])]
    if name in RESHAPING:  # No entry of the first dimension may have parts of several rows.
        size = ledger.rows if rows.chosen is None else len(x)
        plain = len(call.operands) == 1 or "as" in name  # Or each entry is repeated as often as a tensor says.
        # Given by a number, the first dimension may be of groups of rows, unless it has the entries of some dimensions.
        groups = name in ("view", "reshape") and given[:1] not in ([], [-1]) and not (
            ledger.sizes and len(out) in [ledger.rows, *accumulate(x.shape, mul)])
        return rows if out.dim() and plain and not groups and len(out) and not len(out) % size else None
    if name in DIVIDING and not call.argument(2 - (name == "unbind"), "dim", 0) % x.dim():
        ledger.note_size(x, rows)  # Python may count the pieces.
        return None
    if name in TURNING:  # Strides of a single row don't show which dimension is in front.
        dims = dims_of(out, given)
        if dims[0] != 0 if name == "permute" else 0 in dims and (given or out.dim() == 2):
            return None
    if not out.dim():
        return rows if name == "squeeze" and ledger.most > 1 else None  # Of a single row.
    added = name in REPEATING and out.dim() != x.dim()
    return rows if out.shape[:1] == x.shape[:1] and out.stride(0) == x.stride(0) and not added else None


def join(call: FunctionCall) -> Meaning | None:
    """Rows that are joined along another dimension."""
    parts = tensors(call.args[:1])
    like = next((x for x in parts if isinstance(call.of(x), Rows)), parts[0])
    joined = call.joined(parts, like.shape) if len({x.dim() for x in parts}) < 2 else None
    if not isinstance(joined, Rows):  # Constants may be there for each row.
        return VARIED if isinstance(joined, Constant) else None
    return joined if call.argument(1, "dim", 0) % call.out.dim() or len(parts) == 1 and "cat" in call.name else None


def index(call: FunctionCall) -> Meaning | None:
    """Entries by slices and numbers, by a mask, or one of each row."""
    (x, given), rows, ledger = call.args, call.meaning, call.ledger
    places = given if isinstance(given, tuple) else (given,)
    if not any([isinstance(each, (Tensor, list)) or hasattr(each, "__array__") for each in places]):
        bounds = [y for each in places for y in ((each.start, each.stop) if isinstance(each, slice) else (each,))]
        if ledger.may_be_read([y for y in numbers_among(bounds) if abs(y) > 1]):
            return Unknown(ledger.read)
        if not all([isinstance(ledger.of(y), Constant) for y in bounds]):
            return None  # x[:, :lengths.max()]
        if not isinstance(rows, Rows):
            return view(call)
        first: Any = places[0] if places else Ellipsis
        behind = first is Ellipsis and sum([each is not None for each in places[1:]]) < x.dim()
        cut = isinstance(first, slice) and (first.start or 0, first.step or 1) == (0, 1)
        cut = cut and (first.stop is None or first.stop in ledger.sizes)  # x[:4] may be a part of the batch.
        whole = (behind or cut) and call.out.shape[:1] == x.shape[:1]
        return rows if whole else Unknown("a part of the rows")
    [first, *rest], kinds = places, [call.of(each) for each in places]
    if not isinstance(rows, Rows):  # A table with an entry for each class.
        table = rows is GIVEN and isinstance(kinds[0], Rows) and first.dtype != torch.bool and not rest
        return kinds[0] if table else None
    if kinds[0] is Constant.POSITIONS and len(first) == len(x):  # x[arange(len(x)), labels]
        of_rows = [isinstance(y, int) or y.dim() == 1 and y.dtype != torch.bool and rows.alike(kind)
                   for y, kind in zip(rest, kinds[1:])]
        return rows if all(of_rows) else None
    selects = not rest and first.dtype == torch.bool and first.dim() and first.shape == x.shape[: first.dim()]
    return replace(rows, chosen=first, selected=True) if selects and rows.alike(kinds[0]) else None


def gather(call: FunctionCall) -> Meaning | None:
    """Entries that an index takes from each row, or to which it writes."""
    plain = 0 not in dims_of(call.args[0], call.argument(1, "dim"))
    return call.joined(shape=call.out.shape) if plain and isinstance(call.of(call.argument(2, "index")), Rows) else None
