"""Numbers of the batch: sums over its rows, and what is computed of these.

What code computes of sums is recorded, and computed again of those of the batch. So any function of them is exact. A
mean is a quotient: of a sum, and of what it counts.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import map_leaves
from splitpipe.core.torch_private import DisableTorchFunction

#: Names of functions.
ADDING = frozenset("add radd iadd sub subtract isub rsub".split())
SCALING = frozenset("mul multiply rmul imul".split())
DIVIDING = frozenset("div divide true_divide truediv itruediv idiv rdiv rtruediv".split())
Amount = Tensor | float


@dataclass(eq=False)
class Quantity:
    """A call of a function with other quantities among its arguments; or, without a function, an atom.

    An atom is a sum over rows; or a constant, which is the same in each microbatch, such as a penalty on weights. What
    has the graph of a sum is linear in sums.
    """

    name: str  #: Of the function; or of the one that has made an atom.
    function: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    grad: bool = False  #: Whether it has a graph.
    grows: bool = False  #: Whether it grows with the rows, as a sum over them does.
    nothing: bool = False  #: Whether it is 0 whatever the rows are.
    constant: bool = False
    asked: int = 0  #: Of an atom: how many conditions Python had asked before.
    selected: bool = False  #: Of a sum: whether a mask has selected what is added up.
    operands: Sequence[Quantity] = ()  #: The quantities among its arguments.
    live: bool = False  #: Whether it has the graph of a sum.
    detached: bool = False  #: Whether it depends on such sums without their graph.


@dataclass(frozen=True, eq=False)
class Number:
    """How a number of a microbatch was computed: its quantities, each after its operands; the ``values`` of atoms.

    ``asked``: how many conditions Python had asked in the end; ``empty``: if one of them was that nothing counts.
    """

    quantities: tuple[Quantity, ...]
    values: tuple[Amount, ...]
    asked: int = 0
    empty: bool = False

    @property
    def atoms(self) -> list[Quantity]:
        """The sums and constants."""
        return [q for q in self.quantities if q.function is None]

    @property
    def nothing(self) -> bool:
        """Whether it is 0 whatever the rows are."""
        return self.quantities[-1].nothing

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Number:
        """The number with other tensors as the values of its atoms."""
        return replace(self, values=tuple([change(x) if isinstance(x, Tensor) else x for x in self.values]))

    def evaluate(self, values: Sequence[Amount]) -> Tensor:
        """The number for other values of its atoms."""
        found: dict[Any, Any] = dict(zip(self.atoms, values))
        with DisableTorchFunction():
            for q in self.quantities:
                if q.function is not None:
                    args, kwargs = map_leaves(lambda x: found[x] if isinstance(x, Quantity) else x, (
                        q.args, q.kwargs))
                    out = q.function(*args, **kwargs)
                    found[q] = out.detach() if isinstance(out, Tensor) and not q.grad else out
        return found[self.quantities[-1]]  # type: ignore[no-any-return]

    def facts(self, asked: bool) -> list[tuple[Any, ...]]:
        """What has to be the same in all microbatches; ``asked``: also how many conditions came before each atom."""
        places: dict[Any, int] = {q: place for place, q in enumerate(self.quantities)}
        return [(q.name, q.constant, q.grad, q.selected, q.asked * asked, repr(map_leaves(
            lambda x: places.get(x) if isinstance(x, (Quantity, Tensor)) else x, (q.args, q.kwargs))))
            for q in self.quantities]


@dataclass(frozen=True)
class Unknown:
    """A tensor or number that isn't recognised; ``function``: where recognition ended, or the reason."""

    function: str


def total(value: Tensor) -> Number:
    """A number that is a sum."""
    return Number((Quantity("loss_fn", grad=True),), (value,))


def pair(above: Tensor, count: Amount, like: Tensor) -> Number:
    """A total by a count: the batch's number is the sum of all totals divided by that of all counts."""
    atoms = Quantity("loss_fn", grad=True), Quantity("loss_fn")
    return Number((*atoms, replace(quotient(*atoms, like), grad=True)), (above, count))


def mean(value: Tensor, count: float) -> Number:
    """A number that is a mean of ``count`` values."""
    return pair(product(value, count), count, value)


def product(mean: Tensor, count: Amount) -> Tensor:
    """The total of a mean, in a type that doesn't overflow; that of nothing is 0, not 0 / 0."""
    total = mean.to(torch.promote_types(mean.dtype, torch.float32)) * count
    if not isinstance(count, Tensor) and count:  # In this order: the host must not wait for a tensor.
        return total
    return torch.where(torch.as_tensor(count == 0), 0, total)


def quotient(above: Quantity, count: Quantity, like: Tensor) -> Quantity:
    """A mean, with the type of a tensor."""
    args = above, count, like.dtype
    return Quantity("div", _divide, args, grad=like.requires_grad, operands=(above, count), live=above.live)


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
        if not all([x.selected or x.constant or not x.grad for x in some[0].atoms]) or not all([x.empty for x in rest]):
            return None
    asked = len({x.asked for x in some}) == 1  # Else they have run other code.
    facts = some[0].facts(asked)
    if any([x.facts(asked) != facts for x in some[1:]]):
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
