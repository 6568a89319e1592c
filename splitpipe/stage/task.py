"""One microbatch on one stage: its layers in order, checkpointed or not, with the caller's state and random numbers.

A worker runs a microbatch on a stage with ``Task.__call__``, inside these contexts, outermost first:

    stream  >  caller's state  >  context variables  >  checkpoint's hooks  >  random numbers  >  layers

A recomputation (``stage.run``) has the same nesting around the same layers, in whatever thread runs backward.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core import dtensor, microbatch, thread_state
from splitpipe.core.graph import unleaf
from splitpipe.core.note import add_note
from splitpipe.core.rng import Numbers, RngMode
from splitpipe.core.tensors import sharing, storage_of, version_of
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.deferral.function import calling
from splitpipe.skip.box import Key, opened
from splitpipe.stage.call import Activation, Call
from splitpipe.stage.checkpoint import Fill, Frame, Remade
from splitpipe.stage.run import StageRun
from splitpipe.stage.stage import Block

Skips = dict[Key, Activation]


@dataclass
class Result:
    """The results of one microbatch on one stage."""

    value: Activation
    skips: Skips
    frame: Remade | None


class Task:
    """One microbatch on one stage, in a state (``inside``: the worker's own); must be called in the stage's worker."""

    #: False if the caller adds a note to errors of the forward.
    notes = True

    def __init__(
        self, stage: Block, call: Call, i: int, value: Activation, skips: Skips, state: State, inside: bool = False
    ) -> None:
        self.stage = stage
        self.number = i, len(call.rows)
        self.value = value
        self.skips = skips
        self.state = state
        self.call = call
        self.checkpoint = i < call.checkpointed
        self.whole = call.shared
        self.inside = inside
        self.calls: Sequence[Callable[[Any], Any]] = stage.own.calls
        self._first = True
        #: True for a block inside a stage that has the default generator to itself.
        self.held = False

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
        self.call.seeds.drew |= drew
        return made

    def seed(self) -> int:
        """The seed of the microbatch on the stage."""
        return self.call.seeds.of(self.stage.index, self.number[0])

    def _checkpointed(self) -> Result:
        stage, facts = self.stage, self.stage.facts
        if self.state.hooks_disabled is not None:
            raise RuntimeError(
                f"{self.state.hooks_disabled}. Checkpointing uses saved-tensor hooks: expected them to be enabled "
                "where the model is called. Use checkpoint='never', or leave disable_saved_tensors_hooks first."
            )
        leaves = self.given()
        versions = self.versions(leaves)
        run = StageRun(
            stage, self.call, self.state, self.seed(), leaves, self.run, str(stage),
            in_place=facts.in_place is not False, held=self.held,
        )

        def again(fill: Fill) -> None:
            run.again(lambda given: fill(lambda: self.rerun(_each_once(_unleafed, given)), run.snapshot.passing))

        if facts.first is None:
            facts.first = weakref.ref(self.call)
        frame = Frame(again, stage.saved_directly, holds=facts.assigns or facts.first() is self.call)
        with torch.autograd.graph.saved_tensors_hooks(*frame.hooks()):
            (made, (value, skips)), drew = run.forward(leaves)
        moved = run.snapshot.moved
        kept = frame.close(moved)
        facts.assigns = facts.assigns or moved
        self.call.seeds.drew |= drew
        if stage.shared:
            run.keep(made)
        self.note_writes(versions, leaves)
        if moved and not kept or facts.in_place and not run.in_place and not kept:
            what = "assigned a parameter, buffer or submodule" if moved else "wrote to its input in place"
            raise RuntimeError(
                f"{stage} {what} in its forward, which it hadn't done before, so this microbatch can't be recomputed: "
                "expected layers that always or never do. What it takes is kept from now on; repeat the step."
            )
        self.drop()
        return Result(value, skips, None if kept else frame)

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
            if self.notes or doing != "forward":
                add_note(error, f"in the {doing} of {own.described[at]}, {where}")
            raise
        return out, skips

    def rerun(self, leaves: list[Any]) -> tuple[Activation, Skips]:
        """Recomputes the layers."""
        out, skips = self._layers(leaves, "recomputation")
        for leaf in _leaves(out, skips):
            dtensor.wait(leaf)
        return out, skips


def _each_once(change: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """The changed values; one that occurs twice stays one, because layers (such as attention) compare with ``is``."""
    made: dict[int, Any] = {}
    for value in values:
        if id(value) not in made:
            made[id(value)] = change(value)
    return [made[id(value)] for value in values]


def _entering(leaf: Any) -> Any:
    """A stage's input, as a recomputation gets it: the output of a node, or not a parameter."""
    # A parameter that another stage passes on unchanged would otherwise be saved as itself, but only in the forward.
    x = leaf if type(leaf) is Tensor else dtensor.arrived(leaf)
    if isinstance(x, Tensor) and torch.is_grad_enabled():
        with DisableTorchFunction():  # Function modes would see that an attribute is read.
            if x.requires_grad:
                return unleaf(x) if x.is_leaf else x
            return x.detach() if isinstance(x, nn.Parameter) else x
    return x


def _unleafed(leaf: Any) -> Any:
    return unleaf(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


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
