"""The candidates for a plan, and their costs: times for the simulation, and bytes on each device."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from splitpipe.checks import UNCHECKPOINTED_TAIL, Checkpoint
from splitpipe.planner.measure import Profile
from splitpipe.schedule.construct.library import SCHEDULES, build, variants
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Schedule, counted
from splitpipe.schedule.play import OpOrder

# Possible numbers of stages per device, if the schedule leaves it open.
COUNTS = (1, 2, 3, 4)
# The first layer of each stage, and the number of layers.
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    schedule: Schedule
    checkpoint: Checkpoint
    variant: str  # The schedule's name, with the options that are not its defaults.

    @property
    def chunks(self) -> int:
        return self.schedule.microbatches

    @property
    def checkpointed(self) -> int:
        """How many of the first microbatches are checkpointed."""
        tail = UNCHECKPOINTED_TAIL[self.checkpoint]
        return 0 if tail is None else self.chunks - tail

    @cached_property
    def order(self) -> OpOrder:
        """Its ops, for simulating them with the costs of any cuts."""
        return OpOrder(self.schedule)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the most microbatches that are between F and B."""
        now, most = [0] * self.schedule.stages, [0] * self.schedule.stages
        for kind, stage, _ in (op for row in self.schedule.rows for op in row):
            now[stage] += {"F": 1, "W": 0}.get(kind, -1)
            most[stage] = max(most[stage], now[stage])
        return tuple(most)

    def __str__(self) -> str:
        again = "" if self.checkpoint == "never" else f", checkpoint={self.checkpoint!r}"
        return f"{self.variant}, {counted(self.chunks, 'chunk')}{again}"


def candidates(
    devices: int, chunks: Sequence[int], names: Sequence[str | Schedule] | None, dropin: bool
) -> Iterator[Candidate]:
    """Every candidate for these numbers of devices and chunks; ``names`` are schedules, None: all."""
    for number in chunks:
        for variant, schedule in _schedules(devices, number, names, dropin):
            yield Candidate(schedule, "never", variant)
            # gpipe's backward would start by recomputing the last microbatch, which takes as much memory.
            spare = schedule.name == "gpipe" and number > 1
            yield Candidate(schedule, "except_last" if spare else "always", variant)


def _schedules(
    devices: int, chunks: int, names: Sequence[str | Schedule] | None, dropin: bool
) -> Iterator[tuple[str, Schedule]]:
    if dropin:  # Weight gradients come after all input gradients have been sent.
        yield "gpipe", build("gpipe", devices, chunks, split=True)
        return
    seen: set[Schedule] = set()
    for name in SCHEDULES if names is None else names:
        if isinstance(name, Schedule):
            if (name.devices, name.microbatches) == (devices, chunks):
                yield name.name or "a custom schedule", name
            continue
        for options, schedule in variants(name, devices, chunks, COUNTS):
            if schedule not in seen:  # With few microbatches or devices, many are equal.
                seen.add(schedule)
                given = ", ".join(f"{option}={value}" for option, value in options.items())
                yield f"{name} ({given})" if given else name, schedule


class LayerSums:
    """Sums over the layers before each layer, for one number of chunks."""

    def __init__(self, profile: Profile, chunks: int) -> None:
        layers = profile.layers[chunks]
        once = 1 + 1 + profile.optimizer_state
        self.forward = [0, *accumulate(layer.forward for layer in layers)]
        self.backward_input = [0, *accumulate(layer.backward_input for layer in layers)]
        self.backward_weight = [0, *accumulate(layer.backward_weight for layer in layers)]
        self.time = [0, *accumulate(layer.time for layer in layers)]
        self.new = [0, *accumulate(layer.saved - layer.shared for layer in layers)]
        self.kept = [0, *accumulate(layer.kept for layer in layers)]
        self.input = [*(layer.input for layer in layers), 0]
        self.shared = [layer.shared for layer in layers]
        self.static = [0, *accumulate(layer.parameters * once + layer.state for layer in layers)]


class StageBytes:
    """Bytes of one stage: its layers from ``start`` to just before ``end``."""

    def __init__(self, sums: LayerSums, start: int, end: int) -> None:
        #: Parameters, gradients, the optimizer's state, buffers.
        self.static = sums.static[end] - sums.static[start]
        self.input, self.output = sums.input[start], sums.input[end]
        #: Of a microbatch, what F saves; without its input, which a checkpointed one has; and what W needs.
        self.again = sums.new[end] - sums.new[start]
        self.saved = self.again + sums.shared[start]
        self.kept = sums.kept[end] - sums.kept[start]

    def during(self, kind: str, recomputes: bool) -> float:
        if kind in ("F", "W"):
            return self.output if kind == "F" else 0.0
        # In a BW, W follows B: what it needs is there when autograd has freed all that was saved.
        late = max(0.0, self.kept - self.saved) if kind == "BW" else 0.0
        return self.input + self.output + late + (self.again if recomputes else 0.0)


def memory(candidate: Candidate, sums: LayerSums, cuts: Cuts) -> list[float]:
    """The most bytes on each device: parameters and states, and what microbatches hold."""
    stages = [StageBytes(sums, start, end) for start, end in zip(cuts, cuts[1:])]
    found = []
    for device, row in enumerate(candidate.schedule.rows):
        own = [stage for stage, place in zip(stages, candidate.schedule.placement) if place == device]
        # As much as passes between stages waits between ops, to be sent or processed.
        now = most = sum(stage.static + stage.input + stage.output for stage in own)
        for kind, j, i in row:
            stage, again = stages[j], i < candidate.checkpointed
            held = stage.input if again else stage.saved
            now += held if kind == "F" else 0.0
            most = max(most, now + stage.during(kind, again))
            now -= held if kind in ("B", "BW") else 0.0
            now += {"B": stage.kept, "W": -stage.kept}.get(kind, 0.0)
        found.append(most)
    return found


def costs(candidate: Candidate, sums: LayerSums, cuts: Cuts, profile: Profile) -> Costs:
    """The costs of the stages for the simulation, in milliseconds."""
    with_w = {op.stage for row in candidate.schedule.rows for op in row if op.kind == "W"}
    stages = [*zip(cuts, cuts[1:])]
    forward = [profile.gap + sums.forward[end] - sums.forward[start] for start, end in stages]
    b = [profile.gap + sums.backward_input[end] - sums.backward_input[start] for start, end in stages]
    w = [sums.backward_weight[end] - sums.backward_weight[start] for start, end in stages]
    w = [time + profile.gap if stage in with_w else time for stage, time in enumerate(w)]
    copies = [profile.latency + sums.input[start] / profile.bandwidth for start in cuts[1:-1]]
    if candidate.checkpoint == "never":
        return Costs(forward, b, w, copies)
    return Costs(forward, b, w, copies, recompute=forward, uncheckpointed=candidate.chunks - candidate.checkpointed)
