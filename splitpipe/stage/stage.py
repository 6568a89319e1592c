"""One microbatch on one stage: its layers in order, checkpointed or not, with the caller's state and random numbers.

A worker runs a microbatch on a stage with ``Task.__call__``, inside these contexts, outermost first:

    stream  >  caller's state  >  context variables  >  checkpoint's hooks  >  random numbers  >  layers

A recomputation has the same nesting around the same layers, in whatever thread runs backward.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core import dtensor, generator, microbatch, stream, thread_state
from splitpipe.core.graph import unleaf
from splitpipe.core.note import add_note
from splitpipe.core.phase import in_phase
from splitpipe.core.rng import DeviceState, Numbers, RngMode
from splitpipe.core.tensors import sharing, storage_of, version_of
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.deferral.function import calling
from splitpipe.deferral.pending import PendingStore
from splitpipe.skip.box import Key, opened
from splitpipe.stage.call import Activation, Call
from splitpipe.stage.checkpoint import Fill, Frame, Remade, SavedInput
from splitpipe.stage.inventory import Parameters
from splitpipe.stage.layers import ReportedStage, StageCache, StageFacts, StageLayers
from splitpipe.stage.saved import SavedDirectly
from splitpipe.stage.snapshot import Snapshot

Skips = dict[Key, Activation]


class Stage(ReportedStage):
    """A stage during one call; weight gradients wait in ``pending``, or are left to autograd."""

    def __init__(
        self, own: StageLayers, cache: StageCache, call: Call, pending: PendingStore | None = None
    ) -> None:
        self.own = own
        self.index = own.index
        self.device = own.place.device
        #: Takes gradients of microbatches that have separate graphs; None: everything is in one graph.
        self.sink: Any = None
        self.compute = call.computes[own.index]
        #: True if others get its outputs themselves, rather than copies on another device.
        self.shared = call.computes.count(self.compute) > 1
        self.inventory = own.inventory()
        if call.checkpointed:
            self.parameters = Parameters(self.inventory)
            self.generators = self.inventory.generators()
            self.saved_directly = SavedDirectly(self.parameters.tensors)
        self.pending = pending
        self.sightings = cache.sightings
        self.clones = cache.clones
        self.facts = cache.facts.setdefault((torch.is_grad_enabled(), *self.inventory.modes), StageFacts())
        self.look()

    @property
    def compiled(self) -> bool:
        """True if a layer is compiled."""
        return self.inventory.compiled


@dataclass
class Result:
    """The results of one microbatch on one stage."""

    value: Activation
    skips: Skips
    frame: Remade | None


class Task:
    """One microbatch on one stage, in a state (``inside``: the worker's own); must be called in the stage's worker."""

    def __init__(
        self, stage: Stage, call: Call, i: int, value: Activation, skips: Skips, state: State, inside: bool = False
    ) -> None:
        self.stage = stage
        self.number = i, len(call.rows)
        self.value = value
        self.skips = skips
        self.state = state
        self.variables = call.contexts[i]  # The context that it runs in.
        self.seeds = call.seeds
        self.checkpoint = i < call.checkpointed
        self.batch = call.batch
        self.whole = call.shared
        self.inside = inside
        self.calls: Sequence[Callable[[Any], Any]] = stage.own.calls
        self._first = True

    def __call__(self) -> Result:
        with nullcontext() if self.inside else thread_state.entered(self.state):
            if self.checkpoint:
                return self._checkpointed()
            facts = self.stage.facts
            leaves = self.given()
            versions = self.versions(leaves)
            if facts.rng is RngMode.NONE:
                value, skips = self._layers(leaves, "forward")
            else:
                numbers = Numbers(self.seed(), facts, compiled=self.stage.inventory.compiled)
                value, skips = self._drawn(numbers, leaves)
            self.note_writes(versions, leaves)
            return Result(value, skips, None)

    def given(self) -> list[Any]:
        """The flat input."""
        return _each_once(_entering, _leaves(self.value, self.skips))

    @staticmethod
    def versions(leaves: list[Any]) -> list[int | None]:
        """The versions of tensors, which show in-place writes."""
        return [version_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]

    def run(self, leaves: list[Any]) -> tuple[list[Any], tuple[Activation, Skips]]:
        """The leaves of the layers' output for a flat input, and their nesting; later calls are recomputations."""
        first, self._first = self._first, False
        out, skips = self._layers(leaves, "forward") if first else self.rerun(leaves)
        return _leaves(out, skips), (out, skips)

    def drop(self) -> None:
        """Forgets values whose nesting is needed for a recomputation."""
        self.value, self.whole = _bare(self.value), []
        self.skips = {key: _bare(activation) for key, activation in self.skips.items()}

    def _drawn(self, numbers: Numbers, leaves: list[Any]) -> tuple[Activation, Skips]:
        made, drew = numbers.draw(lambda: self._layers(leaves, "forward"))
        if drew:
            self.seeds.drew = True
        return made

    def seed(self) -> int:
        """The seed of the microbatch on the stage."""
        return self.seeds.of(self.stage.index, self.number[0])

    def _checkpointed(self) -> Result:
        stage, facts = self.stage, self.stage.facts
        if self.state.hooks_disabled is not None:
            raise RuntimeError(
                f"{self.state.hooks_disabled}. Checkpointing uses saved-tensor hooks: expected them to be enabled "
                "where the model is called. Use checkpoint='never', or leave disable_saved_tensors_hooks first."
            )
        leaves = self.given()
        versions = self.versions(leaves)
        rerun = _Rerun(self, leaves, in_place=facts.in_place is not False)
        rerun.forward = self.variables
        frame = Frame(rerun, stage.saved_directly)
        with in_phase("checkpointing"), torch.autograd.graph.saved_tensors_hooks(*frame.hooks()):
            value, skips = self._drawn(rerun.numbers, leaves)
        frame.close()
        if stage.shared:
            rerun.keep([*value.leaves, *(leaf for skip in skips.values() for leaf in skip.leaves)])
        stage.inventory = rerun.snapshot.close()
        rerun.forward = None
        if not facts.compared:
            rerun.snapshot.compare()
            facts.compared = True
        self.note_writes(versions, leaves)
        if facts.in_place and not rerun.in_place:
            raise RuntimeError(
                f"{stage} wrote to its input in place, which it hadn't done before, so this microbatch can't be "
                "recomputed: expected a layer that always or never does. A copy is now kept; repeat the step."
            )
        return Result(value, skips, frame)

    def note_writes(self, versions: list[int | None], leaves: list[Any]) -> None:
        """Records whether the layers wrote to the input, and raises if others share its memory."""
        facts = self.stage.facts
        now = self.versions(leaves)
        if versions == now:
            facts.in_place = bool(facts.in_place)
            return
        facts.in_place = True
        written = {id(x) for x, before, after in zip(leaves, versions, now) if before != after}
        wrong = [x for x in self._tainted() if id(x) in written]
        if {*map(storage_of, wrong)} & {*map(storage_of, self.whole)} - {0}:
            raise RuntimeError(
                f"{self.stage} wrote in place to an input that batched= leaves whole: all microbatches share its "
                "memory. Write to a copy (x.clone()) in the layer, or use True for it in batched= if it is part "
                "of the batch."
            )
        if wrong:
            raise RuntimeError(
                f"{self.stage} wrote in place to an input that shares memory with another value between stages: the "
                "gradient of the other would miss the write. Return a copy (x.clone()) from the layer that returns "
                "both, or don't work in place here."
            )

    def _tainted(self) -> list[Tensor]:
        """The inputs that share memory with other values between stages."""
        return [activation.leaves[k] for activation in (self.value, *self.skips.values()) for k in activation.shared]

    def _layers(self, leaves: list[Any], doing: str) -> tuple[Activation, Skips]:
        """Runs the layers on a copy of the flat input; returns the flat output and what is stashed for later stages."""
        own, (number, count) = self.stage.own, self.number
        at = len(self.value.leaves)
        value = microbatch.unflatten(leaves[:at], self.value.spec)
        box: dict[Key, Any] = {}
        for key, activation in self.skips.items():
            box[key] = microbatch.unflatten(leaves[at : at + len(activation.leaves)], activation.spec)
            at += len(activation.leaves)
        where = f"{own.name}, microbatch {number} of {count}"
        caller = self.stage.caller(number)
        tainted = self._tainted()
        at = 0
        try:
            # If no layer is skippable, the box isn't used.
            inside = opened(box) if box or own.skippable else nullcontext()
            with inside, calling(caller):
                for at, call in enumerate(self.calls):
                    if caller is not None:
                        caller.where = own.described[at], where
                    value = call(value)
            out = Activation(*microbatch.flatten(value, f"the output of {own.described[-1]}"))
            skips = {key: Activation(*microbatch.flatten(skip, f"the skip {key[1]!r}")) for key, skip in box.items()}
            if doing == "forward" and (tainted or skips or len(out.leaves) > 1):
                _mark_shared([out, *skips.values()], tainted)
        except BaseException as error:
            add_note(error, f"in the {doing} of {own.described[at]}, {where}")
            raise
        return out, skips

    def bare(self) -> Task:
        """The task without its values, whose nesting is needed, and with the current variables."""
        task = object.__new__(type(self))
        vars(task).update(vars(self))  # copy.copy would take ten times as long.
        task.drop()
        task.variables = self.variables.copy()
        return task

    def rerun(self, leaves: list[Any]) -> tuple[Activation, Skips]:
        """Recomputes the layers."""
        out, skips = self._layers(leaves, "recomputation")
        for leaf in _leaves(out, skips):
            dtensor.wait(leaf)
        return out, skips


class _Rerun:
    """Recomputes a checkpointed microbatch."""

    def __init__(self, task: Task, leaves: list[Any], in_place: bool) -> None:
        self.in_place = in_place
        #: The variables of a forward that isn't over yet: a layer differentiates inside it, and waits for the engine.
        self.forward: Context | None = None
        self._batch = task.batch if task.batch is not None and task.batch.shares(leaves) else None
        hooks = task.state.hooks
        self._inputs = _each_once(
            lambda leaf: SavedInput(leaf, hooks, in_place) if isinstance(leaf, Tensor) else leaf, leaves
        )
        self._task = task.bare()  # The tensors are kept above.
        stage = task.stage
        self._device_state = DeviceState(stage.own.place.device)
        facts, inventory = stage.facts, stage.inventory
        self.numbers = Numbers(task.seed(), facts, again=True, owned=stage.generators, compiled=inventory.compiled)
        self.snapshot = Snapshot(inventory, stage.parameters, stage.clones, not facts.compared)

    def keep(self, outputs: Sequence[Any]) -> None:
        """Copies inputs that the stage passes on: others may write to them."""
        storages = {storage_of(x) for x in outputs if isinstance(x, Tensor)} - {0}
        for given in self._inputs:
            if isinstance(given, SavedInput):
                given.keep(storages)

    def __call__(self, fill: Fill) -> None:
        task = self._task
        if task.stage.pending is not None:
            task.stage.pending.make_room()
        with stream.use(task.stage.compute), thread_state.entered(task.state):
            task.variables.copy().run(self._redraw, fill)

    def _redraw(self, fill: Fill) -> None:
        if self.forward is not None:
            generator.inherit_lock(self.forward)  # On accelerators, the engine uses another thread.
        with in_phase("recomputing"):
            run = partial(self._run, fill)
            self.numbers.redraw(lambda: self.snapshot.replay(lambda: copy_context().run(run), self.numbers.restart))

    def _run(self, fill: Fill) -> None:
        task = self._task
        if self._batch is not None:
            self._batch.verify()
        leaves = _each_once(
            lambda given: given.again(str(task.stage)) if isinstance(given, SavedInput) else given,
            self._inputs,
        )
        with self._device_state.restored():
            fill(lambda: task.rerun(leaves), self.snapshot.passing)


def _each_once(change: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """The changed values; one that occurs twice stays one, because layers (such as attention) compare with ``is``."""
    made: dict[int, Any] = {}
    for value in values:
        if id(value) not in made:
            made[id(value)] = change(value)
    return [made[id(value)] for value in values]


def _entering(leaf: Any) -> Any:
    """A stage's input, as ``SavedInput`` gives it to a recomputation: the output of a node, or not a parameter."""
    # A parameter that another stage passes on unchanged would otherwise be saved as itself, but only in the forward.
    x = leaf if type(leaf) is Tensor else dtensor.arrived(leaf)
    if isinstance(x, Tensor) and torch.is_grad_enabled():
        with DisableTorchFunction():  # Function modes would see that an attribute is read.
            if x.requires_grad:
                return unleaf(x) if x.is_leaf else x
            return x.detach() if isinstance(x, nn.Parameter) else x
    return x


def _bare(activation: Activation) -> Activation:
    return Activation([None] * len(activation.leaves), activation.spec)


def _leaves(value: Activation, skips: Skips) -> list[Any]:
    return [*value.leaves, *(leaf for activation in skips.values() for leaf in activation.leaves)]


def _mark_shared(activations: list[Activation], tainted: list[Tensor]) -> None:
    marked = sharing([leaf for activation in activations for leaf in activation.leaves], tainted)
    at = 0
    for activation in activations if marked else []:
        activation.shared = frozenset(k - at for k in marked if at <= k < at + len(activation.leaves))
        at += len(activation.leaves)
