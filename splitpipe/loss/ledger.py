"""What is known about the tensors and numbers with which one microbatch's code computes.

    a tensor is     if
    Rows            it has the rows of the batch, in order, along its first dimension
    Turned          it has them along its second one, as ctc_loss wants
    Constant        it is the same for every microbatch, or made by the code: parameters, zeros, numbers of positions
    Number          its rows were added up: a sum, a mean, and sums, multiples and quotients of these
    Stack           it is several numbers: torch.stack([one, other])
    Quotient        it is a constant divided by a count, 1 / mask.sum(); or the count, mask.sum().clamp(min=1)
    Unknown         it is anything else: the function where recognition ended
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from splitpipe.core.tensors import storage_of, version_of
from splitpipe.loss.terms import CONSTANT, Amount, Count, Number, Term, Unknown

MAY_COUNT = "a number that may count rows"


@dataclass(frozen=True, eq=False)
class Rows:
    """``chosen``: the mask that has selected entries. ``share``: the count that has divided it.

    ``doubt``: whether a number that may count rows has divided it, which matters to sums (1), or to means, too (2).
    """

    chosen: Tensor | None = None
    share: Count | None = None
    doubt: int = 0

    def alike(self, other: Rows) -> bool:
        """True if the same mask has selected both, or none. Selecting by it has waited for the device already."""
        x, y = self.chosen, other.chosen
        return x is y or x is not None and y is not None and (
            x.shape == y.shape and x.device == y.device and torch.equal(x, y))


@dataclass(frozen=True, eq=False)
class Turned:
    rows: Rows


@dataclass(frozen=True)
class Constant:
    """``made``: by the code: ``uniform`` (all are ``value``, if known), torch.arange(``positions``), or other."""

    made: bool = False
    uniform: bool = False
    value: float | None = None
    positions: int | None = None


@dataclass(frozen=True, eq=False)
class Stack:
    numbers: tuple[Number, ...]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Stack:
        """With other tensors as values."""
        return Stack(tuple([number.mapped(change) for number in self.numbers]))


@dataclass(frozen=True, eq=False)
class Quotient:
    """``above``: None for the count itself."""

    above: float | None
    count: Count


Meaning = Rows | Turned | Constant | Number | Stack | Quotient | Unknown
GIVEN, UNIFORM, VARIED = Constant(), Constant(True, True), Constant(True)


@dataclass
class HostReads:
    """What Python has read from the batch, of which later numbers may be made."""

    sizes: frozenset[int] = frozenset()  #: Sizes along the rows, and their products with others.
    values: str = ""  #: The function by which it has read values.
    counts: frozenset[float] = frozenset()  #: Whole numbers among these.
    asked: int = 0  #: How many conditions it has asked,
    empty: bool = False  #: and whether one of them was that nothing counts.


class Ledger:
    """The meanings of the tensors of one microbatch, which has ``rows`` rows along dimension ``dim``.

    Along another dimension than the first one, they aren't followed.
    ``most``: the rows of the largest microbatch: if it has more than one, it shows what a single row can't.
    ``given``: numbers among the call's arguments, which are the same for every microbatch.
    """

    def __init__(self, rows: int, most: int, dim: int = 0, given: Iterable[float] = ()) -> None:
        self.rows, self.most, self._dim, self._given = max(1, rows), most, dim, frozenset(given)
        self._entries: dict[int, tuple[weakref.ref[Tensor], Meaning, bool, int | None]] = {}
        self._mixed: set[int] = set()  # Storages in which rows may have been mixed.
        self.reading = HostReads()

    def put(self, x: Tensor, meaning: Meaning) -> None:
        """Records what a tensor is."""
        if isinstance(meaning, (Number, Stack)) and not x.requires_grad:  # Detached, or made without grad mode.
            meaning = meaning.mapped(lambda y: y.detach() if y.requires_grad else y)
        self._entries[id(x)] = weakref.ref(x), meaning, x.grad_fn is not None, version_of(x)

    def of(self, x: Any) -> Meaning:
        """What a value is."""
        if not isinstance(x, Tensor):
            return GIVEN
        entry = self._entries.get(id(x))
        if entry is not None and entry[0]() is x:
            if entry[3] != version_of(x) and (not isinstance(entry[1], Rows) or storage_of(x) in self._mixed):
                return Unknown("an in-place function")
            if entry[2] or not isinstance(x.grad_fn, BackwardCFunction):
                return entry[1]  # Otherwise, an autograd function has made it, whose graph isn't traced.
        if x.grad_fn is None:  # torch.Tensor([n]), from NumPy: made where no mode sees it.
            return Unknown(self.reading.values) if self.reading.values and not isinstance(x, Parameter) else GIVEN
        return Unknown(x.grad_fn.name()) if isinstance(x.grad_fn, BackwardCFunction) else self._of_block(x, "")

    def note_write(self, x: Tensor) -> None:
        """Records that code has written to a tensor, maybe a view of others: these may not have separate rows then."""
        meaning = self.of(x)
        if not isinstance(meaning, Rows) or meaning.share or meaning.doubt:
            self._mixed.add(storage_of(x))

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
            if x.dim() and not isinstance(self.of(x), (Rows, Number)):
                first = not 0 < dim < x.dim() or x.shape[dim] != self.rows
                self.put(x, Rows() if first else Unknown(f"a batch along dimension {dim}"))
            elif id(x) not in self._entries and not x.dim():
                self.put(x, GIVEN)

    def begin_entries(self, value: Any) -> None:
        """Records a list with one entry per row, of which Python knows the length."""
        self.reading.sizes |= {self.rows}
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
        if x.dim() and not isinstance(meaning, Number):
            return None
        if isinstance(meaning, Constant):
            meaning = Number((self.term(x, CONSTANT, function="a constant"),))
        if not isinstance(meaning, Number):
            return meaning if isinstance(meaning, Unknown) else Unknown("squeeze")
        if any(t.version not in (None, version_of(t.value)) for t in meaning.terms if isinstance(t.value, Tensor)):
            return Unknown("an in-place function")
        if x.grad_fn is not None and (x._backward_hooks or x.retains_grad):
            return Unknown("a hook of the number")
        return replace(meaning, asked=self.reading.asked, empty=self.reading.empty)

    def term(self, value: Amount, kind: str, count: Count | None = None, function: str = "", of: Any = None) -> Term:
        """A new term; ``of``: the rows of which it is made."""
        selected = isinstance(of, Rows) and of.chosen is not None
        version = version_of(value) if isinstance(value, Tensor) else None
        return Term(value, kind, count, 1.0, function, selected, self.reading.asked, version=version)

    def joined(self, operands: Sequence[Any], shape: Sequence[int]) -> Rows | Constant | None:
        """The result, of this shape, of a function of entries that broadcasting brings together; None: unknown."""
        meanings = [UNIFORM if isinstance(each, Number) and not each.terms else each for each in map(self.of, operands)]
        rows = [(x, each) for x, each in zip(operands, meanings) if isinstance(each, Rows)]
        constants = [(x, each) for x, each in zip(operands, meanings) if isinstance(each, Constant)]
        if len(rows) + len(constants) < len(operands):
            return None
        if not rows:
            if constants and all(each.uniform for _, each in constants):
                return UNIFORM
            return VARIED if any(each.made and not each.uniform for _, each in constants) else GIVEN
        x, first = rows[0]
        if not x.dim():  # Of a single row.
            return first if all(not y.dim() for y in operands) else None
        for y, each in rows:
            if y.dim() != x.dim() or len(y) != len(x) or not each.alike(first):
                return None  # Rows meet other rows: x[:, None] - x[None].
        for y, constant in constants:
            if y.dim() >= x.dim() and not constant.uniform:
                if len(y) > 1 and y.stride(0) or constant.made and self.most == 1:
                    return None  # Numbers of positions begin again in each microbatch.
        shares = [each.share for _, each in rows if each.share is not None]
        if len(shape) != x.dim() or shape[0] != len(x) or len(shares) > 1:
            return None
        return replace(first, share=next(iter(shares), None), doubt=max(each.doubt for _, each in rows))

    # Python's numbers.

    def note_size(self, x: Tensor, rows: Rows) -> None:
        """Records that Python has read the size along the rows, and others of the tensor."""
        if rows.chosen is not None:
            self.note_read(len(x), "the length of a selection")
            return
        sizes = {len(x)}
        for size in x.shape[1:5]:
            sizes |= {size * each for each in sizes}
        self.reading.sizes |= sizes

    def note_read(self, value: Any, name: str) -> None:
        """Records that Python has read a value of the batch."""
        self.reading.values = self.reading.values or name
        if not isinstance(value, (int, float)):
            self.reading.counts |= {0.0}  # Python may count its entries.
        elif math.isfinite(value) and value == round(value):
            self.reading.counts |= {abs(float(value))}

    def note_numbers(self, value: Any, block: str) -> bool:
        """Records the Python numbers that a block has returned, if its name is given; true if there are any."""
        if isinstance(value, (tuple, list, dict)):
            return any([self.note_numbers(x, block) for x in (value.values() if isinstance(value, dict) else value)])
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and block:
            self.note_read(value, block)
        return number

    def may_be_read(self, value: float) -> bool:
        """True for a number that Python may have computed from values of the batch that it has read."""
        size, reading = abs(float(value)), self.reading
        if not reading.values or value in self._given or not size or not math.isfinite(size):
            return False
        near, whole = _whole_numbers(size), size.is_integer()
        return not whole and not _is_short(size) or bool(near and reading.counts) and (
            whole or any(read > 1 and not each % read for read in reading.counts for each in near))

    def doubt(self, value: float) -> int:
        """0 for a constant; 1 for what may count rows if it divides a sum, 2 if it divides a mean, too.

        A number is a constant unless sizes along the rows were read and it, or its inverse, is a multiple of the rows;
        a mean is only taken to be divided by sizes themselves.
        """
        size, sizes = abs(float(value)), self.reading.sizes
        if value in self._given or not size or not math.isfinite(size) or not sizes or 1 == self.rows < self.most:
            return 0
        counts = [each for each in _whole_numbers(size) if not each % self.rows]
        literal = isinstance(value, float) and _is_short(size)
        return (1 if literal or not sizes.intersection(counts) else 2) if counts else 0


def _whole_numbers(size: float) -> list[int]:
    """The size or its inverse, as whole numbers, if they are."""
    return [round(x) for x in (size, 1 / size) if x > 0.5 and math.isclose(x, round(x), rel_tol=1e-6)]


def _is_short(value: float) -> bool:
    """True for a number with one or two digits besides zeros."""
    return math.isclose(float(f"{value:.2g}"), value, rel_tol=1e-12)


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nestings of tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())
