"""Time of a step beside its ops: the host's cost."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from benchmarks.harness import measure
from benchmarks.harness.measure import Row
from benchmarks.parts.emulated.layers import Nap, Step, Took, stepping, unwrapped
from splitpipe import schedule
from splitpipe.schedule import Op, Schedule
from splitpipe.schedule.op import given, needed

WARM_UP = 3  # steps


def cost(names: Sequence[str], ops: Sequence[float], chunks: int, passes: int) -> list[Row]:
    """A line for each schedule and length of an op, and for the layer without a pipeline.

    One device never waits for another one, so what lies between its sleeps, from the first to the last, is all the
    host's: to come back from a layer or from autograd, note what it left, walk on, take the next op's values, call
    layers or autograd, catch and stash, compute the loss. It includes the little that the layers compute, and what it
    takes a core to get going again after a sleep. What is around them: to cut the batch, hand it to the worker and come
    back, gather, and hand the gradients over in ``loss.backward()``.

    Args:
        names: of the schedules.
        ops: milliseconds that an op sleeps; 0: it does not.
        chunks: microbatches.
        passes: steps that are timed.
    """
    rows = []
    for milliseconds in ops:
        seconds = milliseconds / 1e3
        steps: dict[str, tuple[int, Step]] = {"unwrapped": (2 * chunks, unwrapped(chunks, seconds))}
        for name in names:
            plan = schedule.build(name, 1, chunks)
            steps[name] = len(plan.rows[0]), stepping(plan, seconds)
        clocks = {name: _Clock(step) for name, (_, step) in steps.items()}
        measure.interleaved({name: clock.run for name, clock in clocks.items()}, passes, WARM_UP)
        for name, (count, _) in steps.items():
            clock = clocks[name]
            inside = [each / (count - 1) for each in clock.inside[WARM_UP:]]
            rows.append({"schedule": name, "op, ms": f"{milliseconds:g}", "ops": count,
                         "between ops, us": statistics.median(inside), "least": min(inside), "most": max(inside),
                         "around them, us a step": statistics.median(clock.around[WARM_UP:]),
                         "processor, us an op": statistics.median(clock.processor[WARM_UP:]) / count})
    return rows


class _Clock:
    """Runs steps, and notes the microseconds between the sleeps, around them, and of processor time."""

    def __init__(self, step: Step) -> None:
        self.inside: list[float] = []
        self.around: list[float] = []
        self.processor: list[float] = []
        self._step = step

    def run(self) -> None:
        began = time.process_time()
        took = self._step()
        self.processor.append(1e6 * (time.process_time() - began))
        (naps,) = took.naps
        row = max(nap.ended for nap in naps.taken) - min(nap.began for nap in naps.taken)
        self.inside.append(1e6 * (row - naps.total()))
        self.around.append(1e6 * (took.wall - row))


def between(plan: Schedule, took: Took) -> float:
    """The seconds that the mean op starts later than it could: on several devices, where they wait for each other.

    An op could start as soon as the one before it on its device is done, and all that it needs. What lies between is
    the host's: to finish an op and hand its value over, to wake the other worker, and to come to the next op's sleep.

    Args:
        plan: that was run.
        took: a step of it, in one process.
    """
    naps: dict[tuple[int, str], deque[Nap]] = defaultdict(deque)
    for nap in sorted((nap for each in took.naps for nap in each.taken), key=lambda nap: nap.began):
        naps[nap.stage, nap.kind].append(nap)  # In the order of its device's row.
    spans = {given(op): [naps[op.stage, kind].popleft() for kind in op.kind] for row in plan.rows for op in row}
    lost = 0.0
    for row in plan.rows:
        free = took.began
        # Several W of a stage are taken together, also where the row has another's between them.
        for op in sorted(row, key=lambda op: spans[given(op)][0].began):
            before: list[Op] = [given(each) for each in needed(op, plan.stages)]
            ready = max([free, *(spans[each][-1].ended for each in before)])
            free = spans[given(op)][-1].ended
            lost += free - ready - sum(nap.seconds for nap in spans[given(op)])
    return lost / len(spans)
