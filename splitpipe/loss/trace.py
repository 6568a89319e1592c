"""Traces what numbers consist of while they are computed: a function mode over the code of one microbatch.

Guarantee: ``number`` is exact for functions on the list (``rules``), or else names the one where recognition ended.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from splitpipe.core.note import uncompiled
from splitpipe.core.torch_private import DisableTorchFunction, peek_interpreter_stack
from splitpipe.loss import torch_losses
from splitpipe.loss.function_call import FunctionCall
from splitpipe.loss.instructions import record
from splitpipe.loss.ledger import Aggregate, Ledger, Meaning, Rows, TimeMajor, hooked
from splitpipe.loss.numbers import Number, Unknown, tensors
from splitpipe.loss.rules import BY_PLACE, NOT_RECORDED, RULES, meaning_of


class Trace(TorchFunctionMode):
    """The mode for a microbatch, of which ``ledger`` has what is known."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def number(self, x: Tensor) -> Number | Unknown | None:
        """What a tensor without rows consists of; None for one with rows."""
        with DisableTorchFunction():
            return self.ledger.number(x)

    def has_number(self, values: Sequence[Tensor]) -> bool:
        """True if a number of the batch is among the values."""
        with DisableTorchFunction():
            return any([isinstance(self.ledger.of(x), Aggregate) for x in values])

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, (name, in_place), ledger = kwargs or {}, _name_of(func), self.ledger
        if name in torch_losses.NAMES and getattr(F, name, None) is func:
            return torch_losses.loss(ledger, name, func, args, kwargs)  # type: ignore[arg-type]
        written = before = None
        if in_place and args:
            with DisableTorchFunction():
                written, before = args[0], ledger.of(args[0])
                args = (self._value_before(args, kwargs), *args[1:])
        out = func(*(args if written is None else (written, *args[1:])), **kwargs)
        with DisableTorchFunction():
            if before is not None:
                ledger.put(args[0], before)
            for key in ("input", "tensors", "data", "other"):  # torch.stack(tensors=...)
                if key in kwargs and (key == "other" or not args) and name != "where":  # Its condition comes first.
                    args, kwargs = (*args, kwargs[key]), {k: x for k, x in kwargs.items() if k != key}
            results = [*tensors((out if written is None else written,))]
            call = FunctionCall(ledger, name, args, kwargs, out if written is None else written)
            if peek_interpreter_stack() is not None:
                ledger.note_read(math.nan, "a transform of torch.func")  # What leaves it is seen by no mode.
            for x, meaning in zip(results, _meanings(call, func, written is not None, results)):
                ledger.put(x, meaning)
        return out

    def _value_before(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """What a function will write to, or if that is to become a number of the batch, a copy."""
        x, ledger = args[0], self.ledger
        meaning = ledger.of(x)
        if not any([isinstance(ledger.of(y), Aggregate) for y in tensors([args, kwargs])]):
            return x  # type: ignore[no-any-return]
        with torch.enable_grad():
            kept: Tensor = x.clone()
        if isinstance(meaning, Aggregate):
            meaning.tensor, meaning.version, meaning.hooked = kept, None, hooked(x)
        return kept


def _meanings(call: FunctionCall, function: Any, in_place: bool, results: Sequence[Tensor]) -> list[Meaning]:
    """What each of the results is of a function, which may have written to its first argument."""
    rule, read, kinds = RULES.get(call.name), call.ledger.host_reads.values, call.kinds
    found: Any = None
    if read and rule is not None and rule not in BY_PLACE and _has_read(call):
        found = Unknown(read)
    elif Aggregate in kinds and rule not in NOT_RECORDED and Rows not in kinds and TimeMajor not in kinds:
        return record(call, function, in_place, results)
    elif call.kwargs.get("out") is None:
        found = meaning_of(call)
    each = found if isinstance(found, list) else [found] * len(results)
    return [Unknown(call.name) if meaning is None else meaning for meaning in each]


def _has_read(call: FunctionCall) -> bool:
    """True if an argument may be computed from values of the batch."""
    whole = isinstance(call.out, Tensor) and call.out.is_floating_point()  # Else it may be a class or a position.
    return any([(whole or isinstance(x, float)) and call.ledger.is_read(x) for x in call.scalars])


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
