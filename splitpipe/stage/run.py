"""One microbatch on a stage, or on a block of one: a first run, and recomputations that repeat it.

A recomputation has the first run's inputs, random numbers, context variables, thread state and stream, and finds the
modules as the first run found them. What is made of it depends on who asks: the tensors that the first run saved
(``stage.checkpoint``), or a graph (``SeparateRun``).

The first run of a SeparateRun is an ordinary one, in the surrounding graph, on the caller's own tensors. It shows what
the block does. If the block can't be recomputed separately (for example, because it has written to its input), its
result stays as it is, and later microbatches get saved-tensor hooks. Otherwise, the graph is dropped, and a node takes
its place. A tensor kept from inside keeps the part of the graph that leads to it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from splitpipe.core import generator, stream, thread_state
from splitpipe.core.graph import Edge, enter, kinds_of, reached
from splitpipe.core.note import add_note
from splitpipe.core.phase import in_phase
from splitpipe.core.rng import DeviceState, DisturbedError, Numbers
from splitpipe.core.tensors import is_plain, storage_of, version_of
from splitpipe.core.thread_state import Hooks, State
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.stage.call import Call
from splitpipe.stage.checkpoint import WRITTEN
from splitpipe.stage.saved import saved_apart
from splitpipe.stage.snapshot import Snapshot
from splitpipe.stage.stage import Block

T = TypeVar("T")


class SavedInput:
    """A tensor that a recomputation starts from."""

    __slots__ = ("_hooks", "_in_place", "_packed", "_strides", "_version", "requires_grad")

    def __init__(self, leaf: Tensor, hooks: Hooks | None = None, in_place: bool = False) -> None:
        self.requires_grad = leaf.requires_grad
        self._in_place = in_place
        x = leaf.detach()  # The input itself would keep the graph of every earlier stage alive.
        self._strides = x.stride() if is_plain(x) else None
        if in_place:
            x = x.clone()  # The stage uses the input itself, as without a pipeline.
        # The caller's hooks pack the kept tensor: they may move it to the CPU, or recompute it.
        self._hooks = hooks
        self._packed = x if hooks is None else hooks[0](x)
        self._version = None if hooks is not None else version_of(x)

    @property
    def written(self) -> bool:
        """True if it was written to since."""
        return self._version is not None and self._packed._version != self._version

    def keep(self, storages: Collection[int]) -> None:
        """Copies it if it is in one of these storages."""
        if self._hooks is None and not self._in_place and storage_of(self._packed) in storages:
            self._packed = self._packed.clone()
            self._version = version_of(self._packed)

    def again(self, whose: str) -> Tensor:
        """The tensor as the first run found it, outside its graph."""
        x: Tensor = self._packed if self._hooks is None else self._hooks[1](self._packed)
        if self._version is not None and x._version != self._version:
            raise RuntimeError(WRITTEN.format(f"input of {whose}"))
        x = x.detach()
        if self._strides is not None and x.stride() != self._strides:
            x = _laid_out(x, self._strides)
        elif self._in_place:
            x = x.clone()
        return x.requires_grad_() if self.requires_grad else x


def _laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides, on which it depends whether a reshape of it is a view."""
    shape = x.shape
    for dim, stride in enumerate(strides):
        if not stride and shape[dim]:  # Expanded.
            x = x.narrow(dim, 0, 1)
    reach, overlapping = 0, False
    for stride, size in sorted(zip(strides, x.shape)):
        overlapping |= size > 1 and stride <= reach
        reach += stride * (size - 1)
    if overlapping and x.numel():  # As after unfold: elements can't be written separately.
        memory = x.new_empty(reach + 1)
        memory[torch.arange(reach + 1, device=x.device).as_strided(x.shape, strides)] = x
        return memory.as_strided(x.shape, strides).expand(shape)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x).expand(shape)


class StageRun:
    """One microbatch on one stage or block: ``forward``, then a recomputation for each call of ``again``.

    Args:
        stage: the stage, or the block as a stage.
        call: the call of the model.
        state: the thread's state.
        seed: for random numbers.
        leaves: the flat input.
        run: the layers, as a function of the flat input; returns the flat output and its nesting.
        where: names the stage or block, for messages.
        in_place: whether the layers may write to the input.
        held: whether it is a block inside a stage that has the default generator to itself.
    """

    __slots__ = (
        "_batch", "_device", "_inputs", "_lock", "_numbers", "_run", "_state", "_variables", "call", "in_place",
        "snapshot", "stage", "where",
    )

    def __init__(
        self, stage: Block, call: Call, state: State, seed: int, leaves: Sequence[Any],
        run: Callable[[list[Any]], tuple[list[Any], Any]], where: str, *, in_place: bool = False, held: bool = False,
    ) -> None:
        self.stage, self.call, self.where, self.in_place = stage, call, where, in_place
        self._state, self._run = state, run
        self._variables = copy_context()
        self._lock: Any = None  # The generator's, while the first run isn't over.
        known: dict[int, SavedInput] = {}  # One that occurs twice stays one: layers (attention) compare with ``is``.
        for x in leaves:
            if isinstance(x, Tensor) and id(x) not in known:
                known[id(x)] = SavedInput(x, state.hooks, in_place)
        self._inputs = [known.get(id(x), x) if isinstance(x, Tensor) else x for x in leaves]
        self._batch = call.batch if call.batch is not None and call.batch.shares(leaves) else None
        self._device = DeviceState(stage.own.place.device)
        facts, inventory = stage.facts, stage.inventory
        self._numbers = Numbers(
            seed, facts, again=True, owned=stage.generators, compiled=inventory.compiled, held=held
        )
        self.snapshot = Snapshot(inventory, stage.parameters, stage.clones, not facts.compared)

    def forward(self, leaves: Sequence[Any]) -> tuple[tuple[list[Any], Any], bool]:
        """The flat output and its nesting, given the input itself; and whether random numbers were drawn."""
        def run() -> tuple[list[Any], Any]:
            self._lock = generator.lock_here()
            return self._run([*leaves])

        try:
            with in_phase("checkpointing"):
                found = self._numbers.draw(run)
        finally:
            self._lock = None
        stage, facts = self.stage, self.stage.facts
        stage.inventory = self.snapshot.close()
        if not facts.compared:
            self.snapshot.compare()
            facts.compared = True
        return found

    def keep(self, outputs: Sequence[Any]) -> None:
        """Copies inputs that are passed on: others may write to them."""
        storages = {storage_of(x) for x in outputs if isinstance(x, Tensor)} - {0}
        for each in self._inputs:
            if type(each) is SavedInput:
                each.keep(storages)

    def again(self, use: Callable[[list[Any]], T]) -> T:
        """Recomputes: calls ``use`` with the input, each tensor a leaf."""
        if self.stage.pending is not None:
            self.stage.pending.make_room()
        with stream.use(self.stage.compute), thread_state.entered(self._state):
            return self._variables.copy().run(self._redraw, use)

    def _redraw(self, use: Callable[[list[Any]], T]) -> T:
        found: list[T] = []
        if self._lock is not None:
            # A layer of the first run differentiates, and waits for this; on accelerators, in another thread.
            generator.inherit_lock(self._lock)

        def run() -> None:
            found[:] = []
            found[:] = [self._used(use)]

        def restored() -> None:
            with self.snapshot.restored():
                copy_context().run(run)

        with in_phase("recomputing"):
            try:
                self._numbers.redraw(run if self.snapshot.untouched() else restored)
            except DisturbedError:
                self.call.seeds.doubts()
                raise
        return found[0]

    def _used(self, use: Callable[[list[Any]], T]) -> T:
        if self._batch is not None:
            self._batch.verify()
        inside: dict[int, Tensor] = {}
        leaves: list[Any] = []
        for each in self._inputs:
            if type(each) is SavedInput:
                x = inside.get(id(each))
                if x is None:
                    x = inside[id(each)] = each.again(self.where)
                leaves.append(x)
            else:
                leaves.append(each)
        with self._device.restored():
            return use(leaves)


class Made(NamedTuple):
    """The graph that a recomputation has made."""

    #: The edges of the inputs that require grad.
    entered: list[GradientEdge]
    #: The leaves of the output.
    leaves: list[Any]
    numbers: range  #: The sequence numbers of its nodes.
    #: Equal for two runs that make the same nodes.
    kinds: Any


class SeparateRun(StageRun):
    """A run whose recomputations make separate graphs; ``handed``: others may write to inputs that it passes on."""

    __slots__ = ("_given", "_handed", "entered")

    def __init__(
        self, stage: Block, call: Call, state: State, seed: int, leaves: Sequence[Any],
        run: Callable[[list[Any]], tuple[list[Any], Any]], where: str, *, handed: bool = False, held: bool = False,
    ) -> None:
        super().__init__(stage, call, state, seed, leaves, run, where, held=held)
        self._given, self._handed = leaves, handed
        #: The inputs that require grad.
        self.entered = [*{id(x): x for x in leaves if isinstance(x, Tensor) and x.requires_grad}.values()]

    def first(self) -> tuple[list[Any], Any, bool, Any]:
        """The leaves of the value, their nesting, whether random numbers were drawn, and which nodes were made.

        None if the block can't be recomputed like this: it has written to its input, assigned to its modules, or added
        hooks to its input, which belongs to the surrounding graph.
        """
        given, self._given = self._given, ()
        facts, hooks = self.stage.facts, _hooks_of(given)
        # Before the run, or else autograd would make the node of a view whose memory was written to during it.
        ends = {(x.grad_fn, x.output_nr) for x in self.entered}
        before = _get_sequence_nr()
        (made, nesting), drew = self.forward(given)
        last = _get_sequence_nr()
        if facts.threads is None:  # A layer may differentiate, which makes nodes in autograd's thread.
            facts.threads = reached(_roots(made), ends, range(before, last)).others
        kinds = self._kinds(made, ends, last - before)
        if hooks != _hooks_of(given):
            facts.plain = False
        facts.in_place = any([type(x) is SavedInput and x.written for x in self._inputs])
        if self._handed and not facts.in_place:
            self.keep(made)
        moved = self.snapshot.moved
        if moved:
            facts.own_nodes = None  # This call doesn't know parameters that it has made.
        return made, nesting, drew, None if facts.in_place or moved else kinds

    def __call__(self) -> Made:
        """Recomputes the block."""
        return self.again(self._made)

    def _made(self, leaves: list[Any]) -> Made:
        entered: list[GradientEdge] = []
        inside: dict[int, Tensor] = {}
        first = _get_sequence_nr()
        for k, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.requires_grad:
                y = inside.get(id(x))
                if y is None:
                    y = inside[id(x)] = enter(x)
                    # Like get_gradient_edge, which makes a view to keep the node alive. The tensor does so, too.
                    entered.append(GradientEdge(y.grad_fn, 0, y))  # type: ignore[arg-type]
                leaves[k] = y
        before = _get_sequence_nr()
        try:
            with saved_apart(self.snapshot.volatile):
                made, _ = self._run(leaves)
        except BaseException as error:
            add_note(error, f"in the recomputation of {self.where}")
            raise
        last = _get_sequence_nr()
        ends = {(edge.node, edge.output_nr) for edge in entered}
        return Made(entered, made, range(first, last), self._kinds(made, ends, last - before))

    def _kinds(self, made: list[Any], ends: set[Edge], count: int) -> Any:
        """A value that is equal for two runs: how many nodes they make; or which, if torch may make different numbers.

        Autocast may have cached a cast, and the compiler may use another graph.
        """
        stage, cast = self.stage, any([enabled for _, enabled, _ in self._state.autocast])
        return count if not stage.inventory.compiled and not cast and not stage.facts.threads else kinds_of(
            _roots(made), ends
        )


def _hooks_of(leaves: Sequence[Any]) -> list[int]:
    return [len(x._backward_hooks or ()) for x in leaves if isinstance(x, Tensor)]


def _roots(made: Sequence[Any]) -> list[Edge]:
    return [(x.grad_fn, x.output_nr) for x in made if isinstance(x, Tensor) and x.grad_fn is not None]


def plain(leaves: Sequence[Any], state: State) -> bool:
    """True if arguments and a thread's state need nothing more than a SeparateRun provides."""
    return (
        state.grad and not state.inference and state.hooks is None and state.hooks_disabled is None
        and not state.function_modes and not state.dispatch_modes
        and all([not isinstance(x, Tensor) or type(x) in TENSORS and not x.is_inference() for x in leaves])
    )


TENSORS = frozenset([torch.Tensor, Parameter])


def may_be_plain(stage: Block) -> bool:
    """True unless a stage is known to need more context."""
    plain = stage.facts.plain
    # What a lazy module has before its first run isn't a parameter yet.
    return not any(map(is_lazy, stage.parameters.tensors)) if plain is None else plain
