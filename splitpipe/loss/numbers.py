"""Numbers of the batch: sums over its rows, and what is computed of these.

What code computes of sums is recorded, and computed again of those of the batch. A mean is a quotient: of a sum, and of
what it counts. What has the graph of a sum is linear in sums; what has none, such as a count, may be any function.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitpipe.core.tensors import map_leaves
from splitpipe.core.torch_private import DisableTorchFunction

#: Names of functions.
ADDING = frozenset("add radd iadd sub subtract isub rsub".split())
SCALING = frozenset("mul multiply rmul imul".split())
DIVIDING = frozenset("div divide true_divide truediv itruediv idiv rdiv rtruediv".split())
Amount = Tensor | float


class Atom(NamedTuple):
    """A sum over rows; or a constant, which is the same in each microbatch, such as a penalty on weights."""

    name: str  #: Of the function that has made it.
    grad: bool  #: Whether it has a graph.
    constant: bool = False
    asked: int = 0  #: How many conditions Python had asked before.
    selected: bool = False  #: Of a sum: whether a mask has selected what is added up.
    nothing: bool = False  #: Whether it is 0 whatever the rows are.


@dataclass(eq=False)
class Formula:
    """How a number is computed of its atoms: by a function, with other formulas among its arguments, or not at all."""

    name: str  #: Of the function.
    function: Callable[..., Any] | None
    args: Sequence[Any]
    kwargs: dict[str, Any]
    grad: bool  #: Whether the result has a graph.
    atoms: int  #: The number of its atoms.

    def evaluate(self, values: Sequence[Amount]) -> Any:
        """The number for these values of its atoms."""
        if self.function is None:
            return values[0]
        rest = iter(values)
        args, kwargs = map_leaves(
            lambda x: x.evaluate([*islice(rest, x.atoms)]) if isinstance(x, Formula) else x, (self.args, self.kwargs))
        with DisableTorchFunction():
            out = self.function(*args, **kwargs)
            return out.detach() if isinstance(out, Tensor) and not self.grad else out

    def described(self) -> str:
        """What has to be the same in all microbatches."""
        return repr((self.name, self.grad, map_leaves(
            lambda x: x.described() if isinstance(x, Formula) else None if isinstance(x, Tensor) else x,
            (self.args, self.kwargs))))


_ATOM = Formula("", None, (), {}, False, 1)


@dataclass(eq=False)
class Number:
    """A number of a microbatch.

    ``asked``: how many conditions Python had asked in the end; ``empty``: if one of them was that nothing counts.
    """

    atoms: tuple[Atom, ...]
    values: tuple[Amount, ...]  #: Of its atoms.
    formula: Formula = _ATOM
    grows: bool = False  #: Whether it grows with the rows, as a sum over them does.
    nothing: bool = False  #: Whether it is 0 whatever the rows are.
    live: bool = False  #: Whether it has the graph of a sum.
    detached: bool = False  #: Whether it depends on such sums without their graph.
    asked: int = 0
    empty: bool = False

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Number:
        """The number with other tensors as the values of its atoms."""
        return replace(self, values=tuple([change(x) if isinstance(x, Tensor) else x for x in self.values]))


@dataclass(frozen=True)
class Unknown:
    """A tensor or number that isn't recognised; ``function``: where recognition ended, or the reason."""

    function: str


def atom(name: str, value: Amount, constant: bool = False, nothing: bool = False, **facts: Any) -> Number:
    """An atom, as a number."""
    grad = isinstance(value, Tensor) and value.requires_grad
    own = Atom(name, grad, constant, nothing=nothing, **facts)
    return Number((own,), (value,), grows=not constant, nothing=nothing, live=grad and not constant)


def pair(above: Tensor, count: Amount, like: Tensor) -> Number:
    """A total by a count: the batch's number is the sum of all totals divided by that of all counts."""
    number = quotient(Number((Atom("loss_fn", True),), (above,)), Number((Atom("loss_fn", False),), (count,)), like)
    number.formula.grad = True  # Alike in all microbatches, whether they have a graph or not.
    return number


def mean(value: Tensor, count: float) -> Number:
    """A number that is a mean of ``count`` values."""
    return pair(product(value, count), count, value)


def product(mean: Tensor, count: Amount) -> Tensor:
    """The total of a mean, in a type that doesn't overflow; that of nothing is 0, not 0 / 0."""
    total = mean.to(torch.promote_types(mean.dtype, torch.float32)) * count
    if not isinstance(count, Tensor) and count:  # In this order: the host must not wait for a tensor.
        return total
    return torch.where(torch.as_tensor(count == 0), 0, total)


def applied(
    name: str, function: Callable[..., Any], args: Any, kwargs: Any, operands: Sequence[Number], grad: bool,
    **facts: Any
) -> Number:
    """The result of a call with the formulas of numbers, its operands, among its arguments, in their order."""
    atoms, values = [y for x in operands for y in x.atoms], [y for x in operands for y in x.values]
    return Number(tuple(atoms), tuple(values), Formula(name, function, args, kwargs, grad, len(atoms)), **facts)


def quotient(above: Number, count: Number, like: Tensor) -> Number:
    """A mean, with the type of a tensor."""
    args = above.formula, count.formula, like.dtype
    return applied("div", _divide, args, {}, (above, count), like.requires_grad, live=above.live)


def _divide(above: Tensor, count: Amount, dtype: torch.dtype) -> Tensor:
    return (above / (count if isinstance(count, Tensor) or count else math.nan)).to(dtype)


def batch(each: Sequence[Number | Unknown]) -> tuple[Number, list[Amount]] | None:
    """The number of the batch, with the graphs of the microbatches': how it is computed, and its values of atoms.

    None if one is Unknown, or if they were computed in different ways. A microbatch where nothing counts
    (``if mask.any():``) may have 0, if masks decide what counts in the others.
    """
    known = [number for number in each if isinstance(number, Number)]
    some, rest = [x for x in known if not x.nothing] or known, [x for x in known if x.nothing]
    if len(known) < len(each):
        return None
    if len(some) < len(known):
        if not all([x.selected or x.constant for x in some[0].atoms]) or not all([x.empty for x in rest]):
            return None
    asked = len({x.asked for x in some}) == 1  # Else they have run other code.
    facts = [(x.formula.described(), [atom if asked else atom._replace(asked=0) for atom in x.atoms]) for x in some]
    if any([each != facts[0] for each in facts]):
        return None
    columns = zip(some[0].atoms, *[number.values for number in some])
    return some[0], [each[-1] if atom.constant else _added(each) for atom, *each in columns]


def _added(values: Sequence[Any]) -> Any:
    like = values[0]
    if not isinstance(like, Tensor):
        return sum(values)
    inexact = like.is_floating_point() or like.is_complex()
    wide = torch.promote_types(like.dtype, torch.float32) if inexact else like.dtype  # A sum overflows sooner.
    return torch.as_tensor(sum([x.to(like.device, wide) for x in values])).to(like.dtype)


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nestings of tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())
