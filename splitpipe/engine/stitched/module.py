"""Any module's own forward in the one graph: values reach later stages by Copy and Wait, where others are detached.

    block on stage 0 ── Wait ══ Copy ══> Wait ── block on stage 1       one microbatch, in its thread

A value crosses when the module's code uses it. Each block is a separate checkpoint.
"""
from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.random_numbers import Numbers
from splitpipe.core.stream import NamedStreams
from splitpipe.engine.block_checkpoint import BlockChains, BlockRun
from splitpipe.engine.crossing import Detaching
from splitpipe.engine.module_output import kept_output
from splitpipe.engine.step import StepRun
from splitpipe.engine.stitched.checkpoint import Checkpoint, Inputs
from splitpipe.engine.stitched.copy import Lane, Wait
from splitpipe.loss.trace import Trace
from splitpipe.microbatch.tree import flatten, unflatten
from splitpipe.stage.call import Activation
from splitpipe.stage.segment import RunningStage


class Stitching(Detaching):
    """How a microbatch's values reach later stages: in the same graph."""

    one_graph = True

    def __init__(self, step: StepRun, i: int, streams: NamedStreams) -> None:
        super().__init__(step, i)
        self._lane = Lane(step, i, streams)

    def enter(self, given: Activation, stage: int) -> list[Any]:
        """The leaves of what the caller has given, as outputs of this thread's nodes, whose numbers tell the stage."""
        self._lane.begin()
        known = {id(x): x for x in given.leaves if isinstance(x, Tensor) and x.requires_grad}
        entered = {key: Wait.apply(x, None, None) for key, x in known.items()}
        return [entered.get(id(x), x) for x in given.leaves]

    def leave(self, x: Tensor, stage: int) -> Any:
        """The tensor, as it ends a stage."""
        return self._lane.leave(x, stage)

    def carry(self, x: Tensor, source: int, stage: int) -> Tensor:
        """A value of another stage, for this one."""
        # The code may be in a block without grad, and use the value again afterwards.
        with torch.set_grad_enabled(self._step.call.state.grad):
            return self._lane.bring(self._lane.leave(x, source), source, stage)


class CheckpointedBlocks(BlockChains):
    """The checkpointed blocks of one microbatch, each by itself."""

    def run(self, stage: RunningStage, block: BlockRun, args: Any, kwargs: dict[str, Any], trace: Trace | None) -> Any:
        """The block's output."""
        call, (leaves, nesting) = block.call, flatten((args, kwargs), fields=True)

        def again(inputs: Inputs) -> None:
            args, kwargs = unflatten(inputs[0], nesting)
            call(*args, **kwargs)

        numbers = Numbers(self.step.call.draws, stage.device)
        checkpoint = Checkpoint(block.modules, numbers, block.described, stage.compute)
        with trace or nullcontext():
            return checkpoint.run(partial(call, *args, **kwargs), again, [leaves])


def keep_stitched_output(forward: Any, output: Any) -> None:
    """Keeps the output, with its graph."""
    carrier, latest, stage = forward.carrier, forward.crossing.latest, forward.stage
    forward.output = kept_output(forward, output, cache(lambda x: carrier.leave(latest(x), stage)))
