"""The least that running a schedule takes on a machine: a thread a device, queues between them, ops that only sleep.

No tensors, no autograd, nothing but the order. What this loses, the machine loses: to wake a thread late, and cold.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from benchmarks.parts.emulated.layers import Naps, Step, Took
from splitpipe.schedule import Op, Schedule
from splitpipe.schedule.op import given, needed


def stepping(plan: Schedule, seconds: float) -> Step:
    """A function that runs a step.

    Args:
        plan: to be run.
        seconds: of a whole device's op.
    """
    naps, threads = Naps(), ThreadPoolExecutor(plan.devices)
    mail: list[SimpleQueue[Op]] = [SimpleQueue() for _ in plan.rows]
    waiting: dict[Op, int] = {}  # The device that needs what another one gives.
    for device, row in enumerate(plan.rows):
        for op in row:
            waiting |= {each: device for each in needed(op, plan.stages) if plan.placement[each.stage] != device}

    def walk(device: int) -> None:
        done: set[Op] = set()
        for op in plan.rows[device]:
            for each in needed(op, plan.stages):
                while each not in done:
                    done.add(mail[device].get())
            for kind in op.kind:
                naps.take(kind, op.stage, seconds / plan.shares[op.stage])
            done.add(given(op))
            if given(op) in waiting:
                mail[waiting[given(op)]].put(given(op))

    def step() -> Took:
        naps.taken.clear()
        began = time.perf_counter()
        list(threads.map(walk, range(plan.devices)))
        return Took(time.perf_counter() - began, [naps], began)

    return step
