"""Drop-in: the caller's backward starts the second half of a call, B and W, and gets what that has computed.

If the calling thread is none of Python's (a backward inside a backward), or anything odd is around, the second half
runs in it, op after op.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from splitpipe.backward.outer_graph import Gradients, Groups, OuterGraph
from splitpipe.core import stream, thread_state
from splitpipe.core.torch_private import queue_callback
from splitpipe.engine.rows import backward_rows
from splitpipe.engine.step import StepRun
from splitpipe.microbatch.division import Division
from splitpipe.skip.tracker import Key
from splitpipe.stage.call import hand
from splitpipe.stage.shared_parameters import SharedParameters


def input_gradients(step: StepRun, key: Key | None, division: Division) -> dict[int, Tensor | None]:
    """The gradients of what the caller has given with this key, by the number of the leaf."""
    grads = {k: own for (of, k), own in step.input_grads.items() if of == key}
    return {k: division.gradient(k, [own.get(i) for i in range(len(division.rows))]) for k, own in grads.items()}


class OutputTensor(NamedTuple):
    """A tensor that has left the pipeline, outside the stages' graphs."""

    tensor: Tensor
    microbatch: int
    stage: int
    number: int  #: That of the root in its segment.


def attach_outputs(step: StepRun, outputs: Sequence[Any], shared: SharedParameters) -> list[Any]:
    """The outputs of all microbatches, in the outer graph, for the caller's streams."""
    call, tensors = step.call, dict[int, OutputTensor]()
    for output in outputs:
        hand(output.leaves, call.computes[-1], call.callers[-1])
        tensors.update(output.tensors)
    if not tensors:
        return [*outputs]
    attached = SecondHalf(step, [*tensors.values()], shared).attach([each.tensor for each in tensors.values()])
    return [output.attached(dict(zip(tensors, attached))) for output in outputs]


class SecondHalf:
    """Drop-in: B and W of a call."""

    def __init__(self, step: StepRun, outputs: Sequence[OutputTensor], shared: SharedParameters) -> None:
        self._step, self._outputs, self._shared = step, outputs, shared
        self._tracked = [k for k, x in enumerate(step.call.leaves) if isinstance(x, Tensor) and x.requires_grad]

    def attach(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs as those of the outer graph."""
        # Only leaves to which a walk has led: a None would call the hooks of others.
        groups: dict[int | None, list[Tensor]] = {None: [self._step.call.leaves[k] for k in self._tracked]}
        groups.update({stage.index: [*stage.reached.values()] for stage in self._step.stages})
        return OuterGraph([stage.device for stage in self._step.stages], self._run).attach(outputs, groups)

    def _run(self, grads: Mapping[int, Tensor], wanted: Groups, keep: bool) -> Gradients:
        """Runs the second half, down to the lowest stage that this backward needs."""
        step, call, stages, hooks = self._step, self._step.call, self._step.stages, self._step.hooks
        step.keep, step.wants_weights = keep, [*wanted] != [None]
        step.input_grads.clear()
        for stage in stages:
            stage.forget_backward()
            stream.wait(stage.compute, stream.current(stage.device))
        for k, grad in grads.items():
            _, i, j, number = self._outputs[k]
            stream.hold(grad, stages[j].compute)
            stages[j].fwd_cache[i].arrived.append((number, grad, None))
        if thread_state.is_odd():  # In a thread of autograd's own, workers would wait for it forever.
            step.pool = None
        lowest = min([j or 0 for j in wanted], default=0)
        try:
            step.run_rows(backward_rows(call.microbatches, step.workers, lowest, call.recomputed, step.wants_weights))
        finally:
            hooks.restore()
            for stage in stages if not keep else ():
                stage.fwd_cache.clear()
        self._shared.bring_home()
        gradients: Gradients = {}
        for stage in stages:
            sums = stage.store.sums
            totals = [sums.take(x) for x in wanted.get(stage.index, ())]
            grads_of = [None if total is None else total.value for total in totals]
            gradients[stage.index] = hand(grads_of, stage.compute, stream.current(stage.device))
        if None in wanted:
            of_input = input_gradients(step, None, call.input)
            gradients[None] = [of_input.get(k) for k in self._tracked]
        # Hooks of leaves without a gradient, because the loss doesn't use an output, are silent until backward ends.
        live = {id(x) for j, own in wanted.items() for x, grad in zip(own, gradients[j]) if grad is not None}
        silent = [x for own in wanted.values() for x in own if id(x) not in live]
        if silent:
            hooks.park(silent)
            queue_callback(hooks.restore)
        return gradients
