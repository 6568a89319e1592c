"""The ways to run a model that a plan chooses from: schedules, microbatches, and what is checkpointed."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from splitpipe.schedule.construct.library import SCHEDULES, build, variants
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.play import Course

Checkpoint = Literal["never", "except_last", "always"]
#: How many stages a device may have, where the schedule leaves it open.
COUNTS = (1, 2, 3, 4)


class Moment(NamedTuple):
    """What is alive on a device while an op runs.

    Attributes:
        op: its kind and stage, and whether it recomputes.
        alive: for each stage of the device: its number, how many microbatches have their inputs alone there, for
            recomputation, how many have all that they saved, and how many what W needs.
    """

    op: tuple[str, int, bool]
    alive: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Way:
    """One way to run a model, wherever it is cut.

    Args:
        schedule: the order of the passes.
        checkpoint: which microbatches are computed again in backward.
        variant: the schedule's name, with the options that are not its defaults.
        dropin: whether autograd goes backward, after all of forward.
    """

    schedule: Schedule
    checkpoint: Checkpoint
    variant: str
    dropin: bool = False

    @property
    def chunks(self) -> int:
        """The number of microbatches."""
        return self.schedule.microbatches

    @property
    def spared(self) -> int:
        """How many of the last microbatches are not checkpointed."""
        return {"never": self.chunks, "except_last": 1, "always": 0}[self.checkpoint]

    @cached_property
    def course(self) -> Course:
        """Its ops, to be played at the costs of any cut."""
        return Course(self.schedule)

    @cached_property
    def forward(self) -> Course:
        """The same of forward alone."""
        rows = [[op for op in row if op.kind == "F"] for row in self.schedule.rows]
        return Course(Schedule(rows, self.schedule.placement))

    @cached_property
    def moments(self) -> tuple[tuple[Moment, ...], ...]:
        """For each device, what is alive while its ops run, each combination once. A row is run in its order."""
        return tuple(tuple(dict.fromkeys(self._moments(row))) for row in self.schedule.rows)

    @cached_property
    def most(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, how many microbatches have their inputs alone there, all, or what W needs, at most."""
        found = [(0, 1 if self.spared < self.chunks else 0, 0)] * self.schedule.stages  # One is computed again.
        again = self.spared < self.chunks
        for moments in self.moments:
            for _, alive in moments:
                for stage, inputs, whole, late in alive:
                    before = found[stage]
                    found[stage] = max(before[0], inputs), max(before[1], whole + again), max(before[2], late)
        return tuple(found)

    def _moments(self, row: Sequence[Op]) -> Iterator[Moment]:
        stop = self.chunks - self.spared
        alive: dict[int, list[int]] = {op.stage: [0, 0, 0] for op in row}
        for kind, stage, microbatch in row:
            again = microbatch < stop
            held = 0 if again else 1
            if kind == "F":
                alive[stage][held] += 1
            yield Moment((kind, stage, again), tuple((at, *counts) for at, counts in alive.items()))
            if kind in ("B", "BW"):
                alive[stage][held] -= 1
            if kind == "B":
                alive[stage][2] += 1
            elif kind == "W":
                alive[stage][2] -= 1

    def __str__(self) -> str:
        again = "" if self.checkpoint == "never" else f", checkpoint={self.checkpoint!r}"
        return f"{self.variant}, {self.chunks} chunk{'s' if self.chunks != 1 else ''}{again}"


def ways(
    devices: int, chunks: Sequence[int], layers: int, names: Sequence[str | Schedule] | None, dropin: bool
) -> Iterator[Way]:
    """Every way that goes with some numbers.

    Args:
        devices: how many there are.
        chunks: numbers of microbatches to choose from.
        layers: of the module. No schedule has more stages.
        names: of schedules, or schedules, to choose from; None: all names.
        dropin: whether the model's forward is all that it does, and autograd goes backward.
    """
    for number in chunks:
        for variant, schedule in _schedules(devices, number, names, dropin):
            if schedule.devices == devices and schedule.stages <= layers:
                yield Way(schedule, "never", variant, dropin)
                # The last one's recomputation would be the first thing in gpipe's backward: it takes as much memory.
                spare = schedule.name == "gpipe" and number > 1
                yield Way(schedule, "except_last" if spare else "always", variant, dropin)


def _schedules(
    devices: int, chunks: int, names: Sequence[str | Schedule] | None, dropin: bool
) -> Iterator[tuple[str, Schedule]]:
    if dropin:
        # What autograd does on accelerators: weight gradients come when all input gradients have left.
        yield "gpipe", build("gpipe", devices, chunks, split=True)
        return
    seen: set[Schedule] = set()
    for name in SCHEDULES if names is None else names:
        if isinstance(name, Schedule):
            if name.microbatches == chunks:
                yield name.name or "a schedule of your own", name
            continue
        for options in variants(name, devices, COUNTS):
            try:
                schedule = build(name, devices, chunks, **options)
            except ValueError:
                continue  # Its own rule does not allow these numbers.
            if schedule not in seen:  # With few microbatches or devices many are alike.
                seen.add(schedule)
                default = {"stages_per_device": 2, "group": devices, "split": False}
                given = ", ".join(f"{option}={value}" for option, value in options.items() if value != default[option])
                yield f"{name} ({given})" if given else name, schedule
