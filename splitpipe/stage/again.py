"""A checkpointed block, run and run again with as little around it as it needs.

The first run of a block has everything around it that a stage has (``stage.stage``). It shows what the block is like:
one that writes to none of its arguments, takes no containers and has no compiled code is *plain*. So are most, and
their later runs are made here. Each run still looks whether the block has kept to it: what else it does is an error
that says so, and is known in the next step.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from splitpipe.core import stream, thread_state
from splitpipe.core.graph import Edge, enter
from splitpipe.core.note import add_note
from splitpipe.core.rng import DeviceState, Numbers
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import _get_sequence_nr
from splitpipe.phase import in_phase
from splitpipe.stage.call import Call
from splitpipe.stage.checkpoint import WRITTEN
from splitpipe.stage.saved import saved_apart
from splitpipe.stage.snapshot import Snapshot
from splitpipe.stage.stage import Stage


class Made(NamedTuple):
    """The graph that another run has made."""

    #: The edges of the inputs that require grad.
    entered: list[GradientEdge]
    #: The leaves of the output.
    leaves: list[Any]
    numbers: range  #: The sequence numbers of its nodes.
    #: Equal for two runs that make the same nodes.
    kinds: Any


class _Kept:
    """A tensor among the arguments, for another run."""

    __slots__ = ("requires_grad", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.tensor = x.detach()
        self.version = x._version
        self.requires_grad = x.requires_grad


class BlockRun:
    """One microbatch on one block: ``first``, then the same once more for each call."""

    __slots__ = (
        "_batch", "_call", "_device", "_leaves", "_numbers", "_put", "_snapshot", "_stage", "_state",
        "_variables", "_where", "edges", "entered", "outside",
    )

    def __init__(
        self, stage: Stage, call: Call, state: State, seed: int, leaves: Sequence[Any],
        run: Callable[[list[Any]], tuple[list[Any], Any]], where: str,
    ) -> None:
        """Takes what another run needs.

        Args:
            stage: the block, as a stage.
            call: of the model.
            state: of the thread.
            seed: of the block's random numbers.
            leaves: of the arguments.
            run: the block, by leaves of its arguments; gives those of its value, and their nesting.
            where: that is, for messages.
        """
        self._stage, self._state, self._call, self._where = stage, state, run, where
        self._variables = copy_context()
        known: dict[int, Any] = {}
        self.outside: dict[int, Tensor] = {}  #: The caller's tensors, by the identity of those that the block has.
        self.entered: list[Tensor] = []  #: Those of the caller's that require grad.
        self.edges: set[Edge] = set()  #: Of these, as the first run's graph has them.
        inside: dict[int, Tensor] = {}
        for x in leaves:
            if isinstance(x, Tensor) and id(x) not in known:
                known[id(x)] = kept = _Kept(x)
                if kept.requires_grad:
                    inside[id(x)] = y = enter(x.detach().requires_grad_())
                    self.outside[id(y)] = x
                    self.entered.append(x)
                    self.edges.add((y.grad_fn, 0))
                elif isinstance(x, Parameter):
                    inside[id(x)] = y = kept.tensor
                    self.outside[id(y)] = x
        self._leaves = [known.get(id(x), x) if isinstance(x, Tensor) else x for x in leaves]
        self._put = [inside.get(id(x), x) if isinstance(x, Tensor) else x for x in leaves]
        self._batch = call.batch if call.batch is not None and call.batch.shares(leaves) else None
        device = stage.own.place.device
        self._device = None if device.type == "cpu" else DeviceState(device)
        self._numbers = Numbers(seed, stage.facts, again=True, owned=stage.generators)
        self._snapshot = Snapshot(stage.inventory, stage.parameters, stage.clones)

    def first(self) -> tuple[list[Any], Any, bool, int]:
        """The leaves of the value, their nesting, whether random numbers were drawn, and how many nodes were made."""
        put, self._put = self._put, []
        thread_state.forget_casts(self._state)
        before = _get_sequence_nr()
        with in_phase("checkpointing"):
            (made, nesting), drew = self._numbers.draw(lambda: self._call(put))
        count = _get_sequence_nr() - before
        stage = self._stage
        for kept in self._leaves:
            if type(kept) is _Kept and kept.tensor._version != kept.version:
                stage.facts.in_place = True
                raise RuntimeError(
                    f"{stage.own.described[0]} wrote to its input in place, which it had not done before, so that this "
                    "microbatch can't be recomputed: expected a layer that always or never does. A copy is now kept; "
                    "repeat the step."
                )
        stage.inventory = self._snapshot.close()
        if self._snapshot.grown:
            stage.facts.plain = False
            raise RuntimeError(
                f"{stage.own.described[0]} made modules or parameters in its forward, which it had not done before: "
                "their gradients would be lost. It is known now; repeat the step."
            )
        return made, nesting, drew, count

    def __call__(self) -> Made:
        """Another run."""
        if self._stage.pending is not None:
            self._stage.pending.make_room()
        with stream.use(self._stage.compute), thread_state.entered(self._state):
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
                    raise RuntimeError(WRITTEN.format(f"input of {self._stage.own.described[0]}"))
                if kept.requires_grad:
                    x = enter(x.requires_grad_())
                    entered.append(get_gradient_edge(x))
                inside[id(kept)] = x
            leaves.append(x)
        before = _get_sequence_nr()
        try:
            with nullcontext() if self._device is None else self._device.restored():
                made, _ = self._call(leaves)
        except BaseException as error:
            add_note(error, f"in the recomputation of {self._where}")
            raise
        last = _get_sequence_nr()
        return Made(entered, made, range(first, last), last - before)


def plain(leaves: Sequence[Any], state: State) -> bool:
    """True if arguments and a thread's state need nothing more than a BlockRun does."""
    return (
        state.grad and not state.inference and state.hooks is None and state.hooks_disabled is None
        and not state.function_modes and not state.dispatch_modes
        and all([not isinstance(x, Tensor) or type(x) in _TENSORS and not x.is_inference() for x in leaves])
    )


_TENSORS = frozenset([torch.Tensor, Parameter])
