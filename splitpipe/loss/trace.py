"""Traces what numbers consist of while they are computed: a function mode over the code of one microbatch.

Guarantee: ``number`` is exact for functions on the list (``rules``), or else names the one where recognition ended.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from splitpipe.core.note import uncompiled
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss import torch_losses
from splitpipe.loss.arithmetic import keep_value
from splitpipe.loss.function_call import FunctionCall
from splitpipe.loss.ledger import Ledger, Quotient, Stack, tensors
from splitpipe.loss.rules import RULES, meanings
from splitpipe.loss.terms import Number, Unknown


class Trace(TorchFunctionMode):
    """The mode for a microbatch, of which ``ledger`` has what is known."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def number(self, x: Tensor) -> Number | Unknown | None:
        """What a tensor without rows consists of; None for one with rows."""
        with DisableTorchFunction():
            number = self.ledger.number(x)
            return number.counted(self.ledger.rows) if isinstance(number, Number) else number

    def has_number(self, values: Sequence[Tensor]) -> bool:
        """True if numbers of the batch are among the values, whose terms have a graph."""
        with DisableTorchFunction():
            return any([isinstance(self.ledger.of(x), (Number, Stack, Quotient)) for x in values])

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, (name, in_place), ledger = kwargs or {}, _name_of(func), self.ledger
        if name in torch_losses.NAMES and getattr(F, name, None) is func:
            return torch_losses.loss(ledger, name, func, args, kwargs)  # type: ignore[arg-type]
        before = None
        if in_place:
            with DisableTorchFunction():
                keep_value(ledger, args[0])
                before = ledger.of(args[0])
        out = func(*args, **kwargs)
        with DisableTorchFunction():
            if before is not None:
                ledger.put(args[0], before)
            written = args[0] if name == "__setitem__" else out
            for key in ("input", "tensors", "data", "other"):  # torch.stack(tensors=...)
                if key in kwargs and (key == "other" or not args):
                    args, kwargs = (*args, kwargs[key]), {k: x for k, x in kwargs.items() if k != key}
            found = [*tensors((written,))]
            for x, meaning in zip(found, meanings(FunctionCall(ledger, name, args, kwargs, written), len(found))):
                ledger.put(x, meaning)
            if in_place:
                ledger.note_write(args[0])
        return out


@lru_cache(1024)
def _name_of(function: Any) -> tuple[str, bool]:
    """The name of a function in the list, and whether it writes to its first argument."""
    name: str = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(function.__self__, "__name__", ""), False
    plain = name.removeprefix("special_").strip("_")
    in_place = plain + "_" == name and name != "requires_grad_" or name in _IN_PLACE
    return name if name in RULES else plain, in_place


_IN_PLACE = frozenset("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __iand__ __ior__ __ipow__ __setitem__".split())
