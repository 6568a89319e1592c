"""Numbers of microbatches, and how they become those of the batch: sums over rows, and what is computed of these.

What code computes of sums is recorded, and computed again of those of the batch. A mean is a quotient: of a sum, and of
what it counts.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import map_tensors
from splitpipe.core.torch_private import DisableTorchFunction

#: Names of functions.
ADDING = frozenset("add radd iadd sub subtract isub rsub".split())
SCALING = frozenset("mul multiply rmul imul".split())
DIVIDING = frozenset("div divide true_divide truediv itruediv idiv rdiv rtruediv".split())
Amount = Tensor | float
Reduce = Callable[[list[Tensor], list[int]], Tensor]
#: What a user can do about a loss of a schedule.
AS_PAIR = "let loss_fn return a pair (total, count), for the sum of totals divided by the sum of counts"


@dataclass(eq=False)
class Formula:
    """A sum over rows; a constant, such as a penalty on weights; or a function of other formulas. Holds no graph."""

    name: str  #: Of the function that has made it.
    grad: bool  #: Whether it has a graph.
    function: Callable[..., Any] | None = None  #: None: it is a sum or a constant.
    given: Any = ()  #: The function's args and kwargs, with other formulas among them.
    constant: bool = False  #: Whether it is the same in each microbatch.
    selected: bool = False  #: Of a sum: whether a mask has selected what is added up.
    nothing: bool = False  #: Whether it is 0 whatever the rows are.
    grows: bool = False  #: Whether it grows with the rows, as a sum over them does.
    detached: bool = False  #: Whether it leaves the graph of one that it is computed from.


@dataclass(eq=False)
class Number:
    """A number of a microbatch."""

    steps: dict[Formula, Amount | None]  #: How it is computed, in order, with the values of sums and constants.

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
        return Number({x: change(y) if isinstance(y, Tensor) else y for x, y in self.steps.items()})

    def evaluate(self, amounts: Sequence[Amount]) -> Any:
        """The number for other sums and constants."""
        rest, found = iter(amounts), dict[Formula, Any]()
        for step in self.steps:
            if step.function is None:
                found[step] = next(rest)
                continue
            args, kwargs = map_tensors(lambda x: found[x], step.given, Formula)
            with DisableTorchFunction():
                out = step.function(*args, **kwargs)
                found[step] = out.detach() if isinstance(out, Tensor) and not step.grad else out
        return found[self.formula]

    def described(self) -> list[str]:
        """What has to be the same in all microbatches."""
        at: dict[Any, str] = {step: f"step {k}" for k, step in enumerate(self.steps)}
        kinds = Formula, Tensor, torch.dtype
        return [repr((x.name, x.grad, x.constant, x.selected, x.nothing, map_tensors(at.get, x.given, kinds)))
                for x in self.steps]


@dataclass(frozen=True)
class Unknown:
    """A tensor or number that isn't recognised; ``function``: where recognition ended, or the reason."""

    function: str


#: A number of a call that wasn't traced, since earlier calls of its kind had returned none.
UNSEEN = Unknown("a block that returned no number before")


def amount(name: str, value: Amount, constant: bool = False, **facts: Any) -> Number:
    """A sum or a constant."""
    grad = isinstance(value, Tensor) and value.requires_grad
    return Number({Formula(name, grad, constant=constant, grows=not constant, **facts): value})


def quotient(
    total: Tensor, count: Amount, like: Tensor, name: str = "loss_fn", grad: bool = True, selected: bool = False
) -> Number:
    """A total by a count, with the type of a tensor: the batch's is the sum of totals by that of counts."""
    above, below = [Formula(name, has_graph, selected=selected, grows=True) for has_graph in (grad, False)]
    given = (above, below, like.dtype), dict[str, Any]()
    return Number({above: total, below: count, Formula("div", grad, lambda x, y, to: (x / y).to(to), given): None})


def mean(value: Tensor, count: Amount, *facts: Any) -> Number:
    """A number that is a mean of ``count`` values. ``facts``: of its sums; default: alike with a graph or without."""
    total = value.to(torch.promote_types(value.dtype, torch.float32)) * count  # In a type that doesn't overflow.
    if isinstance(count, Tensor) or not count:  # In this order: the host must not wait for a tensor.
        total = torch.where(torch.as_tensor(count == 0), 0, total)  # That of nothing is 0, not 0 / 0.
    return quotient(total, count, value, *facts)


def batch(each: Sequence[Number | Unknown]) -> tuple[Number, list[Amount]] | None:
    """How the batch's number is computed, and its sums and constants, added up with the graphs of the microbatches.

    None if one is Unknown, or if they differ. Where nothing counts (``if mask.any():``), 0 is none if masks decide.
    """
    known = [number for number in each if isinstance(number, Number)]
    some = [x for x in known if not x.formula.nothing] or known
    first, described = some[0] if some else None, {repr(x.described()) for x in some}
    if first is None or len(known) < len(each) or len(described) > 1:
        return None
    if len(some) < len(known) and not all([x.selected or x.constant for x in first.amounts]):
        return None
    columns = zip(first.amounts, *[number.amounts.values() for number in some])
    return first, [each[-1] if step.constant else _added(each) for step, *each in columns]


def _added(values: Sequence[Any]) -> Any:
    like = values[0]
    if not isinstance(like, Tensor):
        return sum(values)
    inexact = like.is_floating_point() or like.is_complex()
    wide = torch.promote_types(like.dtype, torch.float32) if inexact else like.dtype  # A sum overflows sooner.
    return torch.as_tensor(sum([x.to(like.device, wide) for x in values])).to(like.dtype)


def warn(said: set[str], function: str) -> None:
    """Warns that a number that isn't recognised is taken as a mean over rows; once for each function, not ``said``."""
    if function not in said:
        said.add(function)
        warnings.warn(
            f"the loss, or another number of the output, could not be traced beyond {function}: microbatches are "
            "averaged by their rows, which may differ from the value of the whole batch (see splitpipe.check). Pass "
            "reduction='mean' if that is right, reduction='sum' if it is a sum, or reduction= as a function; or "
            f"{AS_PAIR}. For a loss over the whole batch, compute it from model(x), without a schedule.",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Reducer:
    """Combines numbers of microbatches."""

    reduction: str | Reduce | None
    numbers: Sequence[Mapping[int, Number | Unknown]]  #: What each microbatch's consist of, by their identity.
    said: set[str]

    def reduces(self, column: Sequence[Any]) -> bool:
        """True for numbers that are combined into one, rather than joined; with dimensions, if the trace knows them."""
        if not all([isinstance(x, Tensor) for x in column]):
            return False
        return not any([x.dim() for x in column]) or self.reduction is None and bool(self.numbers) and all([
            isinstance(each.get(id(x)), Number) for x, each in zip(column, self.numbers)
        ])

    def reduced(self, column: Sequence[Tensor], rows: list[int]) -> Tensor:
        """The number of the batch."""
        like = column[0]
        values = [x.to(like.device) for x in column]  # If a microbatch skipped the last stages, it is elsewhere.
        if callable(self.reduction):
            return self.reduction(values, rows)
        if self.reduction == "sum":
            return torch.stack(values).sum()
        each = [known.get(id(x), UNSEEN) for x, known in zip(column, self.numbers)] if self.reduction is None else []
        found = batch(each)
        if found is None and not like.is_floating_point():
            raise ValueError(f"the output has a number of type {like.dtype}, which is different for every microbatch: "
                             "expected a floating-point number, a sum, or reduction= as a function.")
        if found is None and self.reduction is None:
            unknown = [x.function for x in each if isinstance(x, Unknown)]
            warn(self.said, [*unknown, "code that differs between microbatches"][0])
        number, totals = found or batch([mean(x, float(n)) for x, n in zip(values, rows)])  # type: ignore[misc]
        whole: Tensor = number.evaluate(totals).to(like.dtype)
        return whole if any([x.requires_grad for x in values]) else whole.detach()
