"""A call of a function by the code of one microbatch, as the rules read it."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from splitpipe.loss.ledger import GIVEN, UNIFORM, VARIED, Constant, Ledger, Meaning, Rows
from splitpipe.loss.numbers import tensors


class FunctionCall:
    """The function's name, its arguments, and what it has returned or written to."""

    def __init__(self, ledger: Ledger, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        self.ledger, self.name, self.args, self.kwargs, self.out = ledger, name, args, kwargs, out
        #: The tensors among the arguments, and what they are.
        self.operands = list(tensors([args, kwargs]))
        self._meanings = {id(x): ledger.of(x) for x in self.operands}
        self.kinds = {*map(type, self._meanings.values())}

    def of(self, x: Any) -> Meaning:
        """What an argument is."""
        return self._meanings.get(id(x), GIVEN)

    @property
    def meaning(self) -> Meaning:
        """What the first argument is."""
        return self.of(self.args[0])

    @property
    def meanings(self) -> list[Meaning]:
        """What the tensors among the arguments are."""
        return [*self._meanings.values()]

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by its position or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def scalar(self, x: Any) -> float | None:
        """A number of Python or NumPy, or the one of which all of a tensor is made; None for anything else."""
        if isinstance(x, Tensor):
            meaning = self.of(x)
            return meaning.value if isinstance(meaning, Constant) else None
        value = x.item() if getattr(x, "shape", None) == () and hasattr(x, "item") else x
        return value if isinstance(value, (int, float)) else None

    @property
    def scalars(self) -> list[float]:
        """The arguments that are numbers."""
        each = map(self.scalar, (*self.args, *self.kwargs.values()))
        return [x for x in each if x is not None]

    def joined(
        self, operands: Sequence[Any] | None = None, shape: Sequence[int] | None = None
    ) -> Rows | Constant | None:
        """The result, of this shape, of a function of entries that broadcasting brings together; None: unknown."""
        operands, shape = operands or self.operands, self.out.shape if shape is None else shape
        pairs = [(x, self.of(x)) for x in operands]
        rows = [(x, each) for x, each in pairs if isinstance(each, Rows)]
        constants = [(x, each) for x, each in pairs if isinstance(each, Constant)]
        if len(rows) + len(constants) < len(pairs):
            return None
        if not rows:
            if constants and all([each.uniform for _, each in constants]):
                return UNIFORM
            return VARIED if any([each.made and not each.uniform for _, each in constants]) else GIVEN
        x, first = rows[0]
        if not (dims := x.dim()):  # Of a single row.
            return first if all([not y.dim() for y in operands]) else None
        size = x.shape[0]
        if any([y.dim() != dims or y.shape[0] != size or not each.alike(first) for y, each in rows[1:]]):
            return None  # Rows meet other rows: x[:, None] - x[None].
        for y, constant in constants:
            if not constant.uniform and y.dim() >= dims:
                if y.shape[0] > 1 and y.stride(0) or constant.made and self.ledger.most == 1:
                    return None  # Numbers of positions begin again in each microbatch.
        shares = [each.share for _, each in rows if each.share is not None]
        if len(shape) != dims or shape[0] != size or len(shares) > 1:
            return None
        other = next((each for _, each in rows if each.share is not None), first)
        return other if not any([each.counting for _, each in rows]) else replace(other, counting=True)


#: What a call's result is, or several of them; None: not recognised.
Rule = Callable[[FunctionCall], "Meaning | list[Meaning | None] | None"]


def dims_of(x: Tensor, dims: Any) -> list[int]:
    """The dimensions that an argument names; None: all."""
    if dims is None or dims == () or dims == []:
        return [*range(x.dim())]
    return [dim % max(1, x.dim()) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])]
