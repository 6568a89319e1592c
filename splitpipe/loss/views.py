"""Rules for views, indices and joins: whether their results have the rows in order along the first dimension."""
from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import storage_of
from splitpipe.loss.function_call import FunctionCall, dims_of
from splitpipe.loss.ledger import GIVEN, VARIED, Constant, Meaning, Rows, Stack, Turned, tensors
from splitpipe.loss.terms import Number, Unknown

#: Functions that keep the order of entries, whether they copy or not.
_ORDERED = frozenset("view reshape view_as reshape_as flatten unflatten ravel".split())
#: Functions that may bring another dimension to the front.
_TURNING = frozenset("t T mT H mH adjoint transpose swapaxes permute movedim unsqueeze".split())


def keep(call: FunctionCall) -> Meaning | None:
    """The same values in another dtype or place."""
    return None if isinstance(call.meaning, Number) and call.out.dtype == torch.bool else call.meaning


def view(call: FunctionCall) -> Meaning | list[Meaning | None] | None:
    """The same values in another shape, or some of them; or several views."""
    meaning, x, out = call.meaning, call.args[0], call.out
    if isinstance(meaning, Stack):
        return list(meaning.numbers) if call.name == "unbind" else None
    if isinstance(out, Tensor):
        return _viewed(call, x, out)
    sources = call.operands if call.name == "broadcast_tensors" else [x] * len(out)
    pieces = call.name in ("split", "chunk") and not call.argument(2, "dim", 0) % max(1, x.dim())  # More of the batch.
    views = [None if pieces else _viewed(call, own, y) for own, y in zip(sources, out)]
    if isinstance(meaning, Rows) and (call.ledger.rows == 1 or not all(isinstance(each, Rows) for each in views)):
        call.ledger.note_size(x, meaning)  # Python may count the pieces.
    return views


def _viewed(call: FunctionCall, x: Tensor, out: Tensor) -> Meaning | None:
    meaning, ledger = call.ledger.of(x), call.ledger
    if isinstance(meaning, Constant):
        return meaning if meaning.uniform or not meaning.made else VARIED
    if not isinstance(meaning, Rows):
        return meaning if x.numel() == out.numel() == 1 else None
    if not out.dim():
        return meaning if call.name == "squeeze" and ledger.most > 1 else None  # Of a single row.
    if call.name in _ORDERED:  # No entry of the first dimension has parts of several rows.
        return meaning if len(out) and not len(out) % (ledger.rows if meaning.chosen is None else len(x)) else None
    if not x.dim() or storage_of(x) != storage_of(out):
        return None
    if call.name in ("transpose", "permute", "swapaxes") and out.dim() == 3 and out.stride(1) == x.stride(0):
        return Turned(meaning) if out.shape[1] == len(x) and _turns(call, out) else None
    if len(out) != len(x) or out.stride(0) != x.stride(0) or len(x) == 1 and _turns(call, out):
        return None
    return meaning


def _turns(call: FunctionCall, out: Tensor) -> bool:
    """Whether a function brings another dimension to the front, which a single row doesn't show."""
    if "expand" in call.name or "broadcast" in call.name:
        return bool(out.dim() != call.args[0].dim())
    if call.name not in _TURNING:
        return False
    named = [*call.args[1:], *call.kwargs.values()]
    dims = [dim % out.dim() for dim in itertools.chain(*[y if isinstance(y, (tuple, list)) else [y] for y in named])]
    return dims[0] != 0 if call.name == "permute" else not dims or 0 in dims


def join(call: FunctionCall) -> Meaning | None:
    """Numbers that are stacked, or rows that are joined along another dimension."""
    parts, out, ledger = list(tensors(call.args[:1])), call.out, call.ledger
    meanings = [ledger.of(x) for x in parts]
    if any(isinstance(each, Number) for each in meanings):
        made = any(isinstance(each, Constant) and each.made for each in meanings)
        numbers = [] if made or out.dim() != 1 or len(parts) != len(out) else [ledger.number(x) for x in parts]
        found = tuple([number for number in numbers if isinstance(number, Number)])
        return Stack(found) if len(found) == len(parts) else None
    at = next((k for k, each in enumerate(meanings) if isinstance(each, Rows)), 0)
    whole = ledger.joined(parts, parts[at].shape) if len({x.dim() for x in parts}) < 2 else None
    if not isinstance(whole, Rows):
        return VARIED if whole is not None and whole.made else whole
    if whole.share is not None and len(parts) > 1:
        return None
    [dim] = dims_of(out, call.argument(1, "dim", 0))
    return whole if dim or len(parts) == 1 and "cat" in call.name else None


def index(call: FunctionCall) -> Meaning | None:
    """Entries by slices and numbers, by a mask, or one of each row."""
    (x, given), meaning, ledger = call.args, call.meaning, call.ledger
    places = given if isinstance(given, tuple) else (given,)
    if isinstance(meaning, Unknown):  # A row that is indexed by a tensor has as many entries as that says.
        return None if any(isinstance(each, Tensor) for each in places) else meaning
    if isinstance(meaning, Stack):
        return meaning.numbers[given] if isinstance(given, int) else None
    if not any(isinstance(each, (Tensor, list)) or hasattr(each, "__array__") for each in places):
        bounds = [y for each in places for y in ((each.start, each.stop) if isinstance(each, slice) else (each,))]
        sizes = [y for y in map(call.number, bounds) if y is not None]
        if any(isinstance(y, int) and abs(y) > 1 and ledger.may_be_read(y) for y in sizes):
            return Unknown(ledger.reading.values)
        if not all(isinstance(ledger.of(y), Constant) for y in bounds):
            return None  # x[:, :lengths.max()]
        return _cut(call, meaning, places) if isinstance(meaning, Rows) else _viewed(call, x, call.out)
    [first, *rest], kinds = places, [ledger.of(each) for each in places]
    if isinstance(meaning, Constant):  # A table with an entry for each class.
        if all(isinstance(each, Constant) and not each.made for each in (meaning, *kinds)):
            return GIVEN
        return kinds[0] if isinstance(kinds[0], Rows) and not rest and first.dtype != torch.bool else None
    if isinstance(meaning, Rows) and isinstance(kinds[0], Constant) and kinds[0].positions == len(x):
        plain = all(  # x[arange(len(x)), labels]
            isinstance(each, int) or isinstance(each, Tensor) and each.dim() == 1 and each.dtype != torch.bool
            and isinstance(kind, Rows) and kind.alike(meaning) for each, kind in zip(rest, kinds[1:])
        )
        return meaning if plain else None
    return _chosen(meaning, kinds[0], x, first) if not rest else None


def _chosen(rows: Meaning, by: Meaning, x: Tensor, mask: Tensor) -> Meaning | None:
    """The entries of rows that a mask of these rows selects."""
    if not isinstance(rows, Rows) or not isinstance(by, Rows) or not by.alike(rows):
        return None
    plain = mask.dtype == torch.bool and mask.dim() and mask.shape == x.shape[: mask.dim()]
    return replace(rows, chosen=mask) if plain else None


def choose(call: FunctionCall) -> Meaning | None:
    """masked_select: entries that a mask selects."""
    mask = call.argument(1, "mask")
    return _chosen(call.meaning, call.ledger.of(mask), call.args[0], mask) if mask.shape == call.args[0].shape else None


def _cut(call: FunctionCall, rows: Rows, places: tuple[Any, ...]) -> Meaning | None:
    """Rows indexed by numbers, slices and None."""
    x, out, first = call.args[0], call.out, places[0] if places else Ellipsis
    if first is Ellipsis:
        whole = sum(each is not None for each in places[1:]) < x.dim()
    else:
        whole = isinstance(first, slice) and len(out) == len(x) and first.step in (None, 1)
    return rows if whole and out.dim() else None if first is None else Unknown("a part of the rows")


def write(call: FunctionCall) -> Meaning | None:
    """What a tensor is after ``x[mask] = value``."""
    (x, mask, value), meaning, by = call.args, call.meaning, call.ledger.of(call.args[1])
    constant = isinstance(call.ledger.of(value), Constant) and not (isinstance(value, Tensor) and value.dim())
    if not isinstance(by, Rows) or not constant or mask.dtype != torch.bool or mask.shape != x.shape[: mask.dim()]:
        return None
    numbers = [call.number(value), meaning.value if isinstance(meaning, Constant) else None]
    if any(number is not None and call.ledger.doubt(number) for number in numbers):
        return None
    same_rows = isinstance(meaning, Rows) and meaning.alike(by) and meaning.share is None and not meaning.doubt
    return by if same_rows or isinstance(meaning, Constant) and meaning.uniform else None


def gather(call: FunctionCall) -> Meaning | None:
    """Entries that an index takes from each row."""
    x, index, rows = call.args[0], call.argument(2, "index"), call.meaning
    by = call.ledger.of(index)
    if not isinstance(rows, Rows) or not isinstance(by, Rows) or 0 in call.dims() or index.dim() != x.dim():
        return None
    return rows if by.alike(rows) and len(index) == len(x) else None
