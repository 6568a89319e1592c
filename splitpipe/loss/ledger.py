"""What is known about the tensors and numbers with which one microbatch's code computes.

    a tensor is     if
    Rows            it has the rows of the batch, in order, along its first dimension
    Constant        it is the same for every microbatch, or made by the code: parameters, zeros, numbers of positions
    Number          its rows were added up, or it is computed of such numbers
    Unknown         it is anything else: the function where recognition ended

Numbers of Python don't show where they come from. Once Python has read a value of the batch, any may be computed from
it; once it has read a size along the rows, a multiple of the largest microbatch's rows, or the inverse of a multiple,
may count them (of the entries of what code makes, only a size that was read). All others are constants.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from splitpipe.core.tensors import tensors_in, version_of
from splitpipe.core.torch_private import DisableTorchFunction, tree_flatten
from splitpipe.loss.numbers import SCALING, Amount, Number, Unknown, amount, mean
from splitpipe.microbatch.tree import hidden

MAY_COUNT = Unknown("a number that may count rows")


@dataclass(frozen=True, eq=False)
class Rows:
    """It has the rows of the batch along its first dimension."""

    chosen: Tensor | None = None  #: The mask that has selected entries.
    selected: bool = False  #: Whether it is a mask, or one has selected entries or made them 0.
    counting: bool = False  #: Whether its sum, unlike its mean, may have a number of rows as a factor.

    def alike(self, other: Meaning) -> bool:
        """True for rows that the same mask has selected, or none."""
        x, y = self.chosen, other.chosen if isinstance(other, Rows) else self
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return x is y
        return x is y or x.shape == y.shape and x.device == y.device and x.equal(y)  # They have been waited for.


class Constant(Enum):
    """It is the same for every microbatch; or the code has made it, so that its size may be that of the rows."""

    GIVEN = "given"
    UNIFORM = "made, and all entries are the same"
    ZEROS = "made of zeros"
    VARIED = "made"
    POSITIONS = "torch.arange(n)"


GIVEN, UNIFORM, VARIED = Constant.GIVEN, (Constant.UNIFORM, Constant.ZEROS), Constant.VARIED
Meaning = Rows | Constant | Number | Unknown


class Ledger:
    """The meanings of the tensors of one microbatch, which has ``rows`` rows along ``dim``, followed only if that is 0.

    ``most``: the rows of the largest microbatch: if it has more than one, it shows what a single row can't.
    """

    def __init__(self, rows: int, most: int, dim: int) -> None:
        self.rows, self.most, self.dim = max(1, rows), most, dim
        self.given: set[float] = set()  #: Numbers among the call's arguments, the same for every microbatch.
        self._entries: dict[int, tuple[weakref.ref[Tensor], Meaning, bool, int | None]] = {}
        self.read = ""  #: The function by which Python has read values of the batch.
        self.sizes: set[int] = set()  #: What it has read of tensors with rows: lengths, and numbers of elements.

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
        return Unknown(x.grad_fn.name()) if isinstance(x.grad_fn, BackwardCFunction) else self.of_block(x, "")

    def of_block(self, x: Tensor, block: str) -> Meaning:
        """What a block, whose code isn't traced, has made: a value with rows, whatever it has computed it from."""
        if self.dim and x.dim():
            return Unknown(f"a batch along dimension {self.dim}")
        if x.dim() and (x.shape[0] == self.rows or x.dim() > 1 and not x.shape[0] % self.rows):
            return Rows()
        return Unknown(block or x.grad_fn.name() if x.grad_fn is not None else block)

    def begin(self, value: Any, dim: int, number: Meaning = GIVEN) -> None:
        """Records an argument, or an output, of a batch along this dimension, and what numbers in it are."""
        for x in hidden((value,)):
            if x.dim() and not isinstance(self.of(x), (Rows, Number)):
                other = 0 < dim < x.dim() and x.shape[dim] == self.rows
                self.put(x, Unknown(f"a batch along dimension {dim}") if other else Rows(None, x.dtype is torch.bool))
            elif id(x) not in self._entries and not x.dim():
                self.put(x, number)

    def begin_entries(self, value: Any) -> None:
        """Records a list, if it has one entry per row: its length, which no mode sees, may have been read."""
        if isinstance(value, (list, tuple)) and len(value) == self.rows:
            self.sizes.add(self.rows)
            self.note_numbers(value, "a list with one number per row")
            for x in hidden(value):
                self.put(x, Unknown("an entry of a list with one per row"))

    def link(self, x: Tensor, y: Tensor) -> None:
        """Records that a tensor is equal to another, for example on another device."""
        if id(x) in self._entries or x.grad_fn is not None:
            self.put(y, self.of(x))

    def number(self, x: Tensor) -> Number | Unknown | None:
        """What a tensor without rows consists of; None for one with rows."""
        with DisableTorchFunction():
            meaning = self.of(x)
            if isinstance(meaning, Constant) and not x.dim():
                nothing = meaning is not GIVEN and not x.requires_grad
                meaning = amount("a constant", x, constant=True, nothing=nothing)
        if isinstance(meaning, Number):
            return meaning
        return None if x.dim() else meaning if isinstance(meaning, Unknown) else Unknown("squeeze")

    def note_numbers(self, value: Any, block: str) -> bool:
        """Records the Python numbers that a block has returned; true if there are any."""
        found = any([type(x) in (int, float) for x in tree_flatten(value)[0]])
        self.read = self.read or block if found else self.read
        return found

    def note_size(self, x: Tensor, rows: Rows) -> None:
        """Records that Python has read a size along the rows of a tensor."""
        self.sizes |= {len(x), x.numel()}
        if rows.chosen is not None:
            self.read = self.read or "the length of a selection"

    def may_count(self, values: Iterable[Any], size: bool = False) -> bool:
        """True if one of the numbers, or its inverse, is a multiple of the rows; if ``size``: a size that was read."""
        if not self.sizes or self.rows < self.most:  # The largest microbatch decides.
            return False
        either = [y for x in self.variable(values) if x and math.isfinite(x) for y in (abs(x), abs(1 / x))]
        found = [round(x) for x in either if round(x) and math.isclose(round(x), x, rel_tol=1e-6)]
        return any([n in self.sizes if size else not n % self.rows for n in found])

    def variable(self, values: Iterable[Any]) -> list[float]:
        """Those numbers that may differ between microbatches."""
        return [x for x in values if isinstance(x, (int, float)) and (x and x not in self.given or x in self.sizes)]


class FunctionCall:
    """The function's name, its arguments, and what they were before it ran; ``out``: what it has returned."""

    def __init__(self, ledger: Ledger, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any = None) -> None:
        self.ledger, self.name, self.args, self.kwargs = ledger, name, args, kwargs
        self.out, self.counting = out, False  #: Whether a number of Python that may count rows is a factor.
        #: The tensors among the arguments.
        self.operands = tensors_in((*args, *kwargs.values()))
        self._of = {id(x): ledger.of(x) for x in self.operands}
        self.meanings = [*self._of.values()]  #: What they are.
        self.meaning = self.of(args[0]) if args else Unknown(name)  #: What the first argument is.
        self.kinds = {*map(type, self.meanings)}

    @cached_property
    def scalars(self) -> list[float]:
        """The numbers of Python or NumPy among the arguments."""
        return scalars_in((*self.args, *self.kwargs.values()))

    def of(self, x: Any) -> Meaning:
        """What an argument is."""
        return self._of.get(id(x), GIVEN)

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by its position or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def added(self, rows: Rows, count: Amount | None = None) -> Number | Unknown:
        """The result, as a sum of these rows or of their entries, or as a mean with this count."""
        if count is None:
            return MAY_COUNT if self.counting else amount(self.name, self.out.clone(), selected=rows.selected)
        # It counts entries that a mask has made 0, too; but not targets that are ignored.
        selected = isinstance(count, Tensor) or rows.chosen is not None
        return mean(self.out, count, self.name, self.out.requires_grad, selected)

    def joined(
        self, operands: Sequence[Any] | None = None, shape: Sequence[int] | None = None
    ) -> Rows | Constant | None:
        """The result of an elementwise function of operands, with this shape; None: not recognised."""
        operands, shape = operands or self.operands, self.out.shape if shape is None else shape
        pairs = [(x, self.of(x)) for x in operands]
        rows = [(x, each) for x, each in pairs if isinstance(each, Rows)]
        constants = [(x, each) for x, each in pairs if isinstance(each, Constant)]
        if len(rows) + len(constants) < len(pairs):
            return None
        if not rows:
            return GIVEN if all([each is GIVEN or each in UNIFORM and not x.dim() for x, each in constants]) else VARIED
        x, first = rows[0]
        if any([y.dim() != x.dim() or y.shape[:1] != x.shape[:1] or not each.alike(first) for y, each in rows[1:]]):
            return None  # Rows meet other rows: x[:, None] - x[None].
        for y, constant in constants:
            if constant not in UNIFORM and y.dim() >= max(1, x.dim()):
                if not x.dim() or len(y) > 1 and y.stride(0) or constant is not GIVEN and self.ledger.most == 1:
                    return None  # Entry k meets the k-th row of every microbatch.
        if len(shape) != x.dim() or shape[:1] != x.shape[:1]:
            return None
        masks = self.name in SCALING and any([each.selected for _, each in rows])
        selected = masks or first.chosen is not None or getattr(self.out, "dtype", None) is torch.bool
        return Rows(first.chosen, selected)


def scalars_in(values: Iterable[Any]) -> list[float]:
    """The numbers of Python or NumPy among values."""
    given = [x for x in values if not isinstance(x, Tensor)]
    each = [x.item() if getattr(x, "shape", None) == () and hasattr(x, "item") else x for x in given]  # Not a dtype.
    return [x for x in each if type(x) is not bool and isinstance(x, (int, float))]
