"""Traces what numbers consist of while they are computed: a function mode over the code of one microbatch.

Guarantee: ``number`` is exact for functions on the list (``rules``), or else names the one where recognition ended.

Of a module, that is the code between blocks, and in blocks without parameters, such as a criterion. A number that any
other block returns is unknown.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from splitpipe.compiled.layers import is_compiled
from splitpipe.core.note import uncompiled
from splitpipe.core.tensors import map_leaves, version_of
from splitpipe.core.torch_private import DisableTorchFunction, peek_interpreter_stack
from splitpipe.loss import torch_losses
from splitpipe.loss.function_call import FunctionCall
from splitpipe.loss.ledger import MAY_COUNT, Constant, Ledger, Meaning, Rows
from splitpipe.loss.numbers import ADDING, DIVIDING, SCALING, Number, Quantity, Unknown, tensors
from splitpipe.loss.rules import BY_PLACE, NOT_RECORDED, RULES, meaning_of
from splitpipe.microbatch.division import Division
from splitpipe.microbatch.tree import hidden

#: Functions of numbers whose results differ between microbatches, or that change gradients.
_OTHER = frozenset("dropout bernoulli multinomial normal rand_like randn_like randint_like rrelu register_hook "
                   "retain_grad".split())
#: Functions that may multiply or divide numbers by those of Python.
_FACTORS = ADDING | SCALING | DIVIDING | {"addcmul", "addcdiv", "lerp"}
#: Functions that repeat numbers, perhaps for each row.
_REPEATING = frozenset("expand expand_as broadcast_to repeat tile repeat_interleave".split())


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
            return any([isinstance(self.ledger.of(x), Quantity) for x in values])

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, (name, in_place), ledger = kwargs or {}, _name_of(func), self.ledger
        if name in torch_losses.NAMES and getattr(F, name, None) is func:
            return torch_losses.loss(ledger, name, func, args, kwargs)  # type: ignore[arg-type]
        with DisableTorchFunction():
            call = FunctionCall(ledger, name, args, kwargs)
            in_place = in_place and bool(args)
            before = args[0].clone() if in_place and Quantity in call.kinds else None
        call.out = func(*args, **kwargs)
        with DisableTorchFunction():
            results = [args[0]] if in_place else [*tensors((call.out,))]
            if peek_interpreter_stack() is not None:
                ledger.note_read("a transform of torch.func", 0.5)  # What leaves it is seen by no mode.
            for x, meaning in zip(results, self._meanings(call, func, in_place, before, results)):
                ledger.put(x, meaning)
        return call.out

    def _meanings(
        self, call: FunctionCall, function: Any, in_place: bool, before: Tensor | None, results: Sequence[Tensor]
    ) -> list[Meaning]:
        """What each of the results is; ``before``: of an in-place function, a copy of its first argument."""
        rule, read = RULES.get(call.name), self.ledger.read
        whole = bool(results) and results[0].is_floating_point()  # Else it may be a class or a position.
        found: Any = None
        if read and rule not in BY_PLACE and self.ledger.may_be_read(
            *[x for x in call.scalars if whole or type(x) is float]
        ):
            found = Unknown(read)
        elif Quantity in call.kinds and rule not in NOT_RECORDED and Rows not in call.kinds:
            return _recorded(call, function, in_place, before, results)
        elif call.kwargs.get("out") is None:
            call.out = results[0] if in_place else call.out
            found = meaning_of(call)
        each = found if isinstance(found, list) else [found] * len(results)
        return [Unknown(call.name) if meaning is None else meaning for meaning in each]


class Tracing:
    """How the forwards of one call are traced."""

    def __init__(self, input: Division) -> None:
        self._input = input
        shared = [leaf for leaf, owner in zip(input.leaves, input.owners) if owner is None]
        self._given = [x for x in shared if type(x) in (int, float)]

    def trace(self, i: int) -> Trace:
        """The trace of a microbatch."""
        rows = [count for _, count in self._input.rows]
        dim = next((dim for dim in self._input.dims if dim is not None), 0)
        return Trace(Ledger(rows[i], max(rows), dim, self._given))

    def begin(self, ledger: Ledger, i: int, leaves: Sequence[Any], values: Sequence[Any]) -> None:
        """Records a microbatch's arguments, and their leaves."""
        input, rows = self._input, self._input.rows[i][1]
        for k, leaf in zip(input.places[i], leaves):
            if k not in input.whole:
                ledger.begin(leaf if isinstance(leaf, Tensor) else [*hidden(leaf)], input.dims[k] or 0)
        if input.root is not None and any([owner is not None for owner in input.owners]):
            for value in values:
                if isinstance(value, (list, tuple)) and len(value) == rows:
                    ledger.begin_entries(value)

    def sees(self, block: nn.Module) -> bool:
        """Whether a block's code is traced; compiled code can't be."""
        return next(block.parameters(), None) is None and not any(map(is_compiled, block.modules()))

    def record(self, ledger: Ledger, block: nn.Module, described: str, value: Any, read: str) -> None:
        """Records what a block has returned; ``read``: by what Python had read values before it."""
        traced = self.sees(block)
        with DisableTorchFunction():
            numbers = ledger.note_numbers(value, "" if traced else described)
            for x in tensors((value,)):
                if traced and (x.numel() < ledger.rows or isinstance(ledger.of(x), Quantity)):
                    ledger.put(x, ledger.of(x))  # Its graph may be another one now.
                    numbers = True
                else:
                    ledger.returned(x, described)
            ledger.read = ledger.read if numbers else read


def numbers_of(trace: Trace | None, leaves: Sequence[Any]) -> dict[int, Number | Unknown]:
    """What the numbers among an output's leaves consist of, by position."""
    found = {k: trace.number(x) for k, x in enumerate(leaves) if isinstance(x, Tensor)} if trace is not None else {}
    return {k: number for k, number in found.items() if number is not None}


def _recorded(
    call: FunctionCall, function: Callable[..., Any], in_place: bool, before: Tensor | None, results: Sequence[Tensor]
) -> list[Meaning]:
    """What the results of a function are, if it has numbers of the batch among its arguments, and no rows."""
    name, ledger, scalars = call.name, call.ledger, call.scalars
    known = [each for each in call.meanings if isinstance(each, Quantity)]
    adds = any([each.grows for each in known])
    unseen = in_place and results[0].requires_grad and not torch.is_grad_enabled()  # The graph doesn't have it.
    if name in _OTHER or unseen or call.kwargs.get("out") is not None:
        for x in call.operands if name in _OTHER else []:
            ledger.put(x, Unknown(name))
        return [Unknown(name)] * len(results)
    widest = max([x.numel() for x in call.operands if isinstance(call.of(x), Quantity)], default=1)
    made = [x for x in call.operands if getattr(call.of(x), "made", False) and x.numel() > widest]
    repeated = name in _REPEATING or not in_place and any(map(ledger.may_be_rows, made))
    factors = scalars if name in _FACTORS else []
    if name in ADDING:  # mask.numel() - mask.sum() counts elements, but 0.5 doesn't.
        factors = [x for x in scalars if abs(x) >= 1 and x is not call.kwargs.get("alpha")] if adds else []
        factors += [call.kwargs.get("alpha")]  # type: ignore[list-item]
    if call.counting or ledger.may_count(*factors, size=not adds) or repeated:
        return [Unknown(MAY_COUNT)] * len(results)
    if name in SCALING and 0 in scalars:
        return [ledger.atom("", torch.where(x.isfinite(), x, 0), nothing=True) for x in results]
    own = call.args[0] if call.args else None
    quantities: dict[int, Any] = {id(own): own if before is None else before}
    for x in call.operands:
        meaning, value = call.of(x), quantities.get(id(x), x)
        if isinstance(meaning, Quantity):
            quantities[id(x)] = meaning
        elif not isinstance(meaning, Constant) or meaning.made and not meaning.uniform:
            return [meaning if isinstance(meaning, Unknown) else Unknown(name)] * len(results)
        elif value.requires_grad:
            quantities[id(x)] = ledger.atom("a constant", value)
        elif value is x:
            ledger.constants.append((x, version_of(x)))
    args, kwargs = map_leaves(lambda x: quantities.get(id(x), x), (call.args, call.kwargs))
    nothing = all([each.nothing for each in known]) and len(known) == len(call.operands) and not scalars
    grows = adds and not (name in DIVIDING and len(known) == 2 and all([each.grows for each in known]))  # By a count.
    operands = [x for x in quantities.values() if isinstance(x, Quantity)]
    recorded = partial(Quantity, name, grows=grows, nothing=nothing)
    if in_place:
        return [recorded(partial(_written, function), args, kwargs, results[0].requires_grad, operands=operands)]
    if isinstance(call.out, Tensor):
        return [recorded(function, args, kwargs, call.out.requires_grad, operands=operands)]
    several = Quantity(name, function, args, kwargs, True, operands=operands)
    return [
        recorded(_one_of, (several, k), grad=x.requires_grad, operands=[several]) for k, x in enumerate(results)
    ]


def _written(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    y = x.clone()
    function(y, *args, **kwargs)
    return y


def _one_of(out: Any, k: int) -> Tensor:
    return [*tensors((out,))][k]


@lru_cache(1024)
def _name_of(function: Any) -> tuple[str, bool]:
    """The name that the list has for a function, and whether it writes to its first argument."""
    name: str = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(function.__self__, "__name__", ""), False
    plain = name.removeprefix("special_").strip("_")
    in_place = plain + "_" == name and name != "requires_grad_" or name in _IN_PLACE
    return name if name in RULES else plain, in_place


_IN_PLACE = frozenset("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __iand__ __ior__ __ipow__ __setitem__".split())
