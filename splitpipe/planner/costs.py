"""What stages take, if the layers are cut so: times for the simulation, and bytes on each device."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from splitpipe.planner.candidates import Way
from splitpipe.planner.profile import Profile
from splitpipe.schedule.costs import Costs

#: The first layer of each stage, and the number of layers.
Cut = tuple[int, ...]


class Sums:
    """What layers before each layer take together, on one kind of device, for one number of chunks.

    Args:
        profile: of the layers.
        kind: of device.
        chunks: number of them.
    """

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
        # What a layer saves of its output and the next one of its input is one memory.
        self.twice = _sums([min(one.saved_output, two.saved_input) for one, two in zip(layers, layers[1:])])
        self.input = [*(layer.input for layer in layers), 0]
        self.saved_input = [layer.saved_input for layer in layers]
        self.static = _sums([size * once + more for size, more in zip(profile.parameters, profile.state)])


def _sums(values: Sequence[float]) -> list[float]:
    return [0, *accumulate(values)]


class Held:
    """Bytes of one stage.

    Args:
        sums: of its device.
        start: its first layer.
        end: the one after its last.

    Attributes:
        static: parameters, gradients, the optimizer's state, buffers.
        each: of a microbatch: its input alone, all that it saved, what W needs.
        passing: a value that has arrived before its turn, and one that waits to be sent.
    """

    def __init__(self, sums: Sums, start: int, end: int) -> None:
        self.static = sums.static[end] - sums.static[start]
        self._input, self._output = sums.input[start], sums.input[end]
        self.passing = self._input + self._output
        saved = sums.saved[end] - sums.saved[start] - (sums.twice[end - 1] - sums.twice[start])
        self.each = self._input, saved, sums.kept[end] - sums.kept[start]
        self._again = saved - sums.saved_input[start]

    def during(self, kind: str, again: bool) -> float:
        """What an op takes while it runs, and nothing before it or after it holds."""
        if kind == "F":
            return self._output
        if kind == "W":
            return 0
        return self._input + self._output + (self._again if again else 0)


def memory(way: Way, sums: Sequence[Sums], cut: Cut) -> list[float]:
    """The most bytes on each device: what stays, workspaces of matrix products, and what microbatches hold.

    Two threads compute on a device: the worker, and autograd's, which the drop-in has on two streams.

    Args:
        way: to run.
        sums: of the device of each stage.
        cut: of the layers.
    """
    stages = [Held(own, start, end) for own, start, end in zip(sums, cut, cut[1:])]
    found = []
    for device, moments in enumerate(way.moments):
        own = [held for stage, held in enumerate(stages) if way.schedule.placement[stage] == device]
        static = sum(held.static + held.passing for held in own)
        static += (3 if way.dropin else 2) * sums[way.schedule.placement.index(device)].workspace
        most = 0.0
        for (kind, stage, again), alive in moments:
            now = stages[stage].during(kind, again)
            for at, inputs, whole, late in alive:
                one, two, three = stages[at].each
                now += inputs * one + whole * two + late * three
            most = max(most, now)
        found.append(static + most)
    return found


def costs(way: Way, sums: Sequence[Sums], cut: Cut, profile: Profile) -> Costs:
    """What the stages take, for the simulation, in milliseconds.

    Args:
        way: to run.
        sums: of the device of each stage.
        cut: of the layers.
        profile: that the sums are of.
    """
    spans = list(zip(sums, cut, cut[1:]))
    apart = {op.stage for row in way.schedule.rows for op in row if op.kind == "W"}
    forward = [own.gap + own.forward[end] - own.forward[start] for own, start, end in spans]
    return Costs(
        forward=forward,
        backward_input=[own.gap + own.backward_input[end] - own.backward_input[start] for own, start, end in spans],
        backward_weight=[
            (own.gap if stage in apart else 0.0) + own.backward_weight[end] - own.backward_weight[start]
            for stage, (own, start, end) in enumerate(spans)
        ],
        copy=[profile.link.time(own.input[start]) for own, start, _ in spans[1:]],
        recompute=0 if way.checkpoint == "never" else forward,
        spared=0 if way.checkpoint == "never" else way.spared,
    )


def span(way: Way, costs: Costs, apart: bool) -> float:
    """Milliseconds of a step.

    Args:
        way: to run.
        costs: of its stages.
        apart: whether autograd has a thread for each device. On a CPU it has one for all stages, the caller's, with
            the intra-op threads of all: backward is taken to be as much faster.
    """
    schedule = way.schedule
    times = costs.times(schedule)
    if not way.dropin or apart:
        return way.course.makespan(times, costs.hops(schedule), costs.again(schedule))
    forward = way.forward.makespan(times, costs.hops(schedule))
    backward = way.chunks * sum(times["BW"]) + (way.chunks - way.spared) * sum(times["F"])
    return forward + backward / schedule.devices
