"""A call of a function by the code of one microbatch, as the rules read it."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from splitpipe.loss.ledger import Constant, Ledger, Meaning, Rows, tensors


@dataclass
class FunctionCall:
    """The function's name, its arguments, and what it has returned."""

    ledger: Ledger
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any

    def __post_init__(self) -> None:
        #: The tensors among the arguments.
        self.operands = list(tensors([self.args, self.kwargs]))

    @property
    def meaning(self) -> Meaning:
        """What the first argument is."""
        return self.ledger.of(self.args[0])

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by its position or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    def dims(self, at: int = 1, default: Any = None) -> list[int]:
        """The dimensions that an argument names; None: all."""
        return dims_of(self.args[0], self.argument(at, "dim", self.kwargs.get("axis", default)))

    def joined(self) -> Rows | Constant | None:
        """The result of a function of entries; None: unknown."""
        return self.ledger.joined(self.operands, self.out.shape)

    def entries(self) -> Rows | Constant | None:
        """``joined`` for a function that isn't linear: it keeps no share."""
        rows = self.joined()
        return None if isinstance(rows, Rows) and rows.share is not None else rows

    def number(self, x: Any) -> float | None:
        """A number of Python or NumPy, or the one that a tensor was made of; None for anything else."""
        if isinstance(x, Tensor):
            meaning = self.ledger.of(x)
            return meaning.value if isinstance(meaning, Constant) and x.numel() == 1 else None
        value = x.item() if getattr(x, "shape", None) == () and hasattr(x, "item") else x
        return value if isinstance(value, (int, float)) else None


#: What a call's result is, or several of them; None: not recognised.
Rule = Callable[[FunctionCall], "Meaning | list[Meaning | None] | None"]


def dims_of(x: Tensor, dims: Any) -> list[int]:
    """The dimensions that an argument names; None: all."""
    if dims is None or dims == () or dims == []:
        return [*range(x.dim())]
    return [dim % max(1, x.dim()) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])]


def size_along(x: Tensor, dims: Sequence[int]) -> float:
    """The number of entries along these dimensions."""
    return float(math.prod([x.shape[dim] for dim in dims if x.dim()]))
