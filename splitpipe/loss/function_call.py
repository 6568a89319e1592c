"""A call of a function by the code of one microbatch, as the rules read it."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.ledger import GIVEN, MAY_COUNT, UNIFORM, VARIED, Constant, Ledger, Meaning, Rows
from splitpipe.loss.numbers import SCALING, Amount, Number, Unknown, amount, quotient, tensors


class FunctionCall:
    """The function's name, its arguments, and what they were before it ran; ``out``: what it has returned.

    ``total``, ``count``: what the mean of a loss of torch's is a quotient of, if they are known. ``counting``: whether
    a number of Python that may count rows is a factor.
    """

    out: Any = None
    total: Any = None
    count: Any = None
    counting: bool = False

    def __init__(self, ledger: Ledger, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for key in ("input", "tensors", "data", "other") if kwargs else ():  # torch.stack(tensors=...)
            if key in kwargs and (key == "other" or not args) and name != "where":  # Its condition comes first.
                args, kwargs = (*args, kwargs[key]), {k: x for k, x in kwargs.items() if k != key}
        self.ledger, self.name, self.args, self.kwargs = ledger, name, args, kwargs
        #: The tensors among the arguments.
        self.operands = tensors(args) + (tensors(kwargs.values()) if kwargs else [])
        self._of = {id(x): ledger.of(x) for x in self.operands}
        self.meanings = [*self._of.values()]  #: What they are.
        self.meaning = self.of(args[0]) if args else Unknown(name)  #: What the first argument is.
        self.kinds = {*map(type, self.meanings)}

    @cached_property
    def scalars(self) -> list[float]:
        """The numbers of Python or NumPy among the arguments."""
        return numbers_among((*self.args, *self.kwargs.values()))

    def of(self, x: Any) -> Meaning:
        """What an argument is."""
        return self._of.get(id(x), GIVEN)

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by its position or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def summed(self, rows: Rows) -> Number | Unknown:
        """The result, as a sum of these rows."""
        if self.counting:
            return MAY_COUNT
        return amount(self.name, self.out.clone(), selected=rows.selected, asked=self.ledger.asked)

    def averaged(self, rows: Rows, total: Tensor, count: Amount) -> Number:
        """The result, as a mean of these rows: a total by a count."""
        # It counts entries that a mask has made 0, too; but not targets that are ignored.
        facts: Any = {"selected": isinstance(count, Tensor) or rows.chosen is not None, "asked": self.ledger.asked}
        return quotient(amount(self.name, total, **facts), amount(self.name, count, **facts), self.out)

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
            if constants and all([each.uniform for _, each in constants]):
                return UNIFORM
            most = max([x.numel() for x, each in constants if each is GIVEN], default=0)
            single = self.ledger.most == 1  # Whose entries may be one for each row.
            plain = all([each is GIVEN or each.uniform and not (single and x.dim()) for x, each in constants])
            return GIVEN if plain and torch.Size(shape).numel() <= most else VARIED
        x, first = rows[0]
        dims, size = x.dim(), len(x) if x.dim() else 0  # Of a single row.
        if any([y.dim() != dims or dims and len(y) != size or not each.alike(first) for y, each in rows[1:]]):
            return None  # Rows meet other rows: x[:, None] - x[None].
        for y, constant in constants:
            if not constant.uniform and y.dim() >= max(1, dims):
                if not dims or len(y) > 1 and y.stride(0) or constant is not GIVEN and self.ledger.most == 1:
                    return None  # Entry k meets the k-th row of every microbatch.
        if len(shape) != dims or dims and shape[0] != size:
            return None
        masks = self.name in SCALING and any([each.selected for _, each in rows])
        selected = masks or first.chosen is not None or getattr(self.out, "dtype", None) is torch.bool
        return Rows(first.chosen, selected)


#: What a result of a call is; None: not recognised.
Rule = Callable[[FunctionCall], Meaning | None]
#: What a rule may raise for arguments that it doesn't know.
ODD = AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError


def numbers_among(values: Iterable[Any]) -> list[float]:
    """The numbers of Python or NumPy among values."""
    given = [x for x in values if not isinstance(x, Tensor)]
    each = [x.item() if getattr(x, "shape", None) == () and hasattr(x, "item") else x for x in given]  # Not a dtype.
    return [x for x in each if type(x) is not bool and isinstance(x, (int, float))]


def dims_of(x: Tensor, dims: Any) -> list[int]:
    """The dimensions that an argument names; None: all."""
    if dims is None or dims == () or dims == []:
        return [*range(x.dim())]
    return [dim % max(1, x.dim()) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])]
