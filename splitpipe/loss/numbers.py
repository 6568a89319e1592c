"""Numbers of the batch: sums and means over its rows, and what is computed of these.

    atom        in a microbatch       in the batch
    SUM         total_i               the sum of all
    MEAN        value_i of count_i    the mean of all, weighted by counts
    CONSTANT    the same in each      that of one of them: a penalty on weights, for example

What code computes of sums and means is recorded step by step, and computed again of those of the batch. So any function
of them is exact: quotients, as of a masked sum and a count, roots, minima.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitpipe.core.torch_private import DisableTorchFunction

SUM, MEAN, CONSTANT = "sum", "mean", "constant"
#: Names of functions.
ADDING = frozenset("add radd iadd sub subtract isub rsub".split())
SCALING = frozenset("mul multiply rmul imul".split())
DIVIDING = frozenset("div divide true_divide truediv itruediv idiv rdiv rtruediv".split())
Amount = Tensor | float


@dataclass(frozen=True, eq=False)
class Atom:
    """A sum, a mean or a constant, made by ``function``."""

    kind: str
    function: str = ""
    count: Amount = 1.0  #: Of a mean.
    divided: bool = True  #: Whether the value of a mean is its quotient, not its total.
    selected: bool = False  #: Whether a mask has selected what counts.
    asked: int = 0  #: How many conditions Python had asked before.
    grad: bool = False
    unknown: bool = False  #: Whether it isn't recognised, and is taken as a mean over rows.


class Ref(NamedTuple):
    """The place of a number among those computed before."""

    place: int


@dataclass(frozen=True, eq=False)
class Instruction:
    """A call of a function, with numbers among its arguments."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    in_place: bool  #: Whether it writes to its first argument, which is the result then.
    grad: bool  #: Whether the result has a graph.
    which: int  #: Which of the tensors in its result.

    def changed(self, change: Callable[[Any], Any]) -> Instruction:
        """The same with other arguments."""
        return replace(self, args=mapped(self.args, change), kwargs=mapped(self.kwargs, change))

    def leaves(self) -> list[Any]:
        """All values among its arguments."""
        found: list[Any] = []
        self.changed(found.append)
        return found

    def run(self) -> Tensor:
        """The result."""
        args = (self.args[0].clone(), *self.args[1:]) if self.in_place else self.args
        out = self.function(*args, **self.kwargs)
        found: Tensor = args[0] if self.in_place else [*tensors((out,))][self.which]
        return found if self.grad else found.detach()


@dataclass(frozen=True, eq=False)
class Number:
    """How a number of a microbatch was computed, and the ``values`` of its atoms.

    ``asked``: how many conditions Python had asked in the end; ``empty``: if one of them was that nothing counts.
    ``nothing``: whether it is 0 whatever the rows are.
    """

    entries: tuple[Atom | Instruction, ...]
    values: tuple[Tensor, ...]
    asked: int = 0
    empty: bool = False
    nothing: bool = False

    @property
    def atoms(self) -> list[Atom]:
        """The sums, means and constants."""
        return [entry for entry in self.entries if isinstance(entry, Atom)]

    @property
    def unknown(self) -> str:
        """The function where recognition of an addend ended; empty if all is recognised."""
        return next((atom.function for atom in self.atoms if atom.unknown), "")

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Number:
        """The number with other tensors as the values of its atoms."""
        return replace(self, values=tuple(map(change, self.values)))

    def evaluate(self, values: Sequence[Tensor]) -> Tensor:
        """The number for other values of its atoms."""
        given, found = iter(values), list[Tensor]()
        with DisableTorchFunction():
            for entry in self.entries:
                found.append(next(given) if isinstance(entry, Atom) else entry.changed(
                    lambda x: found[x.place] if isinstance(x, Ref) else x).run())
        return found[-1]


@dataclass(frozen=True)
class Unknown:
    """It isn't recognised beyond ``function``, or for the reason that this says."""

    function: str


def unknown_function(number: Number | Unknown) -> str:
    """The function where recognition of a number, or of an addend, ended; empty if all of it is recognised."""
    return number.function if isinstance(number, Unknown) else number.unknown


def simple(value: Tensor, kind: str, count: Amount = 1.0, divided: bool = True) -> Number:
    """A number that is a sum, or a mean, itself."""
    return Number((Atom(kind, "loss_fn", count, divided, grad=value.requires_grad),), (value,))


def combined(numbers: Sequence[Number]) -> Tensor | None:
    """The number of the batch, with the graphs of the microbatches'; None if they were computed in different ways."""
    same = aligned(numbers)
    return computed(same) if same else None


def computed(same: Sequence[Number]) -> Tensor:
    """The number of the batch, of which these were computed in the same way."""
    columns = [[number.values[k] for number in same] for k in range(len(same[0].values))]
    atoms = [[number.atoms[k] for number in same] for k in range(len(columns))]
    return same[0].evaluate([whole(own, column) for own, column in zip(atoms, columns)])


def aligned(numbers: Sequence[Number]) -> list[Number]:
    """Those of which the batch's is computed; none if they were computed in different ways.

    A microbatch where nothing counts (``if mask.any():``) may have 0, if masks decide what counts in the others.
    """
    some = [number for number in numbers if not number.nothing] or [*numbers]
    first, rest = some[0], [number for number in numbers if number.nothing]
    if len(some) < len(numbers):
        counted = all([atom.selected for atom in first.atoms if atom.kind is not CONSTANT]) or any([
            isinstance(entry.count, Tensor) if isinstance(entry, Atom) else
            entry.name in DIVIDING and isinstance(entry.args[-1], Ref) and not first.entries[entry.args[-1].place].grad
            for entry in first.entries
        ])
        if not counted or not all([number.empty for number in rest]):
            return []
    other = len({number.asked for number in some}) > 1  # They have run other code.
    facts = [[_facts(entry, other) for entry in number.entries] for number in some]
    return some if all([each == facts[0] for each in facts]) else []


def _facts(entry: Atom | Instruction, other: bool) -> tuple[Any, ...]:
    """What has to be the same in all microbatches."""
    if isinstance(entry, Atom):
        return entry.kind, entry.function, entry.selected, entry.asked * (not other), isinstance(entry.count, Tensor)
    given = entry.changed(lambda x: None if isinstance(x, Tensor) else x)
    return entry.name, entry.in_place, entry.which, repr(given.args), repr(given.kwargs)


def whole(atoms: Sequence[Atom], values: Sequence[Tensor]) -> Tensor:
    """The value of an atom for the batch."""
    kind, like = atoms[0].kind, values[0]
    if kind is CONSTANT:
        return values[-1]
    if not like.is_floating_point() and not like.is_complex():
        return torch.stack([x.to(like.device) for x in values]).sum(0, dtype=like.dtype)
    each: list[Any] = [x.to(like.device, wide(like)) for x in values]  # A sum overflows sooner.
    count: Any = 1.0
    if kind is MEAN:
        weights = [as_amount(atom.count, like) for atom in atoms]
        count = sum(weights)
        each = [weighted(x, weight) for x, weight in zip(each, weights)] if atoms[0].divided else each
    total: Any = sum(each)
    return torch.as_tensor(total / (count if isinstance(count, Tensor) or count else math.nan)).to(like.dtype)


def weighted(x: Tensor, weight: Any, whole: Any = 1.0) -> Tensor:
    """A mean times its share of the whole weight; 0 / 0 has no part in the batch."""
    if isinstance(weight, Tensor) or not weight:
        x = torch.where(~x.isfinite() & (weight == 0), 0, x)
    return x.mul(weight / whole)


def as_amount(amount: Amount, like: Tensor) -> Amount:
    """An amount on a value's device, in a type for quotients."""
    return amount.detach().to(like.device, wide(like)) if isinstance(amount, Tensor) else amount


def wide(x: Tensor) -> torch.dtype:
    """A type for sums and quotients."""
    whole = not x.is_floating_point() and not x.is_complex()
    return torch.float64 if whole else torch.promote_types(x.dtype, torch.float32)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nestings of tuples, lists and dicts with other leaves."""
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, Ref):
        each = [mapped(x, change) for x in value]
        return tuple(each) if isinstance(value, tuple) else each
    return change(value)


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nestings of tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())
