"""Drop-in: the caller's backward starts the second half of a call, R, B and W, and gets what that has computed.

If the forward ran in the caller's thread, or backward is called in a thread that is none of Python's (a backward inside
a backward) or with anything odd around, the second half runs there, op after op.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from splitpipe.backward.outer_graph import Gradients, Groups, OuterGraph, adds_gradients
from splitpipe.core import stream, thread_state
from splitpipe.core.torch_private import queue_callback
from splitpipe.engine.rows import backward_rows
from splitpipe.engine.step import StepRun
from splitpipe.loss.numbers import Number, Unknown
from splitpipe.stage.call import hand


class Output(NamedTuple):
    """The output of a microbatch, outside the stages' graphs."""

    leaves: list[Any]
    nesting: Any
    #: Tensors that have left a graph, by identity: the stage, and the number of the root in its segment.
    left: dict[int, tuple[Tensor, int, int]]
    numbers: dict[int, Number | Unknown] = {}  #: What numbers consist of, by the identity of the leaf.
    place: int = 0  #: Which leaf is the module's own loss.

    def changed(self, change: Callable[[Tensor], Tensor]) -> Output:
        """The same with other tensors, also as the terms of its numbers."""
        numbers, change = dict[int, Number | Unknown](), cache(change)  # A tensor that occurs twice stays one.
        leaves = [change(x) if isinstance(x, Tensor) else x for x in self.leaves]
        for x, y in zip(self.leaves, leaves):
            if (number := self.numbers.get(id(x))) is not None:
                numbers[id(y)] = number.mapped(change) if isinstance(number, Number) else number
        return self._replace(leaves=leaves, left={}, numbers=numbers)


def attach_outputs(step: StepRun, outputs: Sequence[Output]) -> list[Output]:
    """The outputs of all microbatches, in the outer graph, for the caller's streams."""
    call = step.call
    for output in outputs:
        hand(output.leaves, call.computes[-1], call.callers[-1])
    left = {key: (x, i, j, k) for i, output in enumerate(outputs) for key, (x, j, k) in output.left.items()}
    if not left:
        return [*outputs]
    tracked = [k for k, x in enumerate(call.leaves) if isinstance(x, Tensor) and x.requires_grad]
    if step.shared is not None:
        step.shared.reach_originals()
    # Only leaves to which a walk has led: a None would call the hooks of others.
    groups: dict[int | None, list[Tensor]] = {None: [call.leaves[k] for k in tracked]}
    groups.update({stage.index: [*stage.reached.values()] for stage in step.stages})
    compute = partial(_run_second_half, step, tracked, [each[1:] for each in left.values()])
    graph = OuterGraph({stage.device for stage in step.stages}, compute)
    attached = dict(zip(left, graph.attach([each[0] for each in left.values()], groups)))
    return [output.changed(lambda x: attached.get(id(x), x)) for output in outputs]


def _run_second_half(
    step: StepRun, tracked: Sequence[int], roots: Sequence[tuple[int, int, int]], grads: Mapping[int, Tensor],
    wanted: Groups, keep: bool,
) -> Gradients:
    """B and W, down to the lowest stage that this backward needs: see ``OuterGraph``.

    ``tracked``: the leaves of the input that require grad. ``roots``: the microbatch, stage and number of each output.
    """
    call, stages, hooks = step.call, step.stages, step.hooks
    step.keep, step.wants_weights = keep, [*wanted] != [None]
    step.input_grads.clear()
    for stage in stages:
        stage.store.clear()
        for i in stage.fwd_cache:  # Not the values: this frame would keep the last one.
            stage.fwd_cache[i].arrived = []  # What a backward that failed may have left.
        stream.wait(stage.compute, stream.current(stage.device))
    for k, grad in grads.items():
        i, j, number = roots[k]
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
    if step.shared is not None:
        step.shared.bring_home()
    gradients: Gradients = {}
    for stage in stages:
        sums = stage.store.sums
        taken = [sums.pop(id(x)).value if id(x) in sums else None for x in wanted.get(stage.index, ())]
        gradients[stage.index] = hand(taken, stage.compute, stream.current(stage.device))
        # Leaves to which only a recomputation has led, such as some that it has made: their hooks aren't called.
        late = [total for key, total in sums.items() if key not in stage.reached]
        for x, y in [(total.weight, total.value) for total in late if adds_gradients([*chain(*wanted.values())])]:
            x.grad = y if x.grad is None or y is None else x.grad + y
    if None in wanted:
        of_input = step.gradients_of(None, call.input)
        gradients[None] = [of_input.get(k) for k in tracked]
    # Hooks of leaves without a gradient, because the loss doesn't use an output, are silent until backward ends.
    live = {id(x) for j, own in wanted.items() for x, grad in zip(own, gradients[j]) if grad is not None}
    silent = [x for own in wanted.values() for x in own if id(x) not in live]
    if silent:
        hooks.park(silent)
        queue_callback(hooks.restore)
    return gradients
