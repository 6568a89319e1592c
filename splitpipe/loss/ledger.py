"""What is known about the tensors and numbers with which one microbatch's code computes.

    a tensor is     if
    Rows            it has the rows of the batch, in order, along its first dimension
    TimeMajor       it has them along its second one
    Constant        it is the same for every microbatch, or made by the code: parameters, zeros, numbers of positions
    Quantity        its rows were added up, or it is computed of such numbers
    Unknown         it is anything else: the function where recognition ended

Numbers of Python don't show where they come from. One is a constant unless Python had read

    a size along the rows      and it, or its inverse, is a multiple of the microbatch's rows: then it may count rows
    a value of the batch       then any number may be computed from that
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import tree_flatten
from splitpipe.loss.numbers import Amount, Number, Quantity, Unknown, quotient, tensors

MAY_COUNT = "a number that may count rows"


@dataclass(frozen=True, eq=False)
class Rows:
    """It has the rows of the batch along its first dimension.

    ``chosen``: the mask that has selected entries. ``share``: the number of the batch that has divided it, such as
    ``mask.sum()``, and its value in this microbatch. ``counting``: whether a number that may count rows is in it: then
    its sum isn't recognised. ``mask``: whether it is a mask, or has been multiplied by one.
    """

    chosen: Tensor | None = None
    share: tuple[Quantity, Tensor] | None = None
    counting: bool = False
    mask: bool = False

    def alike(self, other: Rows) -> bool:
        """True if the same mask has selected both, or none. Selecting by it has waited for the device already."""
        x, y = self.chosen, other.chosen
        return x is y or x is not None and y is not None and (
            x.shape == y.shape and x.device == y.device and torch.equal(x, y))


@dataclass(frozen=True, eq=False)
class TimeMajor:
    """It has the rows along its second dimension, as ctc_loss wants."""

    rows: Rows


@dataclass(frozen=True)
class Constant:
    """It is the same for every microbatch, or made by the code."""

    made: bool = False  #: Whether the code of the microbatch has made it: its size may be that of the rows.
    uniform: bool = False  #: Whether all entries are the same.
    positions: bool = False  #: Whether it is torch.arange(n).
    counting: bool = False  #: Whether its entries may count rows.
    zeros: bool = False


Meaning = Rows | TimeMajor | Constant | Quantity | Unknown
#: A constant from outside; and two that the code has made: all entries are the same, or they may differ.
GIVEN, UNIFORM, VARIED = Constant(), Constant(made=True, uniform=True), Constant(made=True)


class Ledger:
    """The meanings of the tensors of one microbatch, which has ``rows`` rows along dimension ``dim``.

    Along another dimension than the first one, they aren't followed.
    ``most``: the rows of the largest microbatch: if it has more than one, it shows what a single row can't.
    ``given``: numbers among the call's arguments, which are the same for every microbatch.
    """

    def __init__(self, rows: int, most: int, dim: int = 0, given: Iterable[float] = ()) -> None:
        self.rows, self.most, self._dim, self._given = max(1, rows), most, dim, frozenset([0, *given])
        self._entries: dict[int, tuple[weakref.ref[Tensor], Meaning, bool, int | None]] = {}
        self._values: dict[Quantity, Amount] = {}  #: Of atoms.
        self.constants: list[tuple[Tensor, int | None]] = []  #: Those in numbers, with their versions of that time.
        self.read = ""  #: The function by which Python has read values of the batch.
        self._whole: set[float] = set()  #: Those that are whole numbers.
        self.sizes: set[int] = set()  #: What it has read of tensors with rows: lengths, and numbers of elements.
        self.asked, self.empty = 0, False  #: As in a Number.

    def put(self, x: Tensor, meaning: Meaning) -> None:
        """Records what a tensor is."""
        self._entries[id(x)] = weakref.ref(x), meaning, x.grad_fn is not None, version_of(x)

    def of(self, x: Any) -> Meaning:
        """What a value is."""
        if not isinstance(x, Tensor):
            return GIVEN
        entry = self._entries.get(id(x))
        if entry is not None and entry[0]() is x:
            if entry[3] != version_of(x):
                return Unknown("an in-place function")
            if entry[2] or not isinstance(x.grad_fn, BackwardCFunction):
                return entry[1]  # Otherwise, an autograd function has made it, whose graph isn't traced.
        if x.grad_fn is None:  # torch.Tensor([n]), from NumPy: made where no mode sees it.
            return Unknown(self.read) if self.read and not isinstance(x, Parameter) else GIVEN
        return Unknown(x.grad_fn.name()) if isinstance(x.grad_fn, BackwardCFunction) else self._of_block(x, "")

    def _of_block(self, x: Tensor, block: str) -> Meaning:
        """What a block, whose code isn't traced, has made: a value with rows, whatever it has computed it from."""
        if self._dim and x.dim():
            return Unknown(f"a batch along dimension {self._dim}")
        if x.dim() and (x.shape[0] == self.rows or x.dim() > 1 and not x.shape[0] % self.rows):
            return Rows()
        return Unknown(block or x.grad_fn.name() if x.grad_fn is not None else block)

    def begin(self, value: Any, dim: int) -> None:
        """Records an argument, or an output, of a batch along this dimension."""
        for x in tensors((value,)):
            if x.dim() and not isinstance(self.of(x), (Rows, Quantity)):
                first = not 0 < dim < x.dim() or x.shape[dim] != self.rows
                self.put(x, Rows(mask=x.dtype is torch.bool) if first else Unknown(f"a batch along dimension {dim}"))
            elif id(x) not in self._entries and not x.dim():
                self.put(x, GIVEN)

    def begin_entries(self, value: Any) -> None:
        """Records a list with one entry per row: its length, which no mode sees, may have been read."""
        self.sizes.add(self.rows)
        self.note_numbers(value, "a list with one number per row")
        for x in tensors((value,)):
            self.put(x, Unknown("an entry of a list with one per row"))

    def returned(self, value: Any, block: str) -> None:
        """Records what a block has returned: values with rows, whatever it has computed them from."""
        for x in tensors((value,)):
            self.put(x, self._of_block(x, block))

    def link(self, x: Tensor, y: Tensor) -> None:
        """Records that a tensor is equal to another, for example on another device."""
        if id(x) in self._entries or x.grad_fn is not None:
            self.put(y, self.of(x))

    def number(self, x: Tensor) -> Number | Unknown | None:
        """What a tensor without rows consists of; None for one with rows."""
        meaning = self.of(x)
        if isinstance(meaning, Constant) and not x.dim():
            meaning = self.atom("a constant", x, nothing=meaning.made and not x.requires_grad)
        if any([version_of(y) != version for y, version in self.constants]):
            meaning = Unknown("an in-place function")
        if not isinstance(meaning, Quantity):
            return None if x.dim() else meaning if isinstance(meaning, Unknown) else Unknown("squeeze")
        quantities = _in_order(meaning)
        values = tuple([self._values[q] for q in quantities if q.function is None])
        return Number(tuple(quantities), values, self.asked, self.empty)

    def atom(
        self, name: str, value: Amount, rows: Rows | None = None, nothing: bool = False, selected: bool = False
    ) -> Quantity:
        """A new atom: a sum of these rows, of which targets or a mask may have ``selected`` some; or a constant."""
        grad = isinstance(value, Tensor) and value.requires_grad
        selected = selected or rows is not None and (rows.mask or rows.chosen is not None)
        q = Quantity(name, grad=grad, grows=rows is not None, nothing=nothing, constant=rows is None,
                     selected=selected, asked=self.asked)
        self._values[q] = value
        return q

    def mean(self, total: Tensor, count: Amount, name: str, rows: Rows, like: Tensor) -> Quantity:
        """A new mean of these rows, a total by a count, with the type of the tensor ``like``."""
        selected = isinstance(count, Tensor)
        rows = replace(rows, mask=False)  # A mean over all entries counts those that a mask has made 0, too.
        above = self.atom(name, total, rows, selected=selected)
        return quotient(above, self.atom(name, count, rows, selected=selected), like)

    def note_size(self, x: Tensor, rows: Rows) -> None:
        """Records that Python has read a size along the rows."""
        self.sizes |= {len(x), x.numel()}
        if rows.chosen is not None:
            self.note_read("the length of a selection", len(x))

    def note_numbers(self, value: Any, block: str) -> bool:
        """Records the Python numbers that a block has returned; true if there are any."""
        found = [x for x in tree_flatten(value)[0] if type(x) in (int, float)]
        for x in found if block else []:
            self.note_read(block, x)
        return bool(found)

    def note_read(self, name: str, value: Any) -> None:
        """Records that Python has read a value of the batch, by this function."""
        self.read = self.read or name
        if not isinstance(value, float) or value.is_integer():
            self._whole.add(value if isinstance(value, (int, float)) and value else 1)

    def may_be_read(self, *values: Any) -> bool:
        """True if Python has read values of the batch, from which one of these numbers may be computed."""
        found = [x for x in values if isinstance(x, (int, float)) and x not in self._given]
        return bool(self.read) and any([
            not _is_literal(x) or any([_nearest(1 / x) % n == 0 for n in self._whole if _nearest(1 / x)]) for x in found
        ])  # 0.5 may be 1 / 2.

    def may_count(self, *values: Any, size: bool = False) -> bool:
        """True if one of the numbers, or its inverse, is a multiple of the rows; if ``size``: a size that was read."""
        if not self.sizes or self.rows < self.most:  # The largest microbatch decides.
            return False
        found = [x for x in values if isinstance(x, (int, float)) and x not in self._given]
        whole = [_nearest(y) for x in found if not size or not _is_literal(x) for y in (x, 1 / x)]
        return any([n in self.sizes if size else not n % self.rows for n in whole if n])

    def may_be_rows(self, x: Tensor) -> bool:
        """True for a tensor that may repeat a number for each row."""
        return bool(x.dim()) and self.rows == self.most and not len(x) % self.rows


def _is_literal(value: float) -> bool:
    """True for a number with one digit besides zeros, such as 0.1."""
    return not float(value).is_integer() and value == float(f"{value:.1g}")


def _nearest(value: float) -> int:
    """The whole number that a value is, but for rounding and its sign; 0 if it is none."""
    nearest = round(abs(value)) if math.isfinite(value) else 0
    return nearest if math.isclose(nearest, abs(value), rel_tol=1e-6) else 0


def _in_order(last: Quantity) -> list[Quantity]:
    """The quantities of which one was computed, each after its operands, and last the one itself."""
    order, stack = dict[Quantity, None](), [last]
    while stack:
        missing = [x for x in stack[-1].operands if x not in order]
        if not missing:
            order[stack.pop()] = None
        stack += missing
    return [*order]
