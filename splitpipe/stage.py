"""One microbatch on one stage: its layers in order, checkpointed or not, in the caller's state and a seed's numbers.

What a stage does is a call that a worker makes: ``Task.__call__``, in the order

    stream  >  caller's state  >  context variables  >  checkpoint's hooks  >  random numbers  >  layers

A recomputation is the same nesting around the same layers, in whatever thread goes backward.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from splitpipe import blame, context, microbatch, phase, randomness, stream
from splitpipe.checkpoint import Frame, Kept
from splitpipe.context import Hooks, State
from splitpipe.note import add_note
from splitpipe.partition import Place
from splitpipe.randomness import DeviceState, Manner
from splitpipe.skip.box import Key, opened
from splitpipe.snapshot import Clones, Found, Inventory, Snapshot
from splitpipe.stream import Stream


@dataclass
class Knowledge:
    """What runs of a stage have shown, for one setting of its layers' train and eval modes."""

    manner: Manner = Manner.UNKNOWN
    #: Whether the stage writes to its input in place. None: no run yet.
    in_place: bool | None = None
    #: Whether any of its nodes is a Python function. None: no run yet.
    python: bool | None = None
    compared: bool = False


@dataclass
class Memory:
    """What a stage keeps from pass to pass. Copies of a model start without."""

    known: dict[tuple[bool, ...], Knowledge] = field(default_factory=dict)
    clones: Clones = field(default_factory=Clones)


@dataclass
class Parcel:
    """A value on its way between stages: its leaves, and their nesting."""

    leaves: list[Any]
    spec: TreeSpec

    @property
    def differentiable(self) -> list[int]:
        """Which leaves autograd goes through."""
        return [k for k, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]


Skips = dict[Key, Parcel]


class Stage:
    """A stage for the time of one pass.

    Args:
        index: of the stage.
        place: its device.
        layers: name and module of each of its layers.
        memory: what earlier passes have learnt of it.
        compute: the stream it computes on.
        checkpointing: whether any microbatch of this pass is checkpointed.
    """

    def __init__(
        self,
        index: int,
        place: Place,
        layers: Sequence[tuple[str, nn.Module]],
        memory: Memory,
        compute: Stream,
        checkpointing: bool,
    ) -> None:
        self.index = index
        self.place = place
        self.layers = layers
        self.compute = compute
        self.inventory = Inventory(layers)
        self.parameters: list[Found] = self.inventory.parameters() if checkpointing else []
        self.clones = memory.clones
        self.known = memory.known.setdefault((torch.is_grad_enabled(), *self.inventory.modes), Knowledge())

    def __str__(self) -> str:
        return f"stage {self.index} ({self.place})"


@dataclass
class Result:
    """What a microbatch leaves a stage with."""

    value: Parcel
    skips: Skips
    drew: bool
    frame: Frame | None


@dataclass
class Task:
    """One microbatch on one stage, to be called in the stage's worker.

    Args:
        stage: the stage.
        number: of the microbatch, and how many there are.
        value: what the stage before gave.
        skips: what arrives over skips.
        state: the caller's.
        variables: the microbatch's context variables, which every stage may change for those after it.
        seed: of its random numbers.
        checkpoint: whether to drop what autograd saves.
    """

    stage: Stage
    number: tuple[int, int]
    value: Parcel
    skips: Skips
    state: State
    variables: Context
    seed: int
    checkpoint: bool

    def __call__(self) -> Result:
        with stream.use(self.stage.compute), context.entered(self.state):
            return self.variables.run(self._checkpointed if self.checkpoint else self._plain)

    def _plain(self) -> Result:
        leaves = _leaves(self.value, self.skips)
        versions = _versions(leaves)
        run = randomness.run(lambda: self._layers(leaves, "forward"), self.seed, self.stage.known.manner)
        value, skips = run.value
        self._learn(run.manner, versions, leaves)
        return Result(value, skips, run.drew, None)

    def _checkpointed(self) -> Result:
        stage, known = self.stage, self.stage.known
        leaves = _leaves(self.value, self.skips)
        rerun = _Rerun(self, leaves, Snapshot(stage.inventory, stage.parameters, stage.clones))
        frame = Frame(rerun, {id(found.tensor) for found in stage.parameters})
        if known.in_place is not False:
            # The recomputation starts from the input as it is now.
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = _versions(leaves)
        with phase.entered("checkpointing"), torch.autograd.graph.saved_tensors_hooks(*frame.hooks()):
            run = randomness.run(lambda: self._layers(leaves, "forward"), self.seed, known.manner)
        frame.close()
        value, skips = run.value
        if not known.compared:
            rerun.snapshot.compare()
            known.compared = True
        was = known.in_place
        self._learn(run.manner, versions, leaves)
        if was is False and known.in_place:
            raise RuntimeError(
                f"{stage} wrote to its input in place, which it had not done before, so that this microbatch can't be "
                "recomputed: expected a layer that always or never does. The stage now gets copies; repeat the step."
            )
        rerun.in_place = bool(known.in_place)
        return Result(value, skips, run.drew, frame)

    def _learn(self, manner: Manner, versions: list[int], leaves: list[Any]) -> None:
        known = self.stage.known
        known.manner = manner
        known.in_place = bool(known.in_place) or versions != _versions(leaves)

    def _layers(self, leaves: list[Any], doing: str) -> tuple[Parcel, Skips]:
        """Runs the layers on a copy of the flat input; gives the flat output and what is stashed for later stages."""
        stage, (number, count) = self.stage, self.number
        at = len(self.value.leaves)
        value = microbatch.unflatten(leaves[:at], self.value.spec)
        box: dict[Key, Any] = {}
        for key, parcel in self.skips.items():
            box[key] = microbatch.unflatten(leaves[at : at + len(parcel.leaves)], parcel.spec)
            at += len(parcel.leaves)
        where = f"{stage}, microbatch {number} of {count}"
        watched: list[tuple[str, list[Any]]] | None = None
        if torch.is_grad_enabled() and doing == "forward" and stage.known.python is not False:
            watched = []
        start = [] if watched is None else blame.nodes(leaves)
        name, layer = "", None
        try:
            with opened(box):
                for name, layer in stage.layers:
                    value = layer(value)
                    if watched is not None:
                        text = f"in the backward of layer {name!r} ({_kind(layer)}), {where}"
                        watched.append((text, blame.nodes(value)))
            whose = f"the output of layer {name!r} ({_kind(layer)})"
            out = Parcel(*microbatch.flatten(value, whose))
            skips = {key: Parcel(*microbatch.flatten(skip, f"the skip {key[1]!r}")) for key, skip in box.items()}
        except BaseException as error:
            add_note(error, f"in the {doing} of layer {name!r} ({_kind(layer)}), {where}")
            raise
        if watched is not None:
            watched.append((f"in the backward of {where}", blame.nodes([parcel.leaves for parcel in skips.values()])))
            stage.known.python = blame.watch(start, watched)
        return out, skips

    def rerun(self, leaves: list[Any]) -> None:
        """The layers once more, for what they save."""
        self._layers(leaves, "recomputation")


class _Rerun:
    """Runs a checkpointed microbatch again, as it ran."""

    def __init__(self, task: Task, leaves: list[Any], snapshot: Snapshot) -> None:
        self._inputs = [Kept(leaf, task.state.hooks) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # The task without its value: the nesting is needed, the tensors are kept above.
        bare = {key: _bare(parcel) for key, parcel in task.skips.items()}
        self._task = Task(
            task.stage, task.number, _bare(task.value), bare, task.state, task.variables.copy(), task.seed, False
        )
        self._device_state = DeviceState(task.stage.place.device)
        self._manner = task.stage.known.manner
        self.snapshot = snapshot
        self.in_place = True

    def __call__(self, hooks: Hooks) -> None:
        task = self._task
        with stream.use(task.stage.compute), context.entered(task.state):
            task.variables.copy().run(self._run, hooks)

    def _run(self, hooks: Hooks) -> None:
        task = self._task
        leaves = [
            given.again(str(task.stage), self.in_place) if isinstance(given, Kept) else given for given in self._inputs
        ]
        with self.snapshot.restored(), self._device_state.restored(), phase.entered("recomputing"):
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                randomness.run(lambda: task.rerun(leaves), task.seed, self._manner)


def _bare(parcel: Parcel) -> Parcel:
    return Parcel([None] * len(parcel.leaves), parcel.spec)


def _leaves(value: Parcel, skips: Skips) -> list[Any]:
    return [*value.leaves, *(leaf for parcel in skips.values() for leaf in parcel.leaves)]


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _kind(layer: object) -> str:
    return type(layer).__name__
