"""The function mode that sees a stage's layers call torch, and has rules call split functions instead.

No module is touched: what a layer of the user's own calls is seen as nn.Linear's call is. A function without a rule,
or a call that its rule refuses, is autograd's whole. Calls made inside of a function of torch's are not seen, nor
calls of code that torch.compile has compiled.

A mode makes every function slower that is called under it, those written in Python by tens of microseconds. So it
stands aside for a layer in which it caught nothing in the first microbatch: a block of convolutions that don't gain.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from splitpipe.core.graph import LAST, reached, reserve
from splitpipe.core.note import uncompiled
from splitpipe.core.thread_state import set_function_modes
from splitpipe.core.torch_private import _get_current_function_mode_stack, tree_leaves
from splitpipe.core.torch_private import _skip_one_hop_torch_function as _INTO
from splitpipe.deferral import convolution, embedding, linear
from splitpipe.deferral.catch import Catch, Split, StandIns
from splitpipe.deferral.function import Rule, SplitFunction, WeightGradients, Weights, calling
from splitpipe.deferral.pending import WeightGroup

RULES: dict[Callable[..., Any], Rule] = {**linear.RULES, **convolution.RULES, **embedding.RULES}

#: A subclass of Tensor has a say in what a function does; one hop further down it would not be asked.
_PLAIN = frozenset([Tensor, Parameter])


class Deferring(TorchFunctionMode):
    """Sends calls of the rules' functions to a Catch."""

    def __init__(self, catch: Catch, noting: bool, stays: bool = False) -> None:
        super().__init__()
        self._catch = catch
        # True in a stage's first run: parameters that functions without a rule use are noted. A flag, and no subclass:
        # torch.compile compiles again under a mode of another class.
        self._noting = noting
        self._idle = catch.register.idle
        self._stays = stays  # In layers where it caught nothing, too: one is compiled, and would be compiled again.
        self._layer = -1
        self._caught = 0
        self._on = True

    def at(self, layer: str, where: str, compiled: bool = False) -> None:
        """Goes on to the next layer; which that is and where, for messages. Aside for one that SplitPipe compiles."""
        self._catch.where = layer, where
        if self._layer >= 0:
            self.note_idle()
        self._layer += 1
        if (compiled or self._idle.get((self._layer, self._catch.fills), False)) is self._on:
            self._turn()

    def as_it_is(self, parameters: Iterable[Tensor], why: str) -> None:
        """The layer that was to be compiled runs as it is: it is watched, as it will be when it is run again."""
        self.whole(parameters, why)
        if not self._on:
            self._turn()

    def whole(self, parameters: Iterable[Tensor], why: str) -> None:
        """Nothing is deferred of the layer of these parameters, which is compiled."""
        register = self._catch.register
        for parameter in parameters if self._noting else ():
            if id(parameter) in register.names:
                register.sightings.uncompiled(parameter, why)

    def _turn(self) -> None:
        self._on = not self._on
        others = [mode for mode in _get_current_function_mode_stack() if mode is not self]
        set_function_modes((self, *others) if self._on else others)

    def call(
        self, function: type[SplitFunction], x: Tensor, weights: Weights, options: dict[str, Any]
    ) -> Tensor | None:
        """A call of a split function that a layer makes itself."""
        return self._catch.call(function, x, weights, options)

    @property
    def where(self) -> tuple[str, str]:
        """The layer that runs, and where."""
        return self._catch.where

    def pays(
        self, function: type[SplitFunction], x: Tensor, weights: Sequence[Tensor | None], options: dict[str, Any]
    ) -> bool:
        """Never: what it declines is left to autograd."""
        return False

    def stand_ins(self, function: WeightGradients, weights: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """What compiled code computes with in place of its weights."""
        return self._catch.stand_ins(function, weights)

    def note_idle(self) -> None:
        """The layer has run: whether anything was caught there counts for the microbatches to come."""
        self._idle.setdefault((self._layer, self._catch.fills), not self._caught and not self._stays)
        self._caught = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Enters the mode as the outermost one: the user's modes see every function before it does."""
        reserve(LAST + 1)  # A Flush alone has that.
        modes = _get_current_function_mode_stack()
        set_function_modes((self, *modes))
        try:
            with calling(self):
                yield
            self.note_idle()
        finally:
            set_function_modes(modes)

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # First of all: what comes next, the compiler would compile. Not is_compiling(), which is true in every thread
        # while any of them compiles.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        if self._noting:
            self._note(func, args, kwargs or {})
        rule = RULES.get(func)
        if rule is not None:
            y = self._ruled(func, rule, args, kwargs or {})
            if y is not None:
                return y
        elif func in BACKWARDS:
            _verify_nested(func, args, kwargs or {})
        elif func is F.multi_head_attention_forward and _INTO is not None and _PLAIN.issuperset(types):
            with self:  # Written in Python: its projections are linear layers, one function further down.
                return _INTO(func, types, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _ruled(self, func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        try:
            found = rule(*args, **kwargs)
        except (TypeError, ValueError):  # Arguments that the function itself will find fault with.
            return None
        if not isinstance(found, str) and not getattr(found[2][0], "requires_grad", False):
            found = "its weight is frozen"  # For the gradient of a bias it is not worth keeping the input.
        if isinstance(found, str):
            # Not by tree_leaves, which takes longer than most functions do. Rules' functions take no nested values.
            given = [x for x in (*args, *kwargs.values()) if type(x) is Parameter or isinstance(x, Parameter)]
            self._catch.left(given, f"{_name(func)}: {found}")
            return None
        y = self._catch.call(*found)
        self._caught += y is not None
        return y

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # Such a use gives no gradient. Compiled code runs so; autograd has it whole.
            return
        if func not in RULES and func is not F.multi_head_attention_forward and _name(func) not in _LOOKS:
            found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Parameter)]
            if found:
                self._catch.left(found, f"{_name(func)} has no rule")


#: They ask for an attribute, or give a view: neither uses a weight.
_LOOKS = frozenset(
    "__get__ t transpose permute split chunk view reshape size dim _is_view numel nelement ndimension stride detach "
    "is_contiguous is_floating_point is_complex element_size storage_offset untyped_storage data_ptr".split()
)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


_SPLIT: Any = Split._backward_cls, StandIns._backward_cls

#: The functions that go backward, each with two arguments: the start, and the tensors to reach (None: all).
BACKWARDS: dict[Any, tuple[str, str]] = {
    torch.autograd.grad: ("outputs", "inputs"),
    torch.autograd.backward: ("tensors", "inputs"),
    Tensor.backward: ("self", "inputs"),
}


def _verify_nested(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a layer's own backward, inside its forward, to weights whose gradients a schedule defers."""
    # In the drop-in pipeline, the graph of a split call leads to its weights through the stash's Flush. In a schedule
    # it ends at a phony, and W adds to the stage's sums. A layer that asks for such a weight's gradient in its forward
    # would get None, or a gradient scaled by the loss; so it is refused.
    outputs, inputs = differentiated(func, args, kwargs)
    asked = None if inputs is None else {id(x if x._base is None else x._base) for x in inputs}
    for node in reached((x.grad_fn, 0) for x in outputs).nodes:
        if not isinstance(node, _SPLIT) or node.origin.store.reaches_weights:
            continue
        group: WeightGroup = node.group
        if asked is None or not asked.isdisjoint(map(id, group.parameters)):
            raise RuntimeError(
                f"a layer goes backward inside its own forward, to the gradient of {group}, which a schedule computes "
                "after its own backward: expected SplitPipe(..., backward='autograd') with such a layer."
            )


def differentiated(
    func: Any, args: Iterable[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor] | None]:
    """The outputs that a call of one of BACKWARDS starts from, and the inputs that it is to reach (None: all)."""
    given = signature(func).bind(*args, **kwargs).arguments
    outputs, inputs = (given.get(name) for name in BACKWARDS[func])
    return _tensors(outputs), None if inputs is None else _tensors(inputs)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value
    return [x for x in values if isinstance(x, Tensor)]
