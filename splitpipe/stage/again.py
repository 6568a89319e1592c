"""A checkpointed block, run and recomputed with as little context as it needs.

Its first run is an ordinary one, in the surrounding graph, on the caller's own tensors. It shows what the block does.
If the block can't be recomputed separately (for example, because it has written to its input), its result stays as it
is, and later microbatches get the full context of a stage (``stage.stage``). Otherwise, the graph is dropped, and a
node takes its place. A tensor kept from inside keeps the part of the graph that leads to it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from splitpipe.core import stream, thread_state
from splitpipe.core.graph import Edge, enter, kinds_of, reached
from splitpipe.core.note import add_note
from splitpipe.core.phase import in_phase
from splitpipe.core.rng import DeviceState, Numbers
from splitpipe.core.tensors import storage_of
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.stage.call import Call
from splitpipe.stage.checkpoint import WRITTEN
from splitpipe.stage.saved import saved_apart
from splitpipe.stage.snapshot import Snapshot
from splitpipe.stage.stage import Stage


class Made(NamedTuple):
    """The graph that a recomputation has made."""

    #: The edges of the inputs that require grad.
    entered: list[GradientEdge]
    #: The leaves of the output.
    leaves: list[Any]
    numbers: range  #: The sequence numbers of its nodes.
    #: Equal for two runs that make the same nodes.
    kinds: Any


class _Kept:
    """A tensor among the arguments, kept for a recomputation."""

    __slots__ = ("hooks", "requires_grad", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.tensor = x.detach()
        self.version = x._version
        self.requires_grad = x.requires_grad
        self.hooks = _hooks_of(x)

    def keep(self) -> None:
        """Copies it with its memory layout, on which it depends whether a reshape of it is a view."""
        x = self.tensor
        base = x
        for dim, stride in enumerate(x.stride()):
            if not stride and x.shape[dim]:  # Expanded.
                base = base.narrow(dim, 0, 1)
        reach = 0
        for stride, size in sorted(zip(base.stride(), base.shape)):
            if size > 1 and stride <= reach:  # Elements overlap, and can't be written separately.
                self.tensor = x.clone()
                break
            reach += stride * (size - 1)
        else:
            y = torch.empty_strided(base.shape, base.stride(), dtype=x.dtype, device=x.device).copy_(base)
            self.tensor = y.expand(x.shape)
        self.version = self.tensor._version


def _hooks_of(x: Tensor) -> int:
    return len(x._backward_hooks or ())


class BlockRun:
    """One microbatch on one block: ``first``, then a recomputation for each call."""

    __slots__ = (
        "_batch", "_device", "_given", "_handed", "_leaves", "_numbers", "_run_block", "_snapshot", "_state",
        "_variables", "call", "entered", "stage", "where",
    )

    def __init__(
        self, stage: Stage, call: Call, state: State, seed: int, leaves: Sequence[Any],
        run: Callable[[list[Any]], tuple[list[Any], Any]], where: str, handed: bool = False,
    ) -> None:
        """Collects what a recomputation needs.

        Args:
            stage: the block, as a stage.
            call: the call of the model.
            state: the thread's state.
            seed: for the block's random numbers.
            leaves: those of the arguments.
            run: the block, as a function of the leaves of its arguments; returns those of its value, and their nesting.
            where: names the block, for messages.
            handed: whether others may write to arguments that the block passes on.
        """
        self._handed = handed
        self.stage, self.call, self.where = stage, call, where
        self._state, self._run_block = state, run
        self._variables = copy_context()
        known: dict[int, Any] = {}
        self.entered: list[Tensor] = []  #: The arguments that require grad.
        for x in leaves:
            if isinstance(x, Tensor) and id(x) not in known:
                known[id(x)] = kept = _Kept(x)
                if kept.requires_grad:
                    self.entered.append(x)
        self._given = leaves
        self._leaves = [known.get(id(x), x) if isinstance(x, Tensor) else x for x in leaves]
        self._batch = call.batch if call.batch is not None and call.batch.shares(leaves) else None
        self._device = DeviceState(stage.own.place.device)
        compiled = stage.inventory.compiled
        self._numbers = Numbers(seed, stage.facts, again=True, owned=stage.generators, compiled=compiled)
        self._snapshot = Snapshot(stage.inventory, stage.parameters, stage.clones, not stage.facts.compared)

    def first(self) -> tuple[list[Any], Any, bool, Any]:
        """The leaves of the value, their nesting, whether random numbers were drawn, and which nodes were made.

        None if the block can't be recomputed like this: it has written to its input, made parameters, or added hooks to
        its input, which belongs to the surrounding graph.
        """
        given, self._given = self._given, ()
        stage, facts, snapshot = self.stage, self.stage.facts, self._snapshot
        before = _get_sequence_nr()
        with in_phase("checkpointing"):
            (made, nesting), drew = self._numbers.draw(lambda: self._run_block([*given]))
        last, ends = _get_sequence_nr(), {(x.grad_fn, x.output_nr) for x in self.entered}
        if facts.threads is None:  # A layer may differentiate, which makes nodes in autograd's thread.
            facts.threads = reached(_roots(made), ends, range(before, last)).others
        kinds = self._kinds(made, ends, last - before)
        if any([type(y) is _Kept and _hooks_of(x) != y.hooks for x, y in zip(given, self._leaves)]):
            facts.plain = False
        facts.in_place = any([type(x) is _Kept and x.tensor._version != x.version for x in self._leaves])
        if self._handed and not facts.in_place:
            self._keep({storage_of(x) for x in made if isinstance(x, Tensor)} - {0})
        stage.inventory = snapshot.close()
        if not facts.compared:
            snapshot.compare()
            facts.compared = True
        grown = snapshot.grown
        if grown:
            facts.foreign = None  # This call doesn't know parameters that it has made.
        return made, nesting, drew, None if facts.in_place or grown else kinds

    def _keep(self, storages: Collection[int]) -> None:
        """Copies arguments in these storages."""
        for kept in self._leaves:
            if type(kept) is _Kept and storage_of(kept.tensor) in storages:
                kept.keep()

    def __call__(self) -> Made:
        """Recomputes the block."""
        if self.stage.pending is not None:
            self.stage.pending.make_room()
        with stream.use(self.stage.compute), thread_state.entered(self._state):
            return self._variables.copy().run(self._redraw)

    def _redraw(self) -> Made:
        found: list[Made] = []
        snapshot, numbers = self._snapshot, self._numbers

        def run() -> None:
            found[:] = []
            found[:] = [self._run()]

        def apart() -> None:
            with saved_apart(snapshot.volatile):
                run()

        with in_phase("recomputing"):
            if snapshot.untouched():
                numbers.redraw(run)
            else:
                numbers.redraw(lambda: snapshot.replay(lambda: copy_context().run(apart), numbers.restart))
        return found[0]

    def _run(self) -> Made:
        if self._batch is not None:
            self._batch.verify()
        inside: dict[int, Tensor] = {}
        entered: list[GradientEdge] = []
        leaves: list[Any] = []
        first = _get_sequence_nr()
        for kept in self._leaves:
            if type(kept) is not _Kept:
                leaves.append(kept)
                continue
            x = inside.get(id(kept))
            if x is None:
                x = kept.tensor.detach()
                if x._version != kept.version:
                    raise RuntimeError(WRITTEN.format(f"input of {self.where}"))
                if kept.requires_grad:
                    x = enter(x.requires_grad_())
                    # Like get_gradient_edge, which makes a view to keep the node alive. The tensor does so, too.
                    entered.append(GradientEdge(x.grad_fn, 0, x))  # type: ignore[arg-type]
                inside[id(kept)] = x
            leaves.append(x)
        before = _get_sequence_nr()
        try:
            with self._device.restored():
                made, _ = self._run_block(leaves)
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


def _roots(made: Sequence[Any]) -> list[Edge]:
    return [(x.grad_fn, x.output_nr) for x in made if isinstance(x, Tensor) and x.grad_fn is not None]


def plain(leaves: Sequence[Any], state: State) -> bool:
    """True if arguments and a thread's state need nothing more than a BlockRun provides."""
    return (
        state.grad and not state.inference and state.hooks is None and state.hooks_disabled is None
        and not state.function_modes and not state.dispatch_modes
        and all([not isinstance(x, Tensor) or type(x) in TENSORS and not x.is_inference() for x in leaves])
    )


TENSORS = frozenset([torch.Tensor, Parameter])


def may_be_plain(stage: Stage) -> bool:
    """True unless a stage is known to need more context."""
    plain = stage.facts.plain
    # What a lazy module has before its first run isn't a parameter yet.
    return not any(map(is_lazy, stage.parameters.tensors)) if plain is None else plain
