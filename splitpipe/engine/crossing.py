"""The values of one microbatch that cross from stage to stage, wherever the module's code keeps them.

    stage 0    h = embed(ids)            h has a graph on stage 0
    stage 1    block(h, mask)            a block's arguments cross where it is called
               h.mean()                  others, where a torch function between blocks uses them: Follow

A value crosses once a stage, known by the tensor that the code refers to. A later stage takes it from the last one that
had it, with all that was written to it there. Which stage has made a tensor with a graph follows from the number of its
node, since one thread runs all of a forward; another microbatch's thread counts alike (see ``partition.attributes``).
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from splitpipe.core import stream
from splitpipe.core.note import uncompiled
from splitpipe.core.tensors import storage_of, version_of
from splitpipe.core.torch_private import DisableTorchFunction, _get_sequence_nr, tree_flatten, tree_unflatten
from splitpipe.engine.step import StepRun
from splitpipe.partition.placement import Placement
from splitpipe.stage.call import Activation
from splitpipe.stage.segment import enter
from splitpipe.stage.shared_parameters import SharedParameters


class _Value:
    """A value that has crossed: its tensors, the latest one last, the stage of that one, and its version there."""

    __slots__ = ("stage", "tensors", "version")

    def __init__(self, x: Tensor, stage: int) -> None:
        self.tensors = [x]  # They are kept, so that no other tensor gets their identity.
        self.stage, self.version = stage, version_of(x)


_MISSED = (
    "a value from an earlier stage, or an argument, was written to in place, and another value from there shares its "
    "memory, or another microbatch does: it would miss the write. Write to a copy (x.clone())."
)


class Crossing:
    """The values of one microbatch, as its current stage sees them; ``link``: see ``_bring``.

    They reach later stages detached; their gradients return to the segments that made them.
    """

    one_graph = False  #: Whether values stay in one graph.

    def __init__(
        self, step: StepRun, i: int, placement: Placement, shared: SharedParameters,
        link: Callable[[Tensor, Tensor], None] | None,
    ) -> None:
        self._step, self._i, self._placement, self._shared, self._link = step, i, placement, shared, link
        self._stage = 0
        self._first_nodes: list[int] = []  #: The number of the first node of each stage.
        self._ends: dict[int, torch.Event] = {}  #: Of F of each stage: copies of its values wait for no more.
        self._values: dict[int, _Value] = {}
        #: The storages of values that were written to after they had crossed, and of what others have, too.
        self._written, self._tainted = set[int](), set[int]()

    def begin(self, stage: int) -> None:
        """Called when F of a stage begins: on another stream of their device, it waits for earlier stages."""
        self._stage = stage
        self._first_nodes.append(_get_sequence_nr())
        for earlier in range(stage):
            route = self._step.route(earlier, stage)
            if route is not None and route.source == route.target:
                stream.wait_for(route.computes[1], self._ends[earlier])

    def enter(self, given: Activation) -> list[Any]:
        """The leaves of what the caller has given, as they enter the current stage's graph."""
        leaves = self._entered(given)
        for x in [leaves[k] for k in given.shared]:  # With other ones, maybe of other microbatches.
            if isinstance(x, Tensor) and x.requires_grad:
                self._values[id(x)] = _Value(x, self._stage)
                self._tainted.add(storage_of(x))
        return leaves

    def _entered(self, given: Activation) -> list[Any]:
        segment = self._step.stages[self._stage].fwd_cache.get(self._i)
        return given.leaves if segment is None else enter([given], segment)[0]

    def stage_of(self, x: Tensor) -> int:
        """The stage in whose graph a tensor is."""
        value = self._values.get(id(x))
        if value is not None and value.tensors[-1] is x:  # Views of an earlier one are in the graph of that.
            return value.stage
        assert x.grad_fn is not None
        return max(0, bisect_right(self._first_nodes, x.grad_fn._sequence_nr()) - 1)

    def here(self, x: Tensor) -> Tensor:
        """The tensor for the current stage: itself, or its counterpart."""
        value = self._values.get(id(x))
        if value is not None:
            return value.tensors[-1] if value.stage == self._stage else self._bring(x, value)
        if x.grad_fn is not None:
            source, base = self.stage_of(x), x._base
            if source != self._stage:
                return self._bring(x, _Value(x, source))
            if base is not None and base.grad_fn is not None and self.stage_of(base) != source:
                raise RuntimeError(_MISSED)  # After a write, autograd makes a view's node again where it is used.
            return x
        if self._placement.is_elsewhere(x, self._stage):
            return self._bring(x, _Value(x, self._placement.stage_on(x.device, self._stage)))
        stream.hold(x, self._step.stages[self._stage].compute)  # Another stream of the device may have made it.
        return x

    def _bring(self, x: Tensor, value: _Value) -> Tensor:
        """A value of another stage, for this one; ``link`` is called with a tensor and its counterpart there."""
        with DisableTorchFunction():  # Unseen by function modes.
            if (copy := self._shared.copy(x, self._stage)) is not None:
                return copy
            y = self._carry(value.tensors[-1], value.stage, self._stage)
            value.tensors.append(y)
            value.stage, value.version = self._stage, version_of(y)
            self._values[id(x)] = self._values[id(y)] = value
            if self._link is not None:
                self._link(x, y)
            return y

    def _carry(self, x: Tensor, source: int, stage: int) -> Tensor:
        step, i = self._step, self._i
        tracked = x.requires_grad and step.call.state.grad
        if tracked and source >= stage:
            raise RuntimeError(f"stage {stage} uses a tensor with a graph of stage {source}, which comes later.")
        y, route = x.detach() if tracked else x, step.route(source, stage)
        if route is not None and x.device == route.source:
            [y], event = route.carry([y], step.timed(stage), self._ends.get(source))
            if event is not None:
                stream.wait_for(step.stages[stage].compute, event)
        if not tracked:
            return y
        origin = source, step.stages[source].fwd_cache[i].leave(x)
        return step.stages[stage].fwd_cache[i].enter([y], [origin])[0]

    def end(self) -> None:
        """Called when F of a stage ends: raises for a write to a value that shares memory with another one."""
        values = {id(value): value for value in self._values.values()}.values()
        written = [value.tensors[0] for value in values if version_of(value.tensors[-1]) != value.version]
        if written or self._written:
            self._written.update(map(storage_of, written))
            storages = [storage_of(value.tensors[0]) for value in values]
            if any([each in self._tainted or storages.count(each) > 1 for each in self._written - {0}]):
                raise RuntimeError(_MISSED)  # Each has crossed as a separate copy.
        if (event := stream.mark(self._step.stages[self._stage].compute)) is not None:
            self._ends[self._stage] = event

    def leave(self, x: Tensor) -> Tensor:
        """An output as it was last; to ``end``, one of an earlier stage is a value, as if it had crossed."""
        if id(x) not in self._values and x.grad_fn is not None:
            if (source := self.stage_of(x)) == self._stage:
                return self.here(x)
            self._values[id(x)] = _Value(x, source)
        return self.latest(x)

    def latest(self, x: Tensor) -> Tensor:
        """The tensor as it was last, on whichever stage."""
        value = self._values.get(id(x))
        return x if value is None else value.tensors[-1]

    def close(self) -> None:
        """Forgets all values at the end of the forward."""
        self._values.clear()
        self._link = None  # It refers to losses, with their graphs.


#: Functions that ask for facts, for which nothing needs to cross.
_ASKING = frozenset("size dim numel stride is_contiguous is_floating_point is_complex element_size retain_grad".split())
_BACKWARDS = torch.autograd.grad, torch.autograd.backward, Tensor.backward


class Follow(TorchFunctionMode):
    """Sees functions outside blocks, and gives them the tensors of the current stage: see ``Crossing.here``."""

    later = False  #: Whether a later stage than the first one has begun.

    def __init__(self, crossing: Crossing) -> None:
        super().__init__()
        self._here, self._latest, self._one_graph = crossing.here, crossing.latest, crossing.one_graph

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self._one_graph and func in _BACKWARDS:
            return func(*args, **(kwargs or {}))  # Of the tensors themselves, to which what has crossed leads back.
        if self.later and func in _BACKWARDS:  # It stops where values have crossed: an input there would lose a part.
            inputs, _ = tree_flatten(args[1] if name == "grad" else (kwargs or {}).get("inputs"))
            if any([x.grad_fn is None or self._here(x) is not x for x in inputs if isinstance(x, Tensor)]):
                raise RuntimeError(
                    "the module's forward runs backward between blocks, to a parameter or a value of an earlier stage: "
                    "expected it inside one block, backward='autograd', or other cuts= with checkpoint='never'."
                )
        change = self._latest if name in _ASKING else self._here
        if name == "__get__":  # A property: of most of them, a value other than a tensor.
            value = func(*changed(args, self._latest), **(kwargs or {}))
            if not isinstance(value, Tensor):
                return value
        return func(*changed(args, change), **changed(kwargs, change)) if kwargs else func(*changed(args, change))


_PLAIN = frozenset([int, float, complex, bool, str, type(None), torch.dtype, torch.device])
#: Types of arguments that are neither containers nor objects.
SIMPLE = _PLAIN | {Tensor, Parameter}


def changed(value: Any, change: Callable[[Any], Any], of: type = Tensor) -> Any:
    """A nesting with its tensors, or what is ``of`` another type, changed; what has no change stays the same object."""
    # Without pytree, which takes as long as some functions do.
    kind = type(value)
    if kind is of or kind is Parameter:
        return change(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list or kind is dict:
        parts = [*value.values()] if kind is dict else value
        new: Any = [changed(each, change, of) for each in parts]
        if all(map(is_, new, parts)):
            return value
        return new if kind is list else tuple(new) if kind is tuple else dict(zip(value, new))
    leaves, structure = tree_flatten(value)
    new = [change(x) if isinstance(x, of) else x for x in leaves]
    return value if all(map(is_, new, leaves)) else tree_unflatten(new, structure)
