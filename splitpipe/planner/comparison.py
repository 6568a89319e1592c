"""``PlanComparison``: the predictions for a step, next to the recorded values."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitpipe.schedule.draw.measures import aligned, size
from splitpipe.schedule.op import counted
from splitpipe.schedule.recording import Recording
from splitpipe.schedule.timeline import Timeline


@dataclass(frozen=True)
class Pair:
    """A number that the plan predicted, and the recorded one."""

    predicted: float
    recorded: float

    @property
    def error(self) -> float:
        """The relative error of the prediction: (predicted - recorded) / recorded."""
        return self.predicted / self.recorded - 1 if self.recorded else 0.0


@dataclass(frozen=True)
class PlanComparison:
    """A plan's predictions and a recording. Times are in milliseconds, memory in bytes. ``print`` shows a table."""

    step: Pair  # From the step's start to the end of its last op.
    forward: tuple[Pair, ...]  # For each stage, of one microbatch.
    backward: tuple[Pair, ...]  # Likewise, B and W together, including recomputation.
    memory: tuple[Pair | None, ...]  # The most bytes on each device; None where they aren't counted.
    devices: tuple[str, ...]  # The devices' names.
    placement: tuple[int, ...]  # The device of each stage.

    def __str__(self) -> str:
        rows = [["", "predicted", "recorded", "error"], ["step ms", *_shown(self.step)]]
        for stage, device in enumerate(self.placement):
            where = f"stage {stage} on {self.devices[device]}"
            rows.append([f"{where}, F ms", *_shown(self.forward[stage])])
            rows.append([f"{where}, B + W ms", *_shown(self.backward[stage])])
        for name, pair in zip(self.devices, self.memory):
            if pair is not None:
                rows.append([f"memory of {name}", size(pair.predicted), size(pair.recorded), f"{pair.error:+.1%}"])
        return "\n".join(aligned(rows, "<>>>"))


def _shown(pair: Pair) -> list[str]:
    return [f"{pair.predicted:.3f}", f"{pair.recorded:.3f}", f"{pair.error:+.1%}"]


def compare(plan: Timeline, step_time: float, peak_bytes: Sequence[int], recorded: Recording) -> PlanComparison:
    """The predictions next to a recording of the same schedule; raises ValueError for another one."""
    schedule, ran = plan.schedule, recorded.schedule
    if ran.placement != schedule.placement or ran.microbatches != schedule.microbatches:
        raise ValueError(
            f"found a recording of {counted(ran.microbatches, 'microbatch')} and stages on devices "
            f"{list(ran.placement)}: expected steps of plan.apply(module), with whole batches."
        )
    forward, backward = (
        tuple(map(Pair, _times(plan, *kinds), _times(recorded, *kinds))) for kinds in ("F", ("B", "W", "BW"))
    )
    memory = tuple(None if most is None else Pair(peak, most) for peak, most in zip(peak_bytes, recorded.memory))
    step = Pair(step_time, recorded.makespan)
    return PlanComparison(step, forward, backward, memory, recorded.devices, schedule.placement)


def _times(timeline: Timeline, *kinds: str) -> list[float]:
    """The mean time of ops of some kinds in each stage, per microbatch."""
    found = [0.0] * timeline.schedule.stages
    for row in timeline.spans:
        for op, start, end in row:
            if op.kind in kinds:
                found[op.stage] += (end - start) / timeline.schedule.microbatches
    return found
