"""A microbatch's way through the stages of an nn.Sequential: a loop, since there is no code between them.

    for stage in stages:
        value, skips = carried(value, skips)        from the stages that have made them
        value, left = stage(value, skips)           its layers, or, if checkpointed, a node that recomputes them
        skips.update(left)
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from splitpipe.core import stream, thread_state
from splitpipe.core.thread_state import autocast_off
from splitpipe.engine.detaching import DetachedTransfer
from splitpipe.engine.dropin import Sent
from splitpipe.engine.forward import Host, MicrobatchForward
from splitpipe.engine.nodes import made_again
from splitpipe.engine.run import Run
from splitpipe.engine.scheduled import StepWork
from splitpipe.skip.box import Key
from splitpipe.stage.call import Activation
from splitpipe.stage.checkpoint import Remade, remade
from splitpipe.stage.run import SeparateRun, may_be_plain, plain
from splitpipe.stage.stage import Block
from splitpipe.stage.task import Result, Skips, Task
from splitpipe.training.loss import TARGET
from splitpipe.training.sink import Keyed


class ChainRun(Run):
    """One call of an nn.Sequential."""

    stages: Sequence[Block]

    def parameters(self, stage: int) -> list[Keyed]:
        """The stage's own parameters, if microbatches of it are checkpointed."""
        own = self.stages[stage].own
        return [((own,), own.every)] if self.call.checkpointed else []


class _OnItsWay(NamedTuple):
    """A value on its way from one stage to another."""

    rest: Activation  #: The value without its tensors.
    at: list[int | None]  #: For each leaf, the index of its tensor.
    sent: Sent
    source: int


class ChainForward(MicrobatchForward):
    """A microbatch of an nn.Sequential.

    Args:
        run: the call.
        i: the number of the microbatch.
        activation: its input.
        host: what it has in common with the others of its call.
        inside: whether its thread is in the caller's state.
        target: the target, if the loss is the last layer.
    """

    run: ChainRun

    def __init__(
        self, run: ChainRun, i: int, activation: Activation, host: Host, inside: bool,
        target: Activation | None = None,
    ) -> None:
        super().__init__(run, i, activation, host)
        self._inside = inside
        self._target = target
        self._skips: dict[Key, _OnItsWay] = {}
        self._state = run.call.state

    def step(self, j: int) -> None:
        """F of a stage."""
        self.run.call.contexts[self.i].run(self._step, j)

    def _step(self, j: int) -> None:
        run, stage, last = self.run, self.run.stages[j], len(self.run.stages) - 1
        value, self._given = self._given, None
        self._begin(j)
        with stream.use(stage.compute):
            value = self._taken(value) if j else value.holding(self.transfer.opening(value.leaves))
            # In the order in which they were sent, which is also that of their gradients.
            skips = {key: self._taken(self._skips.pop(key)) for key in [*self._skips] if key in stage.own.arriving}
            if j == last and self._target is not None:
                target, self._target = self._target, None
                skips[TARGET] = target.holding(self.transfer.given(target.leaves, TARGET))
            made = self._made_of(stage, value, skips)
            value, frame = made.value, made.frame
            leaving = [(key, target, made.skips[key]) for key, target in stage.own.leaving if key in made.skips]
            if run.ranked:
                self.rank([value.leaves, *(activation.leaves for *_, activation in leaving)])
            self._end()
            if j == last:
                value = value if frame is None else value.holding(remade(value.leaves, frame))
                self._value = self._host.finish(self, value)
            else:
                self._given = self._sent(value, j + 1, frame)
            self._skips.update({key: self._sent(activation, target, frame) for key, target, activation in leaving})

    def span(self, stage: int) -> range:
        """The numbers of nodes that the segment on a stage has made, once it has ended."""
        return range(self.firsts[stage], self._ends[stage])

    def _made(self, number: int, likely: int) -> int | None:
        stages: list[int] = [likely, *range(len(self._ends))]
        for stage in stages:
            if self.firsts[stage] <= number and (stage == len(self._ends) or number < self._ends[stage]):
                return stage
        return None

    def _sent(self, activation: Activation, target: int, frame: Remade | None) -> _OnItsWay:
        """A value of the current stage, on its way to a later one."""
        places: dict[int, int] = {}  # A repeated tensor is sent once.
        values: list[Tensor] = []
        for leaf in activation.leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                places[id(leaf)] = len(values)
                values.append(leaf)
        at = [places.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in activation.leaves]
        rest = activation.holding([None if isinstance(leaf, Tensor) else leaf for leaf in activation.leaves])
        return _OnItsWay(rest, at, self.transfer.send(values, self.stage, target, frame), self.stage)

    def _taken(self, it: _OnItsWay) -> Activation:
        """A value of an earlier stage, for the current one."""
        values = self.transfer.take(it.sent, it.source)
        return it.rest.holding([leaf if k is None else values[k] for leaf, k in zip(it.rest.leaves, it.at)])

    def _made_of(self, stage: Block, value: Activation, skips: Skips) -> Result:
        """The result of the stage's layers."""
        task = Task(stage, self.run.call, self.i, value, skips, self._state, self._inside)
        counting = None
        if self._state.hooks is None and not self._state.hooks_disabled:
            counting = self._host.counting(self.i, stage.index)
        if not task.checkpoint:
            if counting is not None:
                task.state, task.inside = self._state._replace(hooks=counting), False
            return task()
        given, facts = task.given(), stage.facts
        if stage.sink is None or stage.own.computed or facts.in_place or not may_be_plain(stage):
            return task()
        if not plain(given, self._state):
            return task()
        with nullcontext() if self._inside else thread_state.entered(self._state):
            return self._node(stage, task, given)

    def _node(self, stage: Block, task: Task, given: list[Any]) -> Result:
        """The same, as a node that recomputes it."""
        call, seed = self.run.call, task.seed()
        again = SeparateRun(stage, call, self._state, seed, given, task.run, str(stage), handed=stage.shared)
        versions = task.versions(given)
        made, (value, skips), block = made_again(again, stage.sink, given, self.i, alone=True)
        task.note_writes(versions, given)
        task.drop()
        leaves = iter(made)
        value, *others = [
            activation.holding([next(leaves) for _ in activation.leaves]) for activation in (value, *skips.values())
        ]
        return Result(value, dict(zip(skips, others)), block)


class ChainStep(StepWork):
    """A step of an nn.Sequential, whose last layer is the loss."""

    forwards: list[ChainForward]
    recomputes = True

    def _forward(self, i: int, activation: Activation) -> ChainForward:
        state = self._run.call.state
        return ChainForward(self._run, i, activation, self, autocast_off(state) is state, self._targets[i])

    def transfer(self, forward: MicrobatchForward) -> DetachedTransfer:
        """How a microbatch's values reach later stages."""
        return DetachedTransfer(forward, self._routes, self._traces)

    def finish(self, forward: MicrobatchForward, output: Activation) -> Any:
        """The loss of a microbatch, which is the last leaf of the last stage's output."""
        flight = forward.transfer.flights[-1]
        flight.value = [get_gradient_edge(output.leaves[k]) for k in output.differentiable]
        return output.leaves[-1]
