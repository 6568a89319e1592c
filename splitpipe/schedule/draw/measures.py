"""The measures of a schedule with times in words, and number formats for all pictures."""
from __future__ import annotations

import math
from collections.abc import Sequence

from splitpipe.schedule.draw import palette
from splitpipe.schedule.op import Kind
from splitpipe.schedule.plurals import counted
from splitpipe.schedule.timed import TimedSchedule

_MANY = 16  # With more devices, only the least and the largest number are printed.


def verify(played: Sequence[TimedSchedule]) -> None:
    """Raises for schedules that can't be drawn to scale."""
    for each in played:
        if not isinstance(each, TimedSchedule):
            raise TypeError(f"others has {each!r}: expected timelines, such as schedule.simulate returns.")
        if not (each.makespan == 0 or 1e-300 < each.makespan < math.inf):
            raise ValueError(
                f"{title(each)}: the makespan is {each.makespan}, which can't be drawn to scale: expected "
                f"{'larger' if each.makespan < 1 else 'smaller'} costs."
            )


def title(played: TimedSchedule) -> str:
    schedule = played.schedule
    parts = [counted(schedule.devices, "device"), counted(schedule.microbatches, "microbatch")]
    if schedule.stages != schedule.devices:
        parts.append(counted(schedule.stages, "stage"))
    return f"{name(played)}: {', '.join(parts)}"


def name(played: TimedSchedule) -> str:
    return printable(played.label) or "schedule"


def printable(text: str) -> str:
    """A text without control characters that would affect its display."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


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


def idle(played: TimedSchedule) -> list[float]:
    """How long each device is idle; rounding errors count as 0."""
    return [each if each > 1e-9 * played.makespan else 0.0 for each in played.idle]


def each_device(numbers: Sequence[float]) -> str:
    """One number per device, or, for many devices, the least and the largest."""
    texts = [short(number) for number in numbers]
    if len(set(texts)) == 1:
        return texts[0] + (" each" if len(texts) > 1 else "")
    return " ".join(texts) if len(texts) <= _MANY else f"{short(min(numbers))} to {short(max(numbers))}"


def lines(played: TimedSchedule) -> list[str]:
    """All measures, in a few lines of text."""
    found = [
        f"makespan {short(played.makespan)}, bubble {percent(played.bubble)}; "
        f"longest {short(played.longest)}, bubble {percent(played.bubble_longest)}",
        f"idle on the devices: {each_device(idle(played))}",
        f"peak activations, in microbatches: {each_device(played.peak_activations)}",
    ]
    if played.peak_bytes is not None:
        found.append(f"peak bytes: at most {size(max(played.peak_bytes))} on a device")
    least = ", ".join(f"{name} {short(bound)}" for name, bound in played.bounds.items())
    return [*found, f"lower bound for any order: {least}"]


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


def steps(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A curve with a single point per time, so that freeing and taking at the same time makes no dent."""
    return list(dict(curve).items())


def alive(played: TimedSchedule, device: int) -> list[tuple[float, float]]:
    """The activations alive on a device, in microbatches on all its stages."""
    share = max(1, played.schedule.placement.count(device))
    return [(time, value / share) for time, value in steps(played.curve(device))]


def meanings(played: Sequence[TimedSchedule]) -> dict[Kind, str]:
    """The kinds of op that occur, and what they mean."""
    kinds = {span.op.kind for each in played for row in each.spans for span in row}
    return {kind: meaning for kind, meaning in palette.MEANING.items() if kind in kinds}
