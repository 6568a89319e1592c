"""Numbers of the batch: sums over its rows, and what is computed of these.

What code computes of sums is recorded, and computed again of those of the batch. A mean is a quotient: of a sum, and of
what it counts. A schedule wants what has the graph of a sum to be linear in sums (batch_loss).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.torch_private import DisableTorchFunction

#: Names of functions.
ADDING = frozenset("add radd iadd sub subtract isub rsub".split())
SCALING = frozenset("mul multiply rmul imul".split())
DIVIDING = frozenset("div divide true_divide truediv itruediv idiv rdiv rtruediv".split())
Amount = Tensor | float


@dataclass(eq=False)
class Formula:
    """A sum over rows; a constant, such as a penalty on weights; or a function of other formulas. Holds no graph."""

    name: str  #: Of the function that has made it.
    grad: bool  #: Whether it has a graph.
    function: Callable[..., Any] | None = None  #: None: it is a sum or a constant.
    args: Sequence[Any] = ()  #: With other formulas among them.
    kwargs: dict[str, Any] = field(default_factory=dict)
    constant: bool = False  #: Whether it is the same in each microbatch.
    asked: int = 0  #: Of a sum or constant: how many conditions Python had asked before.
    selected: bool = False  #: Of a sum: whether a mask has selected what is added up.
    nothing: bool = False  #: Whether it is 0 whatever the rows are.
    grows: bool = False  #: Whether it grows with the rows, as a sum over them does.
    live: bool = False  #: Whether it has the graph of a sum.
    linear: bool = True  #: Whether it is linear in such sums.


@dataclass(eq=False)
class Number:
    """A number of a microbatch.

    ``steps``: the formulas by which it is computed, in order, with the values of sums and constants.
    ``asked``: how many conditions Python had asked in the end. ``empty``: whether one has found that nothing counts.
    """

    steps: dict[Formula, Amount | None]
    asked: int = 0
    empty: bool = False

    @property
    def formula(self) -> Formula:
        """The last step."""
        return next(reversed(self.steps))

    @property
    def amounts(self) -> dict[Formula, Any]:
        """Its sums and constants."""
        return {x: value for x, value in self.steps.items() if x.function is None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Number:
        """The number with other tensors as its sums and constants."""
        return replace(self, steps={x: change(y) if isinstance(y, Tensor) else y for x, y in self.steps.items()})

    def evaluate(self, amounts: Sequence[Amount]) -> Any:
        """The number for other sums and constants."""
        rest, found = iter(amounts), dict[Formula, Any]()
        for step in self.steps:
            if step.function is None:
                found[step] = next(rest)
                continue
            args, kwargs = mapped(lambda x: found[x] if isinstance(x, Formula) else x, (step.args, step.kwargs))
            with DisableTorchFunction():
                out = step.function(*args, **kwargs)
                found[step] = out.detach() if isinstance(out, Tensor) and not step.grad else out
        return found[self.formula]

    def described(self, asked: bool) -> list[str]:
        """What has to be the same in all microbatches."""
        at = {step: k for k, step in enumerate(self.steps)}
        return [repr((x.name, x.grad, x.constant, asked and x.asked, x.selected, x.nothing, mapped(
            lambda y: f"step {at[y]}" if isinstance(y, Formula) else None if isinstance(y, Tensor) else y,
            (x.args, x.kwargs)))) for x in self.steps]


@dataclass(frozen=True)
class Unknown:
    """A tensor or number that isn't recognised; ``function``: where recognition ended, or the reason."""

    function: str


def amount(name: str, value: Amount, constant: bool = False, **facts: Any) -> Number:
    """A sum or a constant."""
    grad = isinstance(value, Tensor) and value.requires_grad
    varies = not constant
    return Number({Formula(name, grad, constant=constant, grows=varies, live=grad and varies, **facts): value})


def applied(name: str, function: Callable[..., Any], args: Any, kwargs: Any, grad: bool, **facts: Any) -> Number:
    """The result of a function with numbers among its arguments."""
    steps: dict[Formula, Amount | None] = {}

    def formula(x: Any) -> Any:
        steps.update(x.steps if isinstance(x, Number) else {})
        return x.formula if isinstance(x, Number) else x

    args, kwargs = mapped(formula, (args, kwargs))
    return Number({**steps, Formula(name, grad, function, args, kwargs, **facts): None})


def quotient(above: Number, count: Number, like: Tensor) -> Number:
    """A mean, with the type of a tensor."""
    return applied("div", partial(_divide, like.dtype), (above, count), {}, like.requires_grad, live=above.formula.live)


def _divide(dtype: torch.dtype, above: Tensor, count: Amount) -> Tensor:
    return (above / (count if isinstance(count, Tensor) or count else math.nan)).to(dtype)


def pair(above: Tensor, count: Amount, like: Tensor) -> Number:
    """A total by a count: the batch's number is the sum of all totals divided by that of all counts."""
    total = Formula("loss_fn", True)  # Alike in all microbatches, whether they have a graph or not.
    number = quotient(Number({total: above}), amount("loss_fn", count), like)
    number.formula.grad = True
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


def batch(each: Sequence[Number | Unknown]) -> tuple[Number, list[Amount]] | None:
    """How the batch's number is computed, and its sums and constants, added up with the graphs of the microbatches.

    None if one is Unknown, or if they were computed in different ways. A microbatch where nothing counts
    (``if mask.any():``) may have 0, if masks decide what counts in the others.
    """
    known = [number for number in each if isinstance(number, Number)]
    rest = [x for x in known if x.formula.nothing]
    some = [x for x in known if not x.formula.nothing] or known
    if len(known) < len(each):
        return None
    if len(some) < len(known):
        if not all([x.selected or x.constant for x in some[0].amounts]) or not all([x.empty for x in rest]):
            return None
    asked = len({x.asked for x in some}) == 1  # Else they have run other code.
    described = some[0].described(asked)
    if any([number.described(asked) != described for number in some[1:]]):
        return None
    columns = zip(some[0].amounts, *[number.amounts.values() for number in some])
    return some[0], [each[-1] if step.constant else _added(each) for step, *each in columns]


def _added(values: Sequence[Any]) -> Any:
    like = values[0]
    if not isinstance(like, Tensor):
        return sum(values)
    inexact = like.is_floating_point() or like.is_complex()
    wide = torch.promote_types(like.dtype, torch.float32) if inexact else like.dtype  # A sum overflows sooner.
    return torch.as_tensor(sum([x.to(like.device, wide) for x in values])).to(like.dtype)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A copy of the arguments of a function, which are nested in tuples, lists and dicts only, with them changed."""
    if type(value) in (tuple, list):
        return type(value)([mapped(change, x) for x in value])
    return {key: mapped(change, x) for key, x in value.items()} if type(value) is dict else change(value)


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nestings of tuples, lists and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += tensors(value.values() if isinstance(value, dict) else value)
    return found
