"""A microbatch's way through the stages in the one graph: values reach later stages by Copy and Wait.

    ══ Copy ══> Wait ── stage ── Wait ══ Copy ══>                       an nn.Sequential: layers, stage by stage
    block on stage 0 ── Wait ══ Copy ══> Wait ── block on stage 1       any module's own forward, in a thread

In a module's own forward, a value crosses when the code uses it, and each block is a separate checkpoint.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from splitpipe.core import thread_state
from splitpipe.core.random_numbers import RNGStates
from splitpipe.core.stream import NamedStreams
from splitpipe.engine.block_checkpoint import BlockChains
from splitpipe.engine.crossing import Crossing
from splitpipe.engine.drop_in import Output
from splitpipe.engine.sequential import Values, run_layers
from splitpipe.engine.step import StepRun
from splitpipe.engine.stitched.checkpoint import Checkpoint, Inputs
from splitpipe.engine.stitched.copy import Lane, Wait
from splitpipe.loss.trace import Trace
from splitpipe.microbatch.tree import flatten, unflatten
from splitpipe.skip.tracker import Key
from splitpipe.stage.call import Activation
from splitpipe.stage.recomputation import Modules
from splitpipe.stage.segment import RunningStage


class StitchedForward:
    """A microbatch of an nn.Sequential; ``streams``: those for copies."""

    own_forward = False

    def __init__(self, step: StepRun, i: int, activation: Activation, streams: NamedStreams) -> None:
        self._step, self._i, self._lane = step, i, Lane(step, i, streams)
        #: What is on its way to later stages, and the stages that it comes from.
        self._ways: dict[Key | None, tuple[Activation, int]] = {None: (activation, 0)}
        self.output: Output | None = None

    def forward(self, j: int) -> None:
        """F of a stage."""
        step, call, lane, stage, i = self._step, self._step.call, self._lane, self._step.stages[j], self._i
        ways = {key: self._ways.pop(key) for key in (None, *stage.own.arriving) if key in self._ways}
        checkpoint = None
        with thread_state.use(call.state):
            lane.begin()
            given = {key: _each(part, partial(lane.bring, source=k, target=j)) for key, (part, k) in ways.items()}
            if i < call.checkpointed:  # Layers may write to what enters, and R needs it as it was.
                copies = [_each(part, Tensor.clone).leaves for part in given.values()]
                layers = partial(_run_layers, step, stage, i, {key: replace(x, leaves=[]) for key, x in given.items()})
                entered = [part.leaves for part in given.values()]
                rng_states = RNGStates(stage.device, call.watched)
                checkpoint = Checkpoint(stage.own.recomputed, rng_states, stage.name, stage.compute)
                values = checkpoint.run(partial(layers, "forward", copies), partial(layers, "recomputation"), entered)
            else:
                values = run_layers(step, stage, i, given, None, "forward")
            for key, _ in ((None, j + 1), *stage.own.leaving):
                if key in values:
                    leave = partial(lane.leave, stage=j, checkpoint=checkpoint if key is None else None)
                    self._ways[key] = _each(values[key], leave), j
        if j == len(step.stages) - 1:
            value, _ = self._ways.pop(None)
            self.output = Output(value.leaves, value.nesting, {})


def _run_layers(step: StepRun, stage: RunningStage, i: int, given: Values, doing: str, entered: Inputs) -> Values:
    """The layers on values whose leaves are these: F isn't kept by what repeats it."""
    given = {key: replace(value, leaves=leaves) for (key, value), leaves in zip(given.items(), entered)}
    return run_layers(step, stage, i, given, None, doing)


def _each(part: Activation, change: Callable[[Tensor], Tensor]) -> Activation:
    """A value with its tensors changed; one that occurs twice stays one: attention compares with ``is``."""
    changed = {id(x): change(x) for x in {id(x): x for x in part.leaves if isinstance(x, Tensor)}.values()}
    return replace(part, leaves=[changed.get(id(x), x) for x in part.leaves])


class StitchedCrossing(Crossing):
    """The values of one microbatch of any module, which reach later stages in the same graph."""

    one_graph = True

    def __init__(self, streams: NamedStreams, step: StepRun, i: int, *rest: Any) -> None:
        super().__init__(step, i, *rest)
        self._lane = Lane(step, i, streams)

    def enter(self, given: Activation) -> list[Any]:
        """The leaves of what the caller has given, as views, which have nodes in this thread."""
        self._lane.begin()  # The numbers of this thread's nodes tell the stage.
        known = {id(x): x for x in given.leaves if isinstance(x, Tensor) and x.requires_grad}
        entered = {key: Wait.apply(x, None, None) for key, x in known.items()}
        return super().enter(replace(given, leaves=[entered.get(id(x), x) for x in given.leaves]))

    def _carry(self, x: Tensor, source: int, stage: int) -> Tensor:
        return self._lane.carry(x, source, stage)

    def leave(self, x: Tensor) -> Tensor:
        """An output, as it ends the last stage."""
        return self._lane.leave(super().leave(x), self._stage)


class CheckpointedBlocks(BlockChains):
    """The checkpointed blocks of one microbatch, each by itself."""

    def run(
        self, stage: RunningStage, modules: Modules, described: str, call: Callable[..., Any], args: Any,
        kwargs: dict[str, Any], trace: Trace | None,
    ) -> Any:
        """The output of a block's call."""
        leaves, nesting = flatten((args, kwargs), fields=True)

        def rerun(inputs: Inputs) -> None:
            args, kwargs = unflatten(inputs[0], nesting)
            call(*args, **kwargs)

        rng_states = RNGStates(stage.device, self.step.call.watched)
        checkpoint = Checkpoint(modules, rng_states, described, stage.compute)
        with trace or nullcontext():
            return checkpoint.run(partial(call, *args, **kwargs), rerun, [leaves])
