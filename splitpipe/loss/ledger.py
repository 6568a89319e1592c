"""What is known about the tensors and numbers with which one microbatch's code computes.

    a tensor is     if
    Rows            it has the rows of the batch, in order, along its first dimension
    TimeMajor       it has them along its second one, as ctc_loss wants
    Constant        it is the same for every microbatch, or made by the code: parameters, zeros, numbers of positions
    Aggregate       its rows were added up, or it is computed of such numbers
    Unknown         it is anything else: the function where recognition ended

Numbers of Python don't show where they come from. One is a constant unless Python had read

    a size along the rows      and it, or its inverse, is a multiple of the microbatch's rows: then it may count rows
    a value of the batch       then any number may be computed from that
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from splitpipe.core.tensors import version_of
from splitpipe.loss.numbers import CONSTANT, MEAN, SUM, Amount, Atom, Instruction, Number, Ref, Unknown, tensors

MAY_COUNT = "a number that may count rows"


@dataclass(frozen=True, eq=False)
class Rows:
    """It has the rows of the batch along its first dimension.

    ``chosen``: the mask that has selected entries. ``share``: the number that has divided it.

    ``counting``: whether a number that may count rows has divided it, which matters to sums.
    """

    chosen: Tensor | None = None
    share: Aggregate | None = None
    counting: bool = False

    def alike(self, other: Rows) -> bool:
        """True if the same mask has selected both, or none. Selecting by it has waited for the device already."""
        x, y = self.chosen, other.chosen
        return x is y or x is not None and y is not None and (
            x.shape == y.shape and x.device == y.device and torch.equal(x, y))


@dataclass(frozen=True, eq=False)
class TimeMajor:
    """It has the rows along its second dimension."""

    rows: Rows


@dataclass(frozen=True)
class Constant:
    """It is the same for every microbatch, or made by the code."""

    made: bool = False
    uniform: bool = False  #: Whether all entries are the same.
    value: float | None = None  #: That of all entries, if it is known.
    positions: int | None = None  #: Of torch.arange(positions).


@dataclass(eq=False)
class Aggregate:
    """It is a sum or mean over rows, or computed of such numbers."""

    entry: Atom | Instruction  #: Numbers among the arguments of an instruction are Aggregates, too.
    tensor: Tensor  #: Its value.
    sums: bool  #: Whether it grows with the rows, as sums do.
    live: bool = False  #: Whether it has the graph of a sum or mean.
    version: int | None = None  #: Of the tensor, when it was made.
    nothing: bool = False  #: Whether it is 0 whatever the rows are.
    hooked: bool = False  #: Whether it had a hook before the code wrote to it.
    severed: bool = False  #: Whether it is computed of live ones, without their graph.


Meaning = Rows | TimeMajor | Constant | Aggregate | Unknown
GIVEN, UNIFORM, VARIED = Constant(), Constant(True, True), Constant(True)


@dataclass
class HostReads:
    """What Python has read from the batch."""

    sizes: frozenset[int] = frozenset()  #: Sizes along the rows, alone and times all others.
    values: str = ""  #: The function by which it has read values.
    whole_numbers: frozenset[float] = frozenset()  #: Those among these.
    asked: int = 0  #: How many conditions it has asked,
    empty: bool = False  #: and whether one of them was that nothing counts.


class Ledger:
    """The meanings of the tensors of one microbatch, which has ``rows`` rows along dimension ``dim``.

    Along another dimension than the first one, they aren't followed.
    ``most``: the rows of the largest microbatch: if it has more than one, it shows what a single row can't.
    ``given``: numbers among the call's arguments, which are the same for every microbatch.
    ``scheduled``: whether numbers must be linear in sums and means, so that they are sums of microbatches' parts.
    """

    def __init__(
        self, rows: int, most: int, dim: int = 0, given: Iterable[float] = (), scheduled: bool = False
    ) -> None:
        self.rows, self.most, self._dim, self._given = max(1, rows), most, dim, frozenset([0, *given])
        self.scheduled = scheduled
        self._entries: dict[int, tuple[weakref.ref[Tensor], Meaning, bool, int | None]] = {}
        self.host_reads = HostReads()

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
            return Unknown(self.host_reads.values) if self.host_reads.values and not isinstance(x, Parameter) else GIVEN
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
            if x.dim() and not isinstance(self.of(x), (Rows, Aggregate)):
                first = not 0 < dim < x.dim() or x.shape[dim] != self.rows
                self.put(x, Rows() if first else Unknown(f"a batch along dimension {dim}"))
            elif id(x) not in self._entries and not x.dim():
                self.put(x, GIVEN)

    def begin_entries(self, value: Any) -> None:
        """Records a list with one entry per row, of which Python knows the length."""
        self.host_reads.sizes |= {self.rows}
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
        if x.dim() and not isinstance(meaning, Aggregate):
            return None
        if isinstance(meaning, Constant):
            atom = Atom(CONSTANT, "a constant", grad=x.requires_grad)
            meaning = Aggregate(atom, x, False, nothing=meaning.value == 0)
        if not isinstance(meaning, Aggregate):
            return meaning if isinstance(meaning, Unknown) else Unknown("squeeze")
        order = _in_order(meaning)
        places = {id(each): Ref(place) for place, each in enumerate(order)}
        for each in order:
            y = each.tensor
            if isinstance(each.entry, Atom) and each.version not in (None, version_of(y)):
                return Unknown("an in-place function")
            if each.hooked or hooked(y):
                return Unknown("a hook of the number")
        entries = [
            each.entry if isinstance(each.entry, Atom) else each.entry.changed(
                lambda x: places[id(x)] if isinstance(x, Aggregate) else x)
            for each in order
        ]
        values = tuple([each.tensor for each in order if isinstance(each.entry, Atom)])
        return Number(tuple(entries), values, self.host_reads.asked, self.host_reads.empty, meaning.nothing)

    def atom(
        self, x: Tensor, function: str, rows: Rows, count: Amount | None = None, divided: bool = True
    ) -> Aggregate:
        """A new mean with this count, or a sum, of these rows."""
        kind, selected, count = SUM if count is None else MEAN, rows.chosen is not None, 1.0 if count is None else count
        entry = Atom(kind, function, count, divided, selected, self.host_reads.asked, x.requires_grad)
        return Aggregate(entry, x, kind is SUM, x.requires_grad, version_of(x))

    # Python's numbers.

    def note_size(self, x: Tensor, rows: Rows) -> None:
        """Records that Python has read a size along the rows."""
        self.host_reads.sizes |= {len(x), x.numel()}
        if rows.chosen is not None:
            self.note_read(len(x), "the length of a selection")

    def note_read(self, value: Any, name: str) -> None:
        """Records that Python has read a value of the batch."""
        whole = not isinstance(value, (int, float)) or math.isfinite(value) and value == round(value)
        if whole:
            self.host_reads.whole_numbers |= {float(value) if isinstance(value, (int, float)) else 1.0}
        self.host_reads.values = self.host_reads.values or name

    def note_numbers(self, value: Any, block: str) -> bool:
        """Records the Python numbers that a block has returned, if its name is given; true if there are any."""
        if isinstance(value, (tuple, list, dict)):
            return any([self.note_numbers(x, block) for x in (value.values() if isinstance(value, dict) else value)])
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and block:
            self.note_read(value, block)
        return number

    def is_read(self, value: float) -> bool:
        """True for a number that may be computed from values that Python has read."""
        if not self.host_reads.values or value in self._given:
            return False
        return not _is_literal(value) or any([
            count and math.isclose(1 / value, round(1 / value)) and not round(1 / value) % count
            for count in self.host_reads.whole_numbers
        ])

    def may_count(self, *values: Any) -> bool:
        """True if one of the numbers may count rows; of others, such as tensors, it is false."""
        if not self.host_reads.sizes or self.rows < self.most:  # The largest microbatch decides.
            return False
        return any([isinstance(each, (int, float)) and each not in self._given and (
            self._divides(each) or self._divides(1 / each)) for each in values])

    def has_size(self, *values: Any) -> bool:
        """True if one of the numbers, or of their inverses, is a size itself; 0.1 is taken for a literal."""
        return self.rows == self.most and any([
            x in self.host_reads.sizes if isinstance(x, int) else bool(x) and not _is_literal(x) and any(
                [math.isclose(1 / x, size, rel_tol=1e-6) for size in self.host_reads.sizes])
            for x in values if isinstance(x, (int, float))
        ])

    def may_be_rows(self, x: Tensor, widest: int) -> bool:
        """True for a tensor that may repeat a number, or a vector of ``widest`` entries, for each row."""
        if not x.dim() or 1 == self.rows < self.most or len(x) % self.rows:
            return False
        return x.numel() > widest or self.most == 1 and bool(self.host_reads.sizes)

    def _divides(self, value: float) -> bool:
        nearest = round(abs(value)) if math.isfinite(value) else 0
        return nearest > 0 and not nearest % self.rows and math.isclose(nearest, abs(value), rel_tol=1e-6)


def hooked(x: Tensor) -> bool:
    """Whether a computed tensor has hooks for its gradient, which only those of the microbatch see."""
    return x.grad_fn is not None and bool(x._backward_hooks or x.retains_grad)


def _is_literal(value: float) -> bool:
    """True for a number with one digit besides zeros, such as 0.1."""
    return isinstance(value, float) and not value.is_integer() and value == float(f"{value:.1g}")


def _in_order(last: Aggregate) -> list[Aggregate]:
    """All of which a number was computed, each after its own."""
    order, seen, stack = list[Aggregate](), set[int](), [(last, False)]
    while stack:
        each, done = stack.pop()
        if done:
            order.append(each)
        elif id(each) not in seen:
            seen.add(id(each))
            of = [] if isinstance(each.entry, Atom) else each.entry.leaves()
            stack += [(each, True), *[(x, False) for x in of if isinstance(x, Aggregate)]]
    return order
