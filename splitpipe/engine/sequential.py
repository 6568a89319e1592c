"""A microbatch's way through the stages of an nn.Sequential: a call for each, since there is no code between them.

    for stage in stages:
        value, skips = received and entered         from the stages that have made them
        value, left = layers(value, skips)
        value, left = detached and sent

A checkpointed stage runs like any other, with grad, so that hooks, attributes and ``requires_grad`` inside are what
they are without a pipeline. Then its graph is dropped, and R makes it again from what had entered. Both run on copies
of that, to which a layer may write in place.
"""
from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from splitpipe.core import stream, thread_state
from splitpipe.core.note import add_note
from splitpipe.core.random_numbers import RNGStates
from splitpipe.core.tensors import sharing, version_of, wait_for_collectives
from splitpipe.engine.drop_in import Output
from splitpipe.engine.step import StepRun
from splitpipe.loss.objective import MICROBATCH, TARGET
from splitpipe.microbatch.tree import flatten, unflatten, verify_open
from splitpipe.skip.tracker import Key, opened
from splitpipe.stage.call import Activation
from splitpipe.stage.recomputation import CheckpointedRun
from splitpipe.stage.segment import RunningStage, Segment, detach

#: Values by key: that of a skip, of the target; None: the input or output.
Values = dict[Key | None, Activation]


class SequentialForward:
    """A microbatch of an nn.Sequential; ``target``: for the loss, if that is the last layer."""

    own_forward = False  #: Whether its forward is one call, which stays on its thread's stack between two stages.

    def __init__(self, step: StepRun, i: int, activation: Activation, target: Activation | None = None) -> None:
        self._step, self._i, self._target = step, i, target
        self._sent: Values = {None: activation}
        self.output: Output | None = None

    def forward(self, j: int) -> None:
        """F of a stage."""
        step, call, i, stage = self._step, self._step.call, self._i, self._step.stages[j]
        own, last, segment = stage.own, j == len(step.stages) - 1, Segment()
        given = {key: self._sent.pop(key) for key in (None, *own.arriving) if key in self._sent}
        for value in given.values():
            if value.event is not None:
                stream.wait_for(stage.compute, value.event)
        if last and self._target is not None:
            given[TARGET], given[MICROBATCH] = self._target, Activation(*flatten(i), [None])
        if call.state.grad:
            stage.fwd_cache[i] = segment
        layers = partial(run_layers, step, stage, i, given, segment, "forward")
        with thread_state.use(call.state):
            if i < call.checkpointed:
                run = CheckpointedRun(own.recomputed, RNGStates(stage.device, call.watched), stage.name)
                values = run.first(layers)
                if step.drop_in:
                    segment.close(False, own)  # It shows the leaves; it is dropped with this frame.
                stage.fwd_cache[i] = Segment(partial(_recompute, i, given, _versions(given), _signatures(values), run))
            else:
                values = layers()
                if call.state.grad:
                    segment.close(step.split, own)
        if step.drop_in:
            stage.reached.update(segment.graph.reached)
        output = values[None]
        if last and self._target is not None:
            step.scheduled.start_backward(i, output.leaves[0], output.origins[0])
        elif last:
            left = {id(x): (x, *origin) for x, origin in zip(output.leaves, output.origins) if origin is not None}
            self.output = Output(output.leaves, output.nesting, left)  # type: ignore[arg-type]
        for key, target in () if last else ((None, j + 1), *own.leaving):
            if key in values:
                value = self._sent[key] = values[key]
                if (route := step.route(j, target)) is not None:
                    value.leaves, value.event = route.carry(value.leaves, step.timed(j))


def _recompute(
    i: int, given: Values, versions: list[int | None], signatures: list[Any], run: CheckpointedRun,
    step: StepRun, stage: RunningStage,
) -> Segment:
    """R: the segment, with its graph. It isn't bound to the stage, whose ``fwd_cache`` refers to it."""
    segment = Segment()
    if versions != _versions(given):
        raise RuntimeError(
            f"the input of {stage.name} was written to in place after its forward, as through a hook or an attribute: "
            "expected it as the forward saw it, for its recomputation. Write to a copy (x.clone())."
        )
    with thread_state.use(step.call.state):
        values = run.recompute(partial(run_layers, step, stage, i, given, segment, "recomputation"))
        if _signatures(values) != signatures:
            raise RuntimeError(
                f"{stage.name} returned other outputs in its recomputation than in its forward: expected layers that "
                "depend on their inputs and parameters alone, or checkpoint='never'."
            )
        segment.close(step.split, stage.own)
    return segment


def run_layers(
    step: StepRun, stage: RunningStage, i: int, given: Values, segment: Segment | None, doing: str
) -> Values:
    """What a stage's layers return (by None) and stash for given values; ``doing``: "forward" or "recomputation".

    ``segment``: the graph that these values enter, and what is returned has left; None: they stay in one graph.
    """
    own, leaves = stage.own, [x for value in given.values() for x in value.leaves]
    if segment is not None:
        if i < step.call.checkpointed:  # Layers may write to what enters, and R needs it as it was.
            copies = {id(x): x.clone() for x in leaves if isinstance(x, Tensor)}
            leaves = [copies.get(id(x), x) for x in leaves]
        leaves = segment.enter(leaves, [origin for value in given.values() for origin in value.origins])
    entered = iter(leaves)
    box, shared = dict[Any, Any](), list[Tensor]()
    for key, value in given.items():
        leaves = [*islice(entered, len(value.leaves))]
        box[key] = unflatten(leaves, value.nesting)
        shared += [leaves[k] for k in value.shared]
    versions, x, at, before = [*map(version_of, shared)], box.pop(None), 0, opened.set(box)
    try:
        for at, layer in enumerate(own.calls):  # noqa: B007 (for the note)
            x = layer(x)
        values: Values = {key: Activation(*flatten(value)) for key, value in ((None, x), *box.items())}
        for key, value in values.items():
            verify_open(value.leaves, f"the output of {own.described[-1]}" if key is None else f"the skip {key[1]!r}")
        leaves = [x for value in values.values() for x in value.leaves]
        if doing == "recomputation":
            wait_for_collectives(leaves)
    except BaseException as error:
        where = f"{own.name}, microbatch {i} of {step.call.microbatches}"
        add_note(error, f"in the {doing} of {own.described[at]}, {where}")
        raise
    finally:
        opened.reset(before)
    if versions != [*map(version_of, shared)]:
        raise RuntimeError(
            f"{own.name} wrote in place to an input that batched= leaves whole, so that all microbatches share its "
            "memory, or that shares memory with another value between stages, whose gradient would miss the write. "
            "Write to a copy (x.clone()) in the layer, or return a copy from the layer that returns both."
        )
    now_shared = {id(leaves[k]) for k in sharing(leaves, shared)} if len(leaves) > 1 or shared else ()
    for value in values.values() if now_shared else ():
        value.shared = frozenset([k for k, x in enumerate(value.leaves) if id(x) in now_shared])
    if segment is not None:
        detach(values.values(), segment, stage.index, step.call.state.grad)
    return values


def _signatures(values: Values) -> list[Any]:
    """What R has to return, too: the origins of values, and the shapes of tensors."""
    return [(own.origins, [x.shape for x in own.leaves if isinstance(x, Tensor)]) for own in values.values()]


def _versions(given: Values) -> list[int | None]:
    """The versions of tensors that enter, which show writes in place."""
    return [version_of(x) for value in given.values() for x in value.leaves if isinstance(x, Tensor)]
