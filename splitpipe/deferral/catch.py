"""A stage's calls of split functions: the weights get a slot and a phony, the call becomes a node of autograd's.

A Register belongs to one stage in one pass, a Catch to one microbatch there.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _autograd, _is_any_autocast_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

from splitpipe.core.dtensor import arrived
from splitpipe.deferral.function import Split, SplitFunction, Weights
from splitpipe.deferral.idle import Idle
from splitpipe.deferral.pending import Deposit, Names, Sink, Slot
from splitpipe.deferral.report import Sightings
from splitpipe.deferral.weights import Meshed, leaves, meshed, plain

Needs = tuple[bool, ...]
Casts = dict[tuple[int, torch.dtype, int], tuple[Tensor, Tensor]]


class Entry(NamedTuple):
    """A slot, its phony, and the type that all weights have.

    Attributes:
        weights: held, so that their ids stay theirs.
        given: what the function is called with. In place of a parameter that autograd's own function saves a view of:
            one view for the whole pass, which has the values of the forward when somebody sets ``parameter.data``.
    """

    slot: Slot
    phony: Tensor
    dtype: torch.dtype | None
    weights: Weights
    given: Weights

    def current(self) -> bool:
        """Whether no weight has been given other memory since."""
        return all([
            given is weight or given is None or weight is None or given.data_ptr() == weight.data_ptr()
            for given, weight in zip(self.given, self.weights)
        ])


class Known(NamedTuple):
    """What became of a call that a layer makes for each microbatch anew, with the same arguments but for its input.

    Attributes:
        arguments: how many it has.
        others: all but the first one, its input. Held, so that their ids stay theirs.
        dtype: of the input.
        options: of the call.
        entry: of the weights; None: the call was left to autograd, since it would take longer in two halves.
    """

    arguments: int
    others: Sequence[Any]
    dtype: torch.dtype
    options: dict[str, Any]
    entry: Entry | None


@dataclass
class Register:
    """The weights that a pass has met in one stage.

    Args:
        deposit: of the stage.
        names: of the stage's parameters.
        sightings: what is deferred, and what is not.
    """

    deposit: Deposit
    names: Names
    sightings: Sightings
    casts: Casts = field(default_factory=dict)
    known: dict[tuple[object, ...], Known] = field(default_factory=dict)
    _entries: dict[tuple[object, ...], Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.idle = Idle(self.names)

    def enter(
        self, function: type[SplitFunction], weights: Weights, needs: Needs, inputs: Collection[Any]
    ) -> Entry | str:
        """The entry of some weights, made when they are first met; or why they can't have one.

        Args:
            function: that is called.
            weights: of the call.
            needs: which of them require grad.
            inputs: nodes of the stage's inputs.
        """
        key = (function, needs, *map(id, weights))
        entry = self._entries.get(key)
        if entry is not None and all([weight is None or weight.is_leaf for weight in weights]):
            if not entry.current():
                entry = self._entries[key] = entry._replace(given=self._given(function, weights))
            return entry
        if not any(needs):
            return "its weights are frozen"
        if not all(map(plain, weights)) and not (issubclass(function, Meshed) and meshed(*weights)):
            return "it is of a class of its own"
        computed: list[tuple[Tensor, str]] = []
        for weight, need in zip(weights, needs):
            if weight is None or not need:
                continue
            if not weight.is_leaf:
                if function.whole:
                    return "it counts over the whole batch, and its weight is computed for each microbatch"
                found = leaves(weight, inputs)
                if found is None:
                    return "it is computed from more than a few parameters"
                for leaf in found:
                    way = "" if leaf is weight._base else ", by way of what is computed from it"
                    computed.append((leaf, function.__name__ + way))
            elif not isinstance(weight, Parameter):
                return "it is no parameter"
        for leaf, how in computed:
            self.sightings.deferred(leaf, how)
        entry = self._make(function, weights, needs)
        if not computed:
            self._entries[key] = entry
        return entry

    def _make(self, function: type[SplitFunction], weights: Weights, needs: Needs) -> Entry:
        wanted = [weight for weight, need in zip(weights, needs) if weight is not None and need]
        parameters = [weight for weight in wanted if weight.is_leaf]
        slot = Slot(function, weights, needs, self.names, parameters)
        for parameter in parameters:
            self.sightings.deferred(parameter, function.__name__)
        phony = self.deposit.phony(slot, wanted)
        return Entry(slot, phony, _common(weights), weights, self._given(function, weights))

    def _given(self, function: type[SplitFunction], weights: Weights) -> Weights:
        seen = function.views
        if not seen:
            return weights
        return tuple([
            weight.view_as(weight) if number < seen and weight is not None and weight.is_leaf else weight
            for number, weight in enumerate(weights)
        ])


#: Arguments of these types do not change while they are the same object.
_FIXED = frozenset((int, bool, str, float, tuple, type(None), Parameter))


class Catch:
    """Calls split functions for the layers of one microbatch.

    Args:
        register: of the stage.
        inputs: nodes of the stage's inputs.
        sink: where the calls leave what their weight gradients need.
        casts: weights in autocast's type, made once.
    """

    def __init__(self, register: Register, inputs: Collection[Any], sink: Sink, casts: Casts) -> None:
        self.register = register
        self._inputs = inputs
        self._sink = sink
        self._casts = casts
        self._known = register.known
        self.fills = sink.fills
        self._calls: dict[Slot, int] = {}  # Of functions that count over the whole batch.
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)
        #: Where the layer is that runs, for messages.
        self.where = ""

    def call(
        self,
        function: type[SplitFunction],
        x: Tensor,
        weights: Weights,
        options: dict[str, Any],
        made: tuple[Any, tuple[Any, ...]] | None = None,
    ) -> Tensor | None:
        """The output, or None if autograd is to have the call whole.

        Args:
            function: that is called.
            x: its input.
            weights: of the call.
            options: of the call.
            made: what the layer called, torch's function and its arguments; None if it can't be the same again.
        """
        x = x if type(x) is Tensor else arrived(x)
        reason = self._refused(function, x)
        if type(x) is Parameter and x.requires_grad:
            reason = reason or "its input is a parameter"  # A hook may step it before its value is read.
        needs = tuple([weight is not None and weight.requires_grad for weight in weights])
        if not reason and not function.pays(x, weights, options, self._sink):
            reason = "its gradients would take longer apart"
            self._learn(made, x, weights, options, None)
        entry = reason or self.register.enter(function, weights, needs, self._inputs)
        if type(x) is not Tensor:
            self.left((x,), f"{function.__name__} has it as its input")
        if isinstance(entry, str):
            self.left(weights, f"{function.__name__}: {entry}")
            return None
        slot = entry.slot
        given = entry.given
        if function.casts:
            found = entry.dtype
            if _is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
                x = x.to(dtype) if _castable(x) else x
                given = tuple([self._cast(weight, same, dtype) for weight, same in zip(weights, given)])
                found = _common(given)
                made = None
            if found is not x.dtype:
                return None  # An error, in torch's words.
        self._learn(made, x, weights, options, entry)
        number = 0
        if function.whole:
            number = self._calls.get(slot, 0)
            self._calls[slot] = number + 1
        y: Tensor = Split.apply(x, entry.phony, slot, given, options, number, self._sink, self.where)
        return y

    def again(self, func: Any, args: tuple[Any, ...]) -> Any:
        """As ``call``, if the layer has made this call in this pass before; NotImplemented if it has not."""
        x = args[0]
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
            return NotImplemented
        known = self._known.get((func, id(args[1]), x.shape, self.fills))
        if (
            known is None
            or x.dtype is not known.dtype
            or len(args) != known.arguments
            or not all(map(is_, args[1:], known.others))
            or _is_any_autocast_enabled()
            or self._elsewhere()
        ):
            return NotImplemented
        entry = known.entry
        if entry is None:
            return None
        slot = entry.slot
        for weight, given, need in zip(entry.weights, entry.given, slot.needs):
            if weight is None or given is None:
                continue
            if weight.requires_grad is not need or not weight.is_leaf:
                return NotImplemented
            if given is not weight and given.data_ptr() != weight.data_ptr():
                return NotImplemented
        return Split.apply(x, entry.phony, slot, entry.given, known.options, 0, self._sink, self.where)

    def _learn(
        self,
        made: tuple[Any, tuple[Any, ...]] | None,
        x: Tensor,
        weights: Weights,
        options: dict[str, Any],
        entry: Entry | None,
    ) -> None:
        if made is None or type(x) is not Tensor:
            return
        func, (first, *others) = made
        # A computed weight is another one in each microbatch. A call that counts has a number.
        fixed = all([weight is None or type(weight) is Parameter and weight.is_leaf for weight in weights])
        fixed = fixed and _FIXED.issuperset(map(type, others))
        if fixed and first is x and others and (entry is None or not entry.slot.function.whole):
            self._known[func, id(others[0]), x.shape, self.fills] = Known(
                len(others) + 1, others, x.dtype, options, entry
            )

    def left(self, weights: Iterable[Tensor | None], why: str) -> None:
        """Notes weights whose gradient is left to autograd."""
        for weight in weights:
            if isinstance(weight, Parameter) and weight.requires_grad:
                self.register.sightings.left(weight, why)

    def _refused(self, function: type[SplitFunction], x: Tensor) -> str:
        fits = meshed(x) if issubclass(function, Meshed) else plain(x)
        return self._elsewhere() or ("" if fits else "its input is of a class of its own")

    def _elsewhere(self) -> str:
        if _autograd._top_saved_tensors_default_hooks(True) != self._hooks:
            return "it runs under saved-tensor hooks of its own"
        if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return "it runs inside a torch.func transform or forward-mode AD"
        return ""

    def _cast(self, weight: Tensor | None, same: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if weight is None or weight.dtype == dtype or not _castable(weight):
            return same
        if not weight.is_leaf:
            return weight.to(dtype)
        # With its node, so that a second derivative finds the weight.
        key = id(weight), dtype, weight._version
        if key not in self._casts:
            self._casts[key] = weight, weight.to(dtype)
        return self._casts[key][1]


def _common(weights: Weights) -> torch.dtype | None:
    found = {weight.dtype for weight in weights if weight is not None}
    return found.pop() if len(found) == 1 else None


def _castable(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype is not torch.float64
