"""Traces what numbers consist of while they are computed: a function mode over the code of one microbatch.

Guarantee: numbers (``Ledger.number``) are exact for functions on the list (``rules``), or else name the one where
recognition ended. Of a module, code between blocks is traced, and in blocks without parameters, such as a criterion.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from splitpipe.compiled.layers import is_compiled
from splitpipe.core.note import uncompiled
from splitpipe.core.tensors import map_tensors, tensors_in
from splitpipe.core.torch_private import DisableTorchFunction, peek_interpreter_stack
from splitpipe.loss.ledger import GIVEN, MAY_COUNT, UNIFORM, VARIED, Constant, FunctionCall, Ledger, Meaning, Rows
from splitpipe.loss.numbers import ADDING, DIVIDING, SCALING, Formula, Number, Unknown, amount
from splitpipe.loss.rules import ANSWERS, BY_PLACE, LOSSES, OF_ANYTHING, REPEATING, RULES, index, loss
from splitpipe.microbatch.division import Division
from splitpipe.microbatch.tree import hidden

#: Functions that may multiply or divide by numbers of Python, or fill a tensor with one.
_FACTORS = SCALING | DIVIDING | set("addcmul addcdiv lerp where masked_fill fill setitem scatter".split())


class Trace(TorchFunctionMode):
    """The mode for microbatch ``i``, along the first dimension that isn't None, of some with these ``rows``."""

    def __init__(self, rows: Sequence[int], i: int, dims: Sequence[int | None]) -> None:
        super().__init__()
        self.ledger = Ledger(rows[i], max(rows), next((dim for dim in dims if dim is not None), 0))

    def begin(self, input: Division, i: int, leaves: Sequence[Any], values: Sequence[Any]) -> None:
        """Records a microbatch's arguments, and their leaves; numbers that all get are the same for every one."""
        self.ledger.given = {input.leaves[k] for k in input.common_places if type(input.leaves[k]) in (int, float)}
        for k, leaf in zip(input.places[i], leaves):
            if k not in input.shared_places:
                self.ledger.begin(leaf, input.dims[k] or 0)
        if input.root is not None and len(input.common_places) < len(input.leaves):
            for value in values:
                self.ledger.begin_entries(value)

    def record(self, value: Any, block: str, read: str) -> None:
        """Records what a block has returned, "" if its code was traced; ``read``: by what Python had read before it."""
        ledger = self.ledger
        with DisableTorchFunction():
            numbers = ledger.note_numbers(value, block)
            for x in hidden((value,)):
                number = not block and (x.numel() < ledger.rows or isinstance(ledger.of(x), Number))
                ledger.put(x, ledger.of(x) if number else ledger.of_block(x, block))
                numbers = numbers or number
            ledger.read = ledger.read if numbers else read

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, (name, in_place, parameters), ledger, function = kwargs or {}, _name_of(func), self.ledger, func
        with DisableTorchFunction():
            named = {**dict(zip(parameters, args)), **kwargs}
            call = FunctionCall(ledger, name, () if parameters else args, named)
            if in_place and Number in call.kinds:  # Of what it was before.
                before, function = args[0].clone(), getattr(Tensor, name, getattr(Tensor, f"__{name[1:]}__", None))
                ledger.put(before, ledger.of(args[0]))
                call = FunctionCall(ledger, name, (before, *args[1:]), kwargs)
        out = func(*args, **kwargs)
        with DisableTorchFunction():
            if peek_interpreter_stack() is not None:
                ledger.read = ledger.read or "a transform of torch.func"  # What leaves it is seen by no mode.
            whole = args[0] if in_place and args else out
            for call.out in tensors_in(whole) or [whole]:
                piece = call.out is not whole and Number in call.kinds  # What is recorded would return all of them.
                meaning = None if piece else _meaning(call, function, in_place)
                if isinstance(call.out, Tensor):
                    ledger.put(call.out, Unknown(name) if meaning is None else meaning)
        return out


def _meaning(call: FunctionCall, function: Callable[..., Any], in_place: bool) -> Meaning | None:
    """What a result of a call is; None: not recognised."""
    rule, ledger = RULES.get(call.name), call.ledger
    unknown = next((x for x in call.meanings if isinstance(x, Unknown)), None)
    if (rule not in BY_PLACE or call.name == "pad") and (ledger.read or ledger.sizes):
        value = isinstance(call.out, Tensor) and call.out.is_floating_point() and rule is not loss  # Or a position.
        if ledger.read and ledger.variable([x for x in call.scalars if value or type(x) is float]):
            return Unknown(ledger.read)
        call.counting = _may_count(call)
    call.counting |= any([isinstance(x, Rows) and x.counting for x in call.meanings])
    if call.counting and Rows not in call.kinds and call.kinds:
        return MAY_COUNT
    if Number in call.kinds and rule not in ANSWERS and Rows not in call.kinds:
        return _recorded(call, function, in_place)
    if rule is None and unknown is None and call.kinds <= {Constant}:
        return GIVEN if {*call.meanings} == {GIVEN} and call.name not in REPEATING else VARIED
    if rule is None or unknown is not None and rule not in OF_ANYTHING:
        return unknown
    try:
        meaning = rule(call)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # Of arguments that the rule doesn't know.
        return None
    return replace(meaning, counting=True) if call.counting and isinstance(meaning, Rows) else meaning


def _may_count(call: FunctionCall) -> bool:
    """Whether a number of Python, which may be a number of rows, may be a factor of the result, or of its entries."""
    may_count, each = call.ledger.may_count, [x for x in call.scalars if abs(x) >= 1]
    grows = Rows in call.kinds or any([isinstance(x, Number) and x.formula.grows for x in call.meanings])
    if call.name in _FACTORS or "alpha" in call.kwargs:  # 0.5 * mean has no count.
        return may_count(call.scalars) if grows else may_count(each, size=True)
    if Number in call.kinds:  # mask.numel() - mask.sum() counts elements, but 0.5 doesn't.
        return grows and call.name in ADDING and may_count(each)
    return may_count([x for x in call.scalars if type(x) is float or call.name == "pad"], size=True)


def _recorded(call: FunctionCall, function: Callable[..., Any], in_place: bool) -> Number | Unknown | None:
    """What the result of a function is, if it has numbers of the batch among its arguments, and no rows."""
    name, out = call.name, call.out
    if not isinstance(out, Tensor) or in_place and out.requires_grad and not torch.is_grad_enabled():
        return None  # The graph doesn't have what is written.
    steps, values = dict[Formula, Any](), dict[int, Any]()  # ``values``: in place of the tensors among the arguments.
    for x in call.operands:
        meaning = call.of(x)
        if meaning in (GIVEN, *UNIFORM) and x.requires_grad:
            meaning = amount("a constant", x, constant=True)
        if isinstance(meaning, Number):
            steps.update(meaning.steps)
        elif meaning not in (GIVEN, *UNIFORM):
            return meaning if isinstance(meaning, Unknown) else None
        values[id(x)] = meaning.formula if isinstance(meaning, Number) else x.clone()
    if name not in RULES or function is None or RULES[name] is index and len(call.operands) > 1:
        return None  # There may be as many as n[n > 0] has.
    if out.numel() > sum([x.numel() for x in call.operands if not x.dim() or isinstance(call.of(x), Number)]):
        return MAY_COUNT  # Repeated, perhaps for each row: loss * torch.ones_like(x)
    if name in SCALING and 0 in call.scalars:
        return amount("0", torch.where(out.isfinite(), out, 0), constant=True, nothing=True)
    formulas = [x for x in values.values() if isinstance(x, Formula)]
    formula = Formula(
        name, out.requires_grad, function, map_tensors(lambda x: values.get(id(x), x), (call.args, call.kwargs)),
        nothing=all([x.nothing for x in formulas]) and len(formulas) == len(values) and not call.scalars,
        grows=any([x.grows for x in formulas]) and not (name in DIVIDING and len(formulas) == 2),
        detached=not out.requires_grad and any([x.grad for x in formulas]),
    )
    return Number({**steps, formula: None})


@lru_cache(1024)
def _name_of(function: Any) -> tuple[str, bool, tuple[str, ...]]:
    """The name that the list has for a function, whether it writes to its first argument, and a loss's parameters."""
    name: str = getattr(function, "__name__", "")
    if name in LOSSES:
        if getattr(F, name, None) is not function:
            return f"torch.{name}", False, ()
        return name, False, tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
    if name == "__get__":
        return getattr(function.__self__, "__name__", ""), False, ()
    plain = name.removeprefix("special_").strip("_")
    in_place = plain + "_" == name and name != "requires_grad_" or name in (*_IN_PLACE, "register_hook")
    return name if name in RULES else plain, in_place, ()


_IN_PLACE = frozenset("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __iand__ __ior__ __ipow__ __setitem__".split())


def sees(block: nn.Module) -> bool:
    """Whether a block's code is traced; compiled code can't be."""
    return next(block.parameters(), None) is None and not any(map(is_compiled, block.modules()))
