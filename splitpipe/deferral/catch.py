"""A stage's calls of split functions: the weights get a group and a phony, the call becomes a node of autograd's.

A Register belongs to one stage in one call of the model, a Catch to one microbatch there.

Deferred are parameters, and views of one (a transposed weight, a slice). A view is a tensor of its own in every
microbatch, with a group of its own: its gradient goes on through the node that made it, where hooks see it. Any other
weight that is computed is autograd's.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from splitpipe.core.dtensor import arrived, meshed
from splitpipe.core.note import add_note
from splitpipe.core.tensors import is_plain
from splitpipe.core.thread_state import without_autocast
from splitpipe.core.torch_private import (
    _is_any_autocast_enabled,
    _top_saved_tensors_default_hooks,
    _will_engine_execute_node,
    peek_interpreter_stack,
)
from splitpipe.deferral.function import Context, SplitFunction, WeightGradients, Weights, backward_input, forward
from splitpipe.deferral.pending import Node, PendingStore, WeightGroup
from splitpipe.deferral.report import Sightings

Needs = tuple[bool, ...]
#: Casts by weight's id, type and weight's version: the weight, referenced so that its id stays its own, and the cast.
Casts = dict[tuple[int, torch.dtype, int], tuple[Tensor, Tensor]]


class Origin(NamedTuple):
    """The microbatch of some calls, and the store for what they leave; ``now``: nothing should be held back."""

    store: PendingStore
    microbatch: int
    now: bool


class Split(Node):
    """A call in a stage. Its only edges are to the input and to a phony's node."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, phony: Tensor, group: WeightGroup, weights: Weights, options: dict[str, Any],
        origin: Origin, where: tuple[str, str],
    ) -> Tensor:
        """Calls a group's function with the weights given, which are cast if autocast casts them."""
        function = cast(type[SplitFunction], group.function)
        y = forward(ctx, function, Context(x.requires_grad, group.needs), x, weights, options)
        ctx.group, ctx.origin, ctx.where = group, origin, where  # Not the weights, which autograd keeps.
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        if _is_any_autocast_enabled():
            with without_autocast():
                return Split.backward(ctx, grad)
        group = ctx.group
        try:
            context, found = backward_input(ctx, group.function, ctx.needs_input_grad[0], group.needs, grad)
            # The phony's node: stored, it would be a cycle. Unless this backward comes to it, no weight is asked for.
            if _will_engine_execute_node(ctx.next_functions[1][0]):
                store, microbatch, now = ctx.origin
                store.put(group, context, grad, microbatch, now)
        except BaseException as error:
            add_note(error, "in the backward of {}, {}".format(*ctx.where))
            raise
        return found, *(None,) * 6


class StandIns(Node):
    """What compiled code computes with in place of its weights. Its only edge is to a phony's node.

    Autograd comes here when the code's backward is done, which has left to the store what their gradients are computed
    from. What an output that is a view of one has got arrives here itself.
    """

    @staticmethod
    def forward(
        ctx: Any, phony: Tensor, group: WeightGroup, weights: Sequence[Tensor], origin: Origin, where: tuple[str, str]
    ) -> tuple[Tensor, ...]:
        """Tensors with the weights' memory."""
        ctx.set_materialize_grads(False)
        ctx.group, ctx.origin, ctx.where = group, origin, where
        return tuple([weight.detach() for weight in weights])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if any([grad is not None for grad in grads]) and _will_engine_execute_node(ctx.next_functions[0][0]):
            store, microbatch, now = ctx.origin
            store.put(ctx.group, Arrived(grads), None, microbatch, now)
        return (None,) * 5


class Arrived:
    """Gradients of stand-ins: one for each weight, or None."""

    __slots__ = ("saved_for_weight",)

    def __init__(self, grads: tuple[Tensor | None, ...]) -> None:
        self.saved_for_weight = grads


_STAND_INS: Any = StandIns


def left_in(node: Any, function: WeightGradients, leave: Callable[[], Any]) -> bool:
    """Puts what a call of compiled code leaves in B into the store of its stage; False if it was called in none.

    Args:
        node: the call's, whose backward runs.
        function: the second half of its backward.
        leave: makes what that needs, as its ``ctx``.
    """
    for stands, _ in node.next_functions:
        if isinstance(stands, _STAND_INS._backward_cls) and stands.group.function is function:
            if _will_engine_execute_node(stands.next_functions[0][0]):
                store, microbatch, now = stands.origin
                store.put(stands.group, leave(), None, microbatch, now)
            return True
    return False


class Entry(NamedTuple):
    """A group of weights, its phony, and the type that all of the weights have."""

    group: WeightGroup
    phony: Tensor
    dtype: torch.dtype | None
    #: Referenced, so that their ids, which are in the entry's key, are not used again.
    weights: tuple[Any, ...]
    #: The weights that the function is called with: see ``_given``.
    given: tuple[Any, ...]


@dataclass
class Register:
    """The weights that one stage has met in a call of the model."""

    pending: PendingStore
    names: Mapping[int, str]  # The names of the stage's parameters, by id.
    sightings: Sightings
    casts: Casts = field(default_factory=dict)
    #: True if nothing was caught, by layer's number and whether the microbatch's weight gradients fill idle time.
    idle: dict[tuple[int, bool], bool] = field(default_factory=dict)
    _entries: dict[tuple[object, ...], Entry] = field(default_factory=dict)

    def enter(self, function: WeightGradients, weights: Weights, needs: Needs) -> Entry | str:
        """The entry of some weights, made when they are first met; or why they can't have one."""
        key = (function, needs, *map(id, weights))
        entry = self._entries.get(key)
        if entry is not None:
            if function.views and entry.given[0].data_ptr() != entry.weights[0].data_ptr():
                entry = self._entries[key] = entry._replace(given=_given(function, weights))
            return entry
        if not any(needs):
            return "its weights are frozen"
        plain = all([weight is None or is_plain(weight) for weight in weights])
        if not plain and not (function.meshed and meshed(*weights)):
            return "it is of a class of its own"
        wanted = [weight for weight, need in zip(weights, needs) if weight is not None and need]
        parameters: list[Tensor] = []
        for weight in wanted:
            parameter = _parameter(weight)
            if parameter is None:
                return "it is no parameter" if weight.is_leaf else "it is computed in forward"
            parameters.append(parameter)
        for parameter in parameters:
            if id(parameter) in self.names:  # Not the copy of one for another device, which is new in every call.
                self.sightings.deferred(parameter, _name(function))
        group = WeightGroup(function, weights, needs, self.names, parameters)
        entry = Entry(group, self.pending.phony(group, wanted), _common(weights), weights, _given(function, weights))
        if all([weight.is_leaf for weight in weights if weight is not None]):  # Else it is another in each microbatch.
            self._entries[key] = entry
        return entry


def _parameter(weight: Tensor) -> Tensor | None:
    """The parameter that a weight is, or a view of; None if it is neither."""
    if weight.is_leaf:
        return weight if isinstance(weight, Parameter) else None
    base, node = weight._base, weight.grad_fn
    if type(base) is not Parameter:
        return None
    while node is not None and not isinstance(node, BackwardCFunction):  # A function of the user's.
        if hasattr(node, "variable"):
            return base
        if len(node.next_functions) != 1:  # A parameter that was written to in place, say.
            return None
        ((node, _),) = node.next_functions
    return None


def _given(function: WeightGradients, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """The weights to call with. If autograd's function saves a view of the first one, a view made once replaces it.

    The view has the values of the forward even if somebody sets ``parameter.data``.
    """
    first, *others = weights
    return (first.view_as(first), *others) if function.views and first.is_leaf else weights


class Catch:
    """Calls split functions for the layers of one microbatch."""

    def __init__(self, register: Register, microbatch: int, now: bool, casts: Casts) -> None:
        self.register = register
        self._origin = Origin(register.pending, microbatch, now)
        self.fills, self._gathers = register.pending.gains(microbatch)
        self._casts = casts
        #: The saved-tensor hooks under which calls are caught: what saves under others is left to autograd.
        self.hooks = _top_saved_tensors_default_hooks(True)
        #: The layer that runs, and where, for messages.
        self.where = "", ""

    def call(
        self, function: type[SplitFunction], x: Tensor, weights: Weights, options: dict[str, Any]
    ) -> Tensor | None:
        """The output, or None if autograd is to handle the whole call."""
        x = x if type(x) is Tensor else arrived(x)
        entry = self._entry(function, x, weights, options)
        if type(x) is not Tensor:
            self.left((x,), f"{function.__name__} has it as its input")
        if isinstance(entry, str):
            self.left(weights, f"{function.__name__}: {entry}")
            return None
        given = entry.given
        if function.casts:
            found = entry.dtype
            if _is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
                x = x.to(dtype) if _castable(x) else x
                given = tuple([self._cast(weight, same, dtype) for weight, same in zip(weights, given)])
                found = _common(given)
            if found is not x.dtype:
                return None  # An error, in torch's words.
        y: Tensor = Split.apply(x, entry.phony, entry.group, given, options, self._origin, self.where)
        return y

    def stand_ins(self, function: WeightGradients, weights: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """What a call of compiled code is to compute with in place of its weights; None: with these."""
        why = self._unfit()
        entry = why or self.register.enter(function, tuple(weights), (True,) * len(weights))
        if isinstance(entry, str):
            self.left(weights, f"{_name(function)}: {entry}")
            return None
        found: tuple[Tensor, ...] = StandIns.apply(entry.phony, entry.group, weights, self._origin, self.where)
        return found

    def _unfit(self) -> str | None:
        """Why no call is deferred here."""
        if _top_saved_tensors_default_hooks(True) != self.hooks:
            return "it runs under saved-tensor hooks of its own"
        if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return "it runs inside a torch.func transform or forward-mode AD"
        return None

    def _entry(
        self, function: type[SplitFunction], x: Tensor, weights: Weights, options: dict[str, Any]
    ) -> Entry | str:
        """The entry of a call's weights; or why the call is left to autograd."""
        why = self._unfit()
        if why is not None:
            return why
        if not (meshed(x) if function.meshed else is_plain(x)):
            return "its input is of a class of its own"
        if type(x) is Parameter and x.requires_grad:
            return "its input is a parameter"  # A hook may step it before its value is read.
        if not function.pays(x, weights, options, self.fills, self._gathers):
            return "its gradients would take longer apart"
        needs = tuple([weight is not None and weight.requires_grad for weight in weights])
        return self.register.enter(function, weights, needs)

    def left(self, weights: Iterable[Tensor | None], why: str) -> None:
        """Notes weights whose gradient is left to autograd."""
        for weight in weights:
            if isinstance(weight, Parameter) and weight.requires_grad and id(weight) in self.register.names:
                self.register.sightings.left(weight, why)

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


def _name(function: Any) -> str:
    return str(function.__name__)


def _common(weights: Sequence[Tensor | None]) -> torch.dtype | None:
    found = {weight.dtype for weight in weights if weight is not None}
    return found.pop() if len(found) == 1 else None


def _castable(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype is not torch.float64
