"""Traces what numbers consist of while they are computed: a function mode over the code of one microbatch.

It is active where a loss can be computed: in ``loss_fn``, between blocks, and in blocks that have returned a number.
Guarantee: ``number`` is exact for functions that have a rule, or else reports where tracing failed. Other functions are
assumed to treat each row separately.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from splitpipe.core.note import uncompiled
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss import torch_losses
from splitpipe.loss.arithmetic import before
from splitpipe.loss.counts import counting, note_figures, sized
from splitpipe.loss.facts import ROWS, Facts, is_constant, tensors, term
from splitpipe.loss.indexing import MAKERS, note
from splitpipe.loss.rules import LOOKED_AT, RULES
from splitpipe.loss.terms import MEAN, SUM, Divisor, Number, Unknown


class Trace(TorchFunctionMode):
    """The mode for a microbatch of ``rows`` rows; ``given`` are numbers that all microbatches have."""

    def __init__(self, rows: int, given: Iterable[float] = ()) -> None:
        super().__init__()
        self.facts = Facts(rows, given)

    def number(self, x: Tensor) -> Number | Unknown | None:
        """What a tensor without rows consists of; None for one with rows."""
        with DisableTorchFunction():
            return self.facts.number(x)

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        out = self._called(name, func, args, given)
        if self.facts.positions or name in MAKERS:
            with DisableTorchFunction():
                note(self.facts, name, args, given, out)
        if self.facts.statistics and isinstance(out, Tensor):
            for x in args:
                if type(x) is float and x in self.facts.statistics:
                    self.facts.put(out, Unknown(self.facts.statistics[x]))
        if self.facts.asked and isinstance(out, Tensor):
            with DisableTorchFunction():
                note_figures(self.facts, [*args, *given.values()], out)
        return out

    def _called(self, name: str, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        facts = self.facts
        rule = RULES.get(name)
        if not args and rule is not None:  # torch.stack(tensors=...)
            first = next((key for key in ("input", "tensors", "outputs") if key in given), None)
            rest = {key: value for key, value in given.items() if key != first}
            rule, args, given = (rule, (given[first],), rest) if first is not None else (None, args, given)
        if rule is None:
            if name in torch_losses.NAMES:
                return self._loss(name, func, args, given)
            out = func(*args, **given)
            if isinstance(out, (Tensor, tuple, list, dict)):
                with DisableTorchFunction():
                    for x in tensors((out,)):
                        facts.put(x, facts.other(name, [*tensors(args), *tensors(given.values())], x))
                        facts.inherit(args, x)
            return out
        if name in LOOKED_AT:
            with DisableTorchFunction():
                changed = before(facts, name, args)
            out = func(*changed, **given)
        else:
            out = func(*args, **given)
        with DisableTorchFunction():
            facts.inherit(args, out)
            made = rule(facts, name, args, given, out)
            if name == "item":
                out = counting(facts, out, facts.of(args[0]))
            elif isinstance(out, torch.Size) or name in ("size", "numel", "nelement"):
                out = sized(facts, args[0], args[1] if len(args) > 1 else given.get("dim"), out)
            if name == "mean" and isinstance(made, Number) and not args[0].numel() and "out" not in given:
                out = torch.sum(*args, **given)  # 0 instead of 0 / 0: see ``torch_losses``.
                made = rule(facts, name, args, given, out)
            if made is not None and isinstance(out, Tensor):
                facts.put(out, made)
        return out

    def _loss(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A loss function of torch."""
        facts = self.facts
        with DisableTorchFunction():
            call = torch_losses.read(func, args, kwargs)
            made = [] if call is None else [facts.of(x) for x in call.tensors]
            rest = [] if call is None else [facts.of(x) for x in tensors(call.given.values())]
        plain = all(each is ROWS or is_constant(each) for each in rest)
        if call is None or ROWS not in made or not plain:
            out = func(*args, **kwargs)
            with DisableTorchFunction():
                facts.put(out, facts.other(name, [*tensors(args), *tensors(kwargs.values())], out))
            return out
        out, total, count = call.run()
        with DisableTorchFunction():
            divisor = None if count is None else Divisor(count)
            summed = count is None or total is not None
            number = Number((term(out if total is None else total, SUM if summed else MEAN, divisor, name),))
            turned = call.of_classes and facts.rows > 1 and facts.turned(call.tensors[0]) == 1
            couples = call.couples or turned  # The place of a single row isn't certain.
            facts.put(out, Unknown(name) if couples else ROWS if out.dim() else number)
        return out
