"""What a microbatch of any module returns: its output, which leaves the stages' graphs; or the loss of a schedule."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.engine.crossing import changed
from splitpipe.engine.drop_in import Output
from splitpipe.loss.numbers import Number, Unknown
from splitpipe.loss.objective import Objective
from splitpipe.microbatch.gather import find_loss
from splitpipe.microbatch.tree import flatten, unflatten


def keep_output(forward: Any, output: Any) -> None:
    """Drop-in: keeps what the caller's backward can start from: the output, and the terms of its numbers."""
    step, crossing = forward.step, forward.crossing
    forward.output = kept = kept_output(forward, output, crossing.leave)
    numbers = [number for number in kept.numbers.values() if isinstance(number, Number)]
    tensors = [*kept.leaves, *[x for number in numbers for x in number.amounts.values()]]
    for x in tensors if step.call.state.grad and not crossing.one_graph else ():
        if isinstance(x, Tensor) and x.grad_fn is not None and id(x) not in kept.left:
            j = crossing.stage_of(x)
            kept.left[id(x)] = x.detach(), j, step.stages[j].fwd_cache[forward.i].leave(x)


def keep_loss(objective: Objective, targets: Sequence[Any], forward: Any, output: Any) -> None:
    """With a schedule: keeps the loss of a microbatch."""
    target = targets[forward.i]
    value = unflatten(forward.crossing.enter(target), target.nesting)
    value, number = objective.loss(forward.i, changed(output, forward.crossing.here), value, forward.trace)
    _add_to_loss(forward, value, number)


def keep_own_loss(forward: Any, output: Any) -> None:
    """With a schedule and no ``loss_fn``: keeps the module's own loss, and its output."""
    crossing, trace, (place, value) = forward.crossing, forward.trace, find_loss(output)
    number = None if trace is None else trace.ledger.number(value)
    number = number or Unknown("a loss with a dimension, which may be that of the rows")
    value = crossing.here(value)
    forward.output = kept_output(forward, output, lambda x: crossing.latest(x).detach())._replace(place=place)
    _add_to_loss(forward, value.reshape(()) if value.dim() else value, number)


def _add_to_loss(forward: Any, value: Tensor, number: Number | Unknown) -> None:
    here, stage, scheduled = forward.crossing.here, forward.stage, forward.step.scheduled
    with DisableTorchFunction():
        number = number.mapped(here) if isinstance(number, Number) else number
        part = scheduled.batch_loss.part(forward.i, here(value), number)
        segment = forward.step.stages[stage].fwd_cache.get(forward.i)
        origin = None if segment is None or not part.requires_grad else (stage, segment.leave(part))
        scheduled.start_backward(forward.i, part, origin)


def kept_output(forward: Any, output: Any, change: Callable[[Tensor], Tensor]) -> Output:
    """An output with its leaves, and the terms of its numbers, changed."""
    leaves, nesting = flatten(output, fields=True)
    traced = [] if forward.trace is None else [x for x in leaves if isinstance(x, Tensor)]
    numbers = {id(x): forward.trace.ledger.number(x) for x in traced}
    return Output(leaves, nesting, {}, {x: number for x, number in numbers.items() if number}).changed(change)
