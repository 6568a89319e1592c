"""``Comparison``: what was predicted for a step beside what was recorded of it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitpipe.schedule.draw.measures import aligned, size
from splitpipe.schedule.recording.recording import Recording
from splitpipe.schedule.timeline import Timeline
from splitpipe.schedule.words import counted


@dataclass(frozen=True)
class Pair:
    """One number, twice.

    Attributes:
        predicted: by the plan.
        recorded: in training steps.
    """

    predicted: float
    recorded: float

    @property
    def error(self) -> float:
        """By which part of what was recorded the prediction is too high; below 0: too low."""
        return self.predicted / self.recorded - 1 if self.recorded else 0.0


@dataclass(frozen=True)
class Comparison:
    """A plan's predictions and a recording. Times are in milliseconds, memory in bytes. Prints as a table.

    Attributes:
        step: from the step's start to the end of its last op.
        forward: of one microbatch, of each stage.
        backward: the same, of B and W together, with what is computed again for them.
        memory: the most bytes on each device; None where nobody counts.
        devices: their names.
        placement: the device of each stage.
    """

    step: Pair
    forward: tuple[Pair, ...]
    backward: tuple[Pair, ...]
    memory: tuple[Pair | None, ...]
    devices: tuple[str, ...]
    placement: tuple[int, ...]

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


def compared(plan: Timeline, step_time: float, peak_bytes: Sequence[int], recorded: Recording) -> Comparison:
    """A plan beside a recording of the same schedule."""
    schedule, ran = plan.schedule, recorded.schedule
    if ran.placement != schedule.placement or ran.microbatches != schedule.microbatches:
        raise ValueError(
            f"found a recording of {ran.name or 'a schedule'}, {counted(ran.microbatches, 'microbatch')} and stages "
            f"on devices {list(ran.placement)}; the plan is for {schedule.name or 'a schedule'}, "
            f"{schedule.microbatches} and {list(schedule.placement)}: expected steps of "
            "plan.apply(module), with whole batches."
        )
    return Comparison(
        step=Pair(step_time, recorded.makespan),
        forward=_pairs(plan, recorded, ("F",)),
        backward=_pairs(plan, recorded, ("B", "W", "BW")),
        memory=tuple(None if most is None else Pair(peak, most) for peak, most in zip(peak_bytes, recorded.memory)),
        devices=recorded.devices,
        placement=schedule.placement,
    )


def _pairs(plan: Timeline, recorded: Recording, kinds: Sequence[str]) -> tuple[Pair, ...]:
    """For each stage, the time of ops of some kinds, for one microbatch on average."""
    sums = []
    for timeline in plan, recorded:
        found = [0.0] * plan.schedule.stages
        for row in timeline.spans:
            for op, start, end in row:
                if op.kind in kinds:
                    found[op.stage] += (end - start) / plan.schedule.microbatches
        sums.append(found)
    return tuple(Pair(predicted, was) for predicted, was in zip(*sums))
