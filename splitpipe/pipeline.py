"""Drop-in: forward in clock cycles lays down one autograd graph, and whoever goes backward walks it.

    clock   stage 0   stage 1   stage 2           i: microbatch, of m
    0       (0,0)                                 j: stage, of n
    1       (1,0)     (0,1)
    2       (2,0)     (1,1)     (0,2)
    3                 (2,1)     (1,2)
    4                           (2,2)

For each (i, j) of a clock cycle the caller's thread fences, workers compute all of them at once, and the caller's
thread collects. The graph of one microbatch around stage j, by the stream that each node is created under:

      from stage j-1
    ┌──────┸──────┐
    │    Copy     │  copy, both       [1] to the device of j
    │    Wait     │  copy into j      [2] compute waits for the copy
    │    Join     │  compute          [3] (i-1, j) goes backward after (i, j)
    └──────┰──────┘  (fence)
    ┌──────┸──────┐
    │   layers    │  compute          [4]
    └──────┰──────┘  (compute)
    ┌──────┸──────┐
    │    Leave    │  compute          [5] the copy waits for compute
    │  Recompute  │  gate of j        [6] if checkpointed: backward, before [5] has compute wait for the gradient
    │    Fork     │  gate of j        [3] for microbatch i+1
    └──────┰──────┘  (collect, and the next fence)
       to stage j+1

Fork and Recompute on the compute stream would make it wait for the gradient's copy, and on the copy stream for the
copies of later microbatches. They rank with the nodes of their stage and microbatch, so that a device is through with
one microbatch before it looks at the next. Between stages of one device and stream there is nothing to copy: [1], [2]
and [5] are left out and the rest is on the compute stream.

Only tensors that require grad get nodes, each its own: a node over several would pass undefined gradients into
the graph of an output that the loss does not use, and fire the hooks of parameters there.
"""
from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from splitpipe import stream
from splitpipe.batchnorm import numbered
from splitpipe.checkpoint import Batch, checkpointed
from splitpipe.context import State
from splitpipe.dependency import fork, join
from splitpipe.randomness import Seeds
from splitpipe.skip.box import Key
from splitpipe.stage import Parcel, Result, Skips, Stage, Task
from splitpipe.transfer import FIRST, Port, arrive, leave, rank, rank_of
from splitpipe.worker import Outcome, Pool, settle


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """The (i, j) of each clock cycle, first stage first."""
    for clock in range(m + n - 1):
        yield [(clock - j, j) for j in range(max(1 + clock - m, 0), min(1 + clock, n))]


@dataclass(frozen=True)
class Gates:
    """Where values enter and leave a stage: one copy stream a device and direction."""

    inlet: Port
    outlet: Port


@dataclass
class Pass:
    """One forward of the whole batch.

    Args:
        stages: in order.
        gates: of each stage.
        workers: the worker of each stage.
        pool: the workers.
        popped: the stage that pops each skip.
        state: the caller's thread-local state.
        seeds: of every (stage, microbatch).
        stop: the first microbatch that is not checkpointed.
        batch: what the microbatches are parts of.
    """

    stages: Sequence[Stage]
    gates: Sequence[Gates]
    workers: Sequence[int]
    pool: Pool
    popped: Mapping[Key, int]
    state: State
    seeds: Seeds
    stop: int
    batch: Batch
    _values: list[Parcel] = field(default_factory=list)
    _skips: list[dict[Key, tuple[int, Parcel]]] = field(default_factory=list)
    _variables: list[contextvars.Context] = field(default_factory=list)

    def run(self, microbatches: Sequence[Parcel], variables: contextvars.Context) -> list[Parcel]:
        """The output of each microbatch.

        Args:
            microbatches: the inputs, on the first stage's device.
            variables: the caller's context variables.

        Raises:
            BaseException: the first that a stage raised. Every other stage of its clock cycle has ended by then.
        """
        self._values = list(microbatches)
        self._skips = [{} for _ in microbatches]
        self._variables = [numbered(variables.copy(), i) for i in range(len(microbatches))]
        for cycle in clock_cycles(len(microbatches), len(self.stages)):
            for i, j in cycle:
                self._fence(i, j)
            self._compute(cycle)
        return self._values

    def _compute(self, cycle: list[tuple[int, int]]) -> None:
        """[4], then the outputs."""
        # The user's hooks and modes see the ops of a single thread, in the same order every time.
        groups = [[place] for place in cycle] if self.state.observed else [cycle]
        for group in groups:
            outcomes: list[Outcome[Result]] = []
            try:
                for i, j in group:
                    outcomes.append(self._submit(i, j))
            finally:
                settle(outcomes)
            for (i, j), outcome in zip(group, outcomes):
                self._collect(i, j, outcome.get())

    def _submit(self, i: int, j: int) -> Outcome[Result]:
        arriving: Skips = {}
        for key, (_, parcel) in list(self._skips[i].items()):
            if self.popped[key] == j:
                arriving[key] = parcel
                del self._skips[i][key]
        task = Task(
            stage=self.stages[j],
            number=(i, len(self._values)),
            value=self._values[i],
            skips=arriving,
            state=self.state,
            variables=self._variables[i],
            seed=self.seeds.of(j, i),
            checkpoint=i < self.stop,
            batch=self.batch,
        )
        return self.pool.submit(self.workers[j], task)

    def _fence(self, i: int, j: int) -> None:
        """[1] to [3]."""
        if j:
            self._values[i] = self._through(self._values[i], j - 1, j)
        for key, (source, parcel) in self._skips[i].items():
            if self.popped[key] == j:
                self._skips[i][key] = source, self._through(parcel, source, j)
        if i and self.state.grad:
            self._depend(i, j)

    def _depend(self, i: int, j: int) -> None:
        before, value = self._values[i - 1], self._values[i]
        forks, joins = before.differentiable, value.differentiable
        # With several the loss may use any of them, and an edge to one it does not use would bring it undefined
        # gradients. Their order is that of the sequence numbers.
        if len(forks) != 1 or not joins:
            return
        made = before.leaves[forks[0]]
        with stream.use(self._exit(j)):
            forked, phony = fork(made)
            rank(forked, rank_of(made))
        with stream.use(self.stages[j].compute):
            joined = join(value.leaves[joins[0]], phony)
            rank(joined, FIRST)
        before.leaves[forks[0]], value.leaves[joins[0]] = forked, joined

    def _through(self, parcel: Parcel, source: int, target: int) -> Parcel:
        if self._together(source, target):
            return parcel
        out, into = self.gates[source].outlet, self.gates[target].inlet
        # What is elsewhere was put there by a layer (lengths on the CPU, say), and stays.
        leaves = [
            arrive(leaf, out, into) if isinstance(leaf, Tensor) and leaf.device == out.device else leaf
            for leaf in parcel.leaves
        ]
        return replace(parcel, leaves=leaves)

    def _collect(self, i: int, j: int, result: Result) -> None:
        """[5] and [6]."""
        self.seeds.drew |= result.drew
        self._values[i] = self._leave(result.value, result, j, j + 1)
        for key, parcel in result.skips.items():
            target = self.popped.get(key, 0)
            if target > j:
                self._skips[i][key] = j, self._leave(parcel, result, j, target)

    def _leave(self, parcel: Parcel, result: Result, source: int, target: int) -> Parcel:
        out = self.gates[source].outlet
        stays = target == len(self.stages) or self._together(source, target)

        def through(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = rank_of(leaf)
            if not stays and leaf.device == out.device:
                leaf = leave(leaf, out, self.gates[target].inlet)
            if result.frame is not None and leaf.requires_grad and leaf.grad_fn is not None:
                with stream.use(out.compute if stays else out.gate):
                    leaf = checkpointed(leaf, result.frame, made)
            return leaf

        return replace(parcel, leaves=[through(leaf) for leaf in parcel.leaves])

    def _together(self, source: int, target: int) -> bool:
        here, there = self.gates[source].outlet, self.gates[target].inlet
        return here.device == there.device and here.compute == there.compute

    def _exit(self, j: int) -> stream.Stream:
        """The stream of the nodes behind a stage."""
        if j + 1 == len(self.stages) or self._together(j, j + 1):
            return self.stages[j].compute
        return self.gates[j].outlet.gate
