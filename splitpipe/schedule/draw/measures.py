"""The measures of a schedule with times in words, and the number formats and colours of all pictures."""
from __future__ import annotations

import math
from collections.abc import Sequence

from splitpipe.schedule.op import CHANGES, Kind, Schedule, counted
from splitpipe.schedule.timed import TimedSchedule

_MANY = 16  # With more devices, only the least and the largest number are printed.
#: Distinguishable with any kind of colour vision (after Okabe and Ito); black text is readable on all of them.
BASE: dict[Kind, tuple[int, int, int]] = {
    "F": (108, 158, 228), "B": (240, 168, 62), "W": (92, 188, 150), "BW": (228, 126, 84)
}
MEANING: dict[Kind, str] = {"F": "forward", "B": "input gradient", "W": "weight gradients", "BW": "both gradients"}

_WHITEST = 0.62  # For a device's last stage.


def verify(timelines: Sequence[TimedSchedule]) -> None:
    for each in timelines:
        if not isinstance(each, TimedSchedule):
            raise TypeError(f"others has {each!r}: expected timelines, such as schedule.simulate returns.")
        if not (each.makespan == 0 or 1e-300 < each.makespan < math.inf):
            way = "larger" if each.makespan < 1 else "smaller"
            raise ValueError(f"{title(each)}: the makespan of {each.makespan} has no scale: expected {way} costs.")


def title(timeline: TimedSchedule) -> str:
    schedule = timeline.schedule
    parts = [counted(schedule.devices, "device"), counted(schedule.microbatches, "microbatch")]
    if schedule.stages != schedule.devices:
        parts.append(counted(schedule.stages, "stage"))
    return f"{name(timeline)}: {', '.join(parts)}"


def name(timeline: TimedSchedule) -> str:
    return timeline.label or "schedule"


def short(number: float) -> str:
    return f"{number:.6g}"


def percent(part: float) -> str:
    return f"{100 * max(0.0, part):.2f}%"


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


def idle(timeline: TimedSchedule) -> list[float]:
    """How long each device is idle; rounding errors count as 0."""
    return [each if each > 1e-9 * timeline.makespan else 0.0 for each in timeline.idle]


def each_device(numbers: Sequence[float]) -> str:
    """One number per device, or, for many devices, the least and the largest."""
    texts = [short(number) for number in numbers]
    if len(set(texts)) == 1:
        return texts[0] + (" each" if len(texts) > 1 else "")
    return " ".join(texts) if len(texts) <= _MANY else f"{short(min(numbers))} to {short(max(numbers))}"


def texts(timeline: TimedSchedule) -> dict[str, str]:
    """All measures but the lower bounds, by name."""
    return {
        "makespan": short(timeline.makespan),
        "bubble": percent(timeline.bubble),
        "longest": short(timeline.longest),
        "its bubble": percent(timeline.bubble_longest),
        "idle": each_device(idle(timeline)),
        "peak activations": each_device(timeline.peak_activations),
    }


def lines(timeline: TimedSchedule) -> list[str]:
    """All measures, in a few lines of text."""
    text = texts(timeline)
    bounds = ", ".join(f"{name} {short(bound)}" for name, bound in timeline.bounds.items())
    return [
        f"makespan {text['makespan']}, bubble {text['bubble']}; longest {text['longest']}, bubble {text['its bubble']}",
        f"idle on the devices: {text['idle']}",
        f"peak activations, in microbatches: {text['peak activations']}",
        f"lower bound for any order: {bounds}",
    ]


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """The lines of a text table. ``sides`` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths))
    return [form.format(*row).rstrip() for row in rows]


def ticks(whole: float, most: int) -> list[float]:
    """Round times from 0 to the end of a picture, at most ``most``."""
    if whole <= 0:
        return [0.0]
    rough = whole / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * number for number in range(int(whole / step * (1 + 1e-9)) + 1)]


def alive(timeline: TimedSchedule, device: int) -> list[tuple[float, float]]:
    """The activations alive on a device, in microbatches on all its stages, at each time of a change."""
    share = max(1, timeline.schedule.placement.count(device))
    alive, curve = 0, {0.0: 0.0}
    for (kind, *_), start, end in timeline.spans[device]:
        alive += CHANGES[kind]
        curve[start if kind == "F" else end] = alive / share
    return list(curve.items())


def meanings(timelines: Sequence[TimedSchedule]) -> dict[Kind, str]:
    """The kinds of op that occur, and what they mean."""
    kinds = {span.op.kind for each in timelines for row in each.spans for span in row}
    return {kind: meaning for kind, meaning in MEANING.items() if kind in kinds}


def legend(timelines: Sequence[TimedSchedule]) -> list[tuple[list[str], str]]:
    """The kinds of op that occur: up to four colours, for the stages of a device, and a text."""
    most = min(4, max(share for each in timelines for share in each.schedule.shares))
    items = [
        ([shade(kind, turn, most) for turn in range(most)], f"{kind} {meaning}")
        for kind, meaning in meanings(timelines).items()
    ]
    return [*items, ([], "lighter: a later stage of the device")] if most > 1 else items


def shade(kind: Kind, turn: int, turns: int) -> str:
    """The colour of a kind of op for SVG and CSS, in the stage that is number ``turn`` of ``turns`` on its device."""
    white = _WHITEST * turn / max(2, turns - 1)
    return "#" + bytes(round(part + (255 - part) * white) for part in BASE[kind]).hex()


def colours(schedule: Schedule) -> dict[tuple[Kind, int], str]:
    stages = [*enumerate(zip(turns(schedule.placement), schedule.shares))]
    return {(kind, stage): shade(kind, turn, share) for kind in BASE for stage, (turn, share) in stages}


def turns(placement: Sequence[int]) -> list[int]:
    """For each stage, its number among the stages of its device."""
    return [placement[:stage].count(device) for stage, device in enumerate(placement)]
