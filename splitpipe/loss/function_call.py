"""A call of a function by the code of one microbatch, as the rules read it."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import tensors_in
from splitpipe.loss.ledger import GIVEN, UNIFORM, VARIED, Constant, Ledger, Meaning, Rows
from splitpipe.loss.numbers import SCALING, Amount, Number, Unknown, amount, mean


class FunctionCall:
    """The function's name, its arguments, and what they were before it ran; ``out``: what it has returned."""

    def __init__(self, ledger: Ledger, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any = None) -> None:
        self.ledger, self.name, self.args, self.kwargs, self.out = ledger, name, args, kwargs, out
        #: The tensors among the arguments.
        self.operands = tensors_in((*args, *kwargs.values()))
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

    def added(self, rows: Rows, count: Amount | None = None) -> Number:
        """The result, as a sum of these rows or of their entries, or as a mean with this count."""
        if count is None:
            return amount(self.name, self.out.clone(), selected=rows.selected)
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
            return GIVEN if all([each is GIVEN or each is UNIFORM and not x.dim() for x, each in constants]) else VARIED
        x, first = rows[0]
        if any([y.dim() != x.dim() or y.shape[:1] != x.shape[:1] or not each.alike(first) for y, each in rows[1:]]):
            return None  # Rows meet other rows: x[:, None] - x[None].
        for y, constant in constants:
            if constant is not UNIFORM and y.dim() >= max(1, x.dim()):
                if not x.dim() or len(y) > 1 and y.stride(0) or constant is not GIVEN and self.ledger.most == 1:
                    return None  # Entry k meets the k-th row of every microbatch.
        if len(shape) != x.dim() or shape[:1] != x.shape[:1]:
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
