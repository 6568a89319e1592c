"""What a microbatch's forward returns: its output, which leaves the stages' graphs; or the loss of a schedule."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.engine.crossing import changed
from splitpipe.engine.drop_in import OutputTensor
from splitpipe.loss.numbers import Number, Unknown
from splitpipe.loss.objective import Objective
from splitpipe.microbatch.gather import find_loss
from splitpipe.microbatch.tree import flatten, unflatten
from splitpipe.stage.call import Activation, Origin


class Output(NamedTuple):
    """The output of a microbatch, or its loss."""

    leaves: list[Any]
    nesting: Any
    numbers: dict[int, Number | Unknown]  #: What numbers consist of, by the identity of the leaf.
    tensors: dict[int, OutputTensor]  #: Tensors that have left the graph, by identity.
    loss: tuple[Tensor, Origin | None] | None = None  #: Its part, and where that has left the graph.
    place: int = 0  #: Which leaf is the module's own loss.

    def attached(self, tensors: dict[int, Tensor]) -> Output:
        """With the tensors of the outer graph in place of those that have left, by their identity."""
        leaves = [tensors.get(id(x), x) for x in self.leaves]
        numbers = {
            id(y): _changed(self.numbers[id(x)], lambda x: tensors.get(id(x), x))
            for x, y in zip(self.leaves, leaves) if id(x) in self.numbers
        }
        return Output(leaves, self.nesting, numbers, {})


def chain_output(i: int, value: Activation, is_loss: bool) -> Output:
    """That of an nn.Sequential, from what has left its last stage."""
    if is_loss:
        return Output([], None, {}, {}, loss=(value.leaves[0], value.origins[0]))
    tensors = {
        id(x): OutputTensor(x, i, *origin) for x, origin in zip(value.leaves, value.origins) if origin is not None  # type: ignore
    }
    return Output(value.leaves, value.nesting, {}, tensors)


def keep_output(forward: Any, output: Any) -> None:
    """Drop-in: keeps what the caller's backward can start from: the output, and the terms of its numbers."""
    kept, step, i = kept_output(forward, output, forward.crossing.leave), forward.step, forward.i
    numbers = [number for number in kept.numbers.values() if isinstance(number, Number)]
    for x in (*kept.leaves, *[x for number in numbers for x in number.amounts.values()]):
        if isinstance(x, Tensor) and x.grad_fn is not None and step.call.state.grad and id(x) not in kept.tensors:
            j = forward.crossing.stage_of(x)
            kept.tensors[id(x)] = OutputTensor(x.detach(), i, j, step.stages[j].fwd_cache[i].leave(x))
    forward.output = kept


def keep_loss(objective: Objective, targets: Sequence[Any], forward: Any, output: Any) -> None:
    """With a schedule: keeps the loss of a microbatch."""
    target = targets[forward.i]
    value = unflatten(forward.carrier.enter(target, forward.stage), target.nesting)
    value, number = objective.loss(forward.i, changed(output, forward.crossing.here), value, forward.trace)
    _keep(forward, value, number, Output([], None, {}, {}))


def keep_own_loss(forward: Any, output: Any) -> None:
    """With a schedule and no ``loss_fn``: keeps the module's own loss, and its output."""
    crossing, trace, (place, value) = forward.crossing, forward.trace, find_loss(output)
    number = None if trace is None else trace.ledger.number(value)
    number = number or Unknown("a loss with a dimension, which may be that of the rows")
    value = crossing.here(value)
    kept = kept_output(forward, output, lambda x: crossing.latest(x).detach())
    _keep(forward, value.reshape(()) if value.dim() else value, number, kept._replace(place=place))


def _keep(forward: Any, value: Tensor, number: Number | Unknown, kept: Output) -> None:
    here, segment = forward.crossing.here, forward.step.stages[forward.stage].fwd_cache.get(forward.i)
    with DisableTorchFunction():
        part = forward.step.scheduled.batch_loss.part(forward.i, here(value), _changed(number, here))
    origin = None if segment is None or not part.requires_grad else (forward.stage, segment.leave(part))
    forward.output = kept._replace(loss=(part.detach(), origin))


def kept_output(forward: Any, output: Any, change: Callable[[Tensor], Tensor]) -> Output:
    """An output with its leaves, and the terms of its numbers, changed."""
    leaves, nesting = flatten(output, fields=True)
    numbers = {} if forward.trace is None else forward.trace.ledger.numbers(leaves)
    leaves = [change(x) if isinstance(x, Tensor) else x for x in leaves]
    return Output(leaves, nesting, {id(leaves[k]): _changed(number, change) for k, number in numbers.items()}, {})


def _changed(number: Number | Unknown, change: Callable[[Tensor], Tensor]) -> Number | Unknown:
    return number.mapped(change) if isinstance(number, Number) else number
