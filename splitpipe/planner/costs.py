"""The candidates for a plan, and their costs: times for the simulation, and bytes on each device."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from splitpipe.checks import UNCHECKPOINTED_TAIL
from splitpipe.planner.profile import Profile
from splitpipe.schedule.construct.library import SCHEDULES, build, variants
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.play import OpOrder
from splitpipe.schedule.plurals import counted

Checkpoint = Literal["never", "except_last", "always"]
# Possible numbers of stages per device, if the schedule leaves it open.
COUNTS = (1, 2, 3, 4)
# The first layer of each stage, and the number of layers.
Cut = tuple[int, ...]


class Alive(NamedTuple):
    """The microbatches that a device holds while an op runs."""

    op: tuple[str, int, bool]  # Its kind and stage; True if it recomputes.
    # For each stage of the device: its number, and the numbers of microbatches that it holds as their input only (for
    # recomputation), as all their saved tensors, and as what W needs.
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, independent of the cuts."""

    schedule: Schedule
    checkpoint: Checkpoint
    variant: str  # The schedule's name, with the options that are not its defaults.
    dropin: bool = False  # Autograd runs backward, after all forwards.

    @property
    def chunks(self) -> int:
        """The number of microbatches."""
        return self.schedule.microbatches

    @property
    def uncheckpointed(self) -> int:
        """How many of the last microbatches aren't checkpointed."""
        tail = UNCHECKPOINTED_TAIL[self.checkpoint]
        return self.chunks if tail is None else tail

    @cached_property
    def order(self) -> OpOrder:
        """Its ops, for simulating them with the costs of any cut."""
        return OpOrder(self.schedule)

    @cached_property
    def forward(self) -> OpOrder:
        """Its F only, for simulating them."""
        rows = [[op for op in row if op.kind == "F"] for row in self.schedule.rows]
        return OpOrder(Schedule(rows, self.schedule.placement))

    @cached_property
    def alive(self) -> tuple[tuple[Alive, ...], ...]:
        """For each device, each combination of microbatches that are alive while its ops run."""
        return tuple(tuple(dict.fromkeys(self._alive(row))) for row in self.schedule.rows)

    @cached_property
    def most(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the most microbatches that it holds as their input only, as all saved tensors, and for W."""
        again = int(self.uncheckpointed < self.chunks)  # One microbatch is recomputed.
        found = [(0, again, 0)] * self.schedule.stages
        for row in self.alive:
            for _, counts in row:
                for stage, inputs, whole, late in counts:
                    before = found[stage]
                    found[stage] = max(before[0], inputs), max(before[1], whole + again), max(before[2], late)
        return tuple(found)

    def _alive(self, row: Sequence[Op]) -> Iterator[Alive]:
        stop = self.chunks - self.uncheckpointed
        alive: dict[int, list[int]] = {op.stage: [0, 0, 0] for op in row}
        for kind, stage, microbatch in row:
            again = microbatch < stop
            sort = 0 if again else 1
            if kind == "F":
                alive[stage][sort] += 1
            yield Alive((kind, stage, again), tuple((at, *counts) for at, counts in alive.items()))
            if kind in ("B", "BW"):
                alive[stage][sort] -= 1
            if kind == "B":
                alive[stage][2] += 1
            elif kind == "W":
                alive[stage][2] -= 1

    def __str__(self) -> str:
        again = "" if self.checkpoint == "never" else f", checkpoint={self.checkpoint!r}"
        return f"{self.variant}, {counted(self.chunks, 'chunk')}{again}"


def candidates(
    devices: int, chunks: Sequence[int], layers: int, names: Sequence[str | Schedule] | None, dropin: bool
) -> Iterator[Candidate]:
    """Every candidate for these numbers of devices, chunks and layers; ``names`` are schedules, None: all."""
    for number in chunks:
        for variant, schedule in _schedules(devices, number, names, dropin):
            if schedule.devices == devices and schedule.stages <= layers:
                yield Candidate(schedule, "never", variant, dropin)
                # gpipe's backward would start by recomputing the last microbatch, which takes as much memory.
                spare = schedule.name == "gpipe" and number > 1
                yield Candidate(schedule, "except_last" if spare else "always", variant, dropin)


def _schedules(
    devices: int, chunks: int, names: Sequence[str | Schedule] | None, dropin: bool
) -> Iterator[tuple[str, Schedule]]:
    if dropin:
        # As autograd does on accelerators: weight gradients come after all input gradients have been sent.
        yield "gpipe", build("gpipe", devices, chunks, split=True)
        return
    seen: set[Schedule] = set()
    for name in SCHEDULES if names is None else names:
        if isinstance(name, Schedule):
            if name.microbatches == chunks:
                yield name.name or "a custom schedule", name
            continue
        for options in variants(name, devices, COUNTS):
            try:
                schedule = build(name, devices, chunks, **options)
            except ValueError:
                continue  # The schedule doesn't support these numbers.
            if schedule not in seen:  # With few microbatches or devices, many are equal.
                seen.add(schedule)
                default = {"stages_per_device": 2, "group": devices, "split": False}
                given = ", ".join(f"{option}={value}" for option, value in options.items() if value != default[option])
                yield f"{name} ({given})" if given else name, schedule


class LayerSums:
    """Sums over the layers before each layer, on one kind of device, for one number of chunks."""

    def __init__(self, profile: Profile, kind: int, chunks: int) -> None:
        layers = profile.kinds[kind].layers[chunks]
        once = 1 + 1 + profile.optimizer_state
        self.gap, self.workspace = profile.kinds[kind].gap, profile.kinds[kind].workspace
        self.forward = _sums([layer.forward for layer in layers])
        self.backward_input = _sums([layer.backward_input for layer in layers])
        self.backward_weight = _sums([layer.backward_weight for layer in layers])
        self.work = _sums([layer.forward + layer.backward_input + layer.backward_weight for layer in layers])
        self.saved = _sums([layer.saved for layer in layers])
        self.kept = _sums([layer.kept for layer in layers])
        # If a layer saves its output and the next one its input, they share this memory.
        self.twice = _sums([min(one.saved_output, two.saved_input) for one, two in zip(layers, layers[1:])])
        self.input = [*(layer.input for layer in layers), 0]
        self.saved_input = [layer.saved_input for layer in layers]
        self._each = [layer.saved for layer in layers] if profile.blockwise else None
        self.static = _sums([layer.parameters * once + layer.state for layer in layers])

    def entered(self, start: int, end: int) -> float:
        """Bytes of a checkpointed microbatch: the stage's input, or those of layers recomputed separately."""
        return self.input[start] if self._each is None else sum(self.input[start:end])

    def again(self, start: int, end: int, saved: float) -> float:
        """Additional bytes while the microbatch is recomputed, if all of it saves ``saved``."""
        return saved - self.saved_input[start] if self._each is None else max(self._each[start:end])


def _sums(values: Sequence[float]) -> list[float]:
    return [0, *accumulate(values)]


class StageBytes:
    """Bytes of one stage: its layers from ``start`` to just before ``end``."""

    def __init__(self, sums: LayerSums, start: int, end: int) -> None:
        # Parameters, gradients, the optimizer's state, buffers.
        self.static = sums.static[end] - sums.static[start]
        # Memory that a B takes while it runs; as much waits between ops, to be sent or processed.
        self.passing = sums.input[start] + sums.input[end]
        # Bytes of a microbatch: its input only, all that it saved, what W needs.
        saved = sums.saved[end] - sums.saved[start] - (sums.twice[end - 1] - sums.twice[start])
        self.each = sums.entered(start, end), saved, sums.kept[end] - sums.kept[start]
        again = self.passing + sums.again(start, end, saved)
        # Memory that an op takes while it runs, without and with recomputation.
        self.during = {"F": sums.input[end], "B": self.passing, "BW": self.passing, "W": 0}
        self.during_again = {**self.during, "B": again, "BW": again}


def memory(candidate: Candidate, sums: Sequence[LayerSums], cut: Cut) -> list[float]:
    """The most bytes on each device: parameters and states, workspaces of matrix products, microbatches."""
    stages = [StageBytes(own, start, end) for own, start, end in zip(sums, cut, cut[1:])]
    found = []
    for device, row in enumerate(candidate.alive):
        own = [stage for stage, place in zip(stages, candidate.schedule.placement) if place == device]
        static = sum(stage.static + stage.passing for stage in own)
        # Two threads compute on a device, the worker and autograd's; drop-in, the latter uses two streams.
        static += (3 if candidate.dropin else 2) * sums[candidate.schedule.placement.index(device)].workspace
        most = 0.0
        for (kind, stage, again), counts in row:
            now = (stages[stage].during_again if again else stages[stage].during)[kind]
            for at, inputs, whole, late in counts:
                one, two, three = stages[at].each
                now += inputs * one + whole * two + late * three
            most = max(most, now)
        found.append(static + most)
    return found


def costs(candidate: Candidate, sums: Sequence[LayerSums], cut: Cut, profile: Profile) -> Costs:
    """The costs of the stages for the simulation, in milliseconds."""
    forward, b, w = [], [], []
    with_w = {op.stage for row in candidate.schedule.rows for op in row if op.kind == "W"}
    for stage, (own, start, end) in enumerate(zip(sums, cut, cut[1:])):
        forward.append(own.gap + own.forward[end] - own.forward[start])
        b.append(own.gap + own.backward_input[end] - own.backward_input[start])
        w.append((own.gap if stage in with_w else 0.0) + own.backward_weight[end] - own.backward_weight[start])
    copies = [profile.link.time(own.input[start]) for own, start in zip(sums[1:], cut[1:])]
    if candidate.checkpoint == "never":
        return Costs(forward, b, w, copies)
    return Costs(forward, b, w, copies, recompute=forward, uncheckpointed=candidate.uncheckpointed)


def span(candidate: Candidate, costs: Costs, own_compute: bool) -> float:
    """Milliseconds of a step; ``own_compute``: autograd has a thread per device."""
    schedule = candidate.schedule
    times = costs.times(schedule)
    if not candidate.dropin or own_compute:
        return candidate.order.makespan(times, costs.hops(schedule), costs.again(schedule))
    # On a CPU, one thread, the caller's, runs backward for all stages, with the intra-op threads of all.
    forward = candidate.forward.makespan(times, costs.hops(schedule))
    backward = candidate.chunks * sum(times["BW"]) + (candidate.chunks - candidate.uncheckpointed) * sum(times["F"])
    return forward + backward / schedule.devices
