"""Timings that can be compared: taken in turns in one process, so that a drift of the machine hits all alike."""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


@dataclass
class Timings:
    """Times of the passes of one thing.

    Attributes:
        wall: seconds of each pass.
        cpu: seconds of processor time of each pass, all threads together.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median wall time, in seconds."""
        return statistics.median(self.wall)


def gpus() -> range:
    """Those of the machine, once this process has used one."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def synchronize() -> None:
    """Waits for them."""
    for gpu in gpus():
        torch.cuda.synchronize(gpu)


def interleaved(
    things: Mapping[str, Callable[[], object]], passes: int, warm_up: int = 2
) -> dict[str, Timings]:
    """Times all things once a round, in an order drawn again for each.

    Taken in a fixed order would not do: each leaves the heap and the caches to the next, always the same one.

    Args:
        things: what to call, by name.
        passes: number of rounds.
        warm_up: rounds before, not timed.

    Example:
        >>> found = interleaved({"nothing": lambda: None, "little": lambda: sum(range(100))}, passes=3)
        >>> len(found["little"].wall)
        3
    """
    draw = random.Random(0)
    timings = {name: Timings() for name in things}
    for number in range(-warm_up, passes):
        for name in draw.sample(list(things), len(things)):
            synchronize()
            cpu, wall = time.process_time(), time.perf_counter()
            things[name]()
            synchronize()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if number >= 0:
                timings[name].wall.append(took[0])
                timings[name].cpu.append(took[1])
    return timings


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the rounds' ratios: the two of a round were taken shortly after each other.

    Example:
        >>> ratio([1.0, 2.0, 9.0], [2.0, 4.0, 3.0])
        0.5
    """
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, then the 25th and the 75th percentile.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 9.0])
        (3.0, 2.0, 4.0)
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
    return middle, low, high


def spread(name: str, values: Sequence[float]) -> Row:
    """Three cells: the median under that name, and the percentiles."""
    return dict(zip((name, f"{name}: 25%", f"{name}: 75%"), quartiles(values)))


def forget_peak() -> int:
    """Lets ``growth`` start again. Linux alone can.

    Returns:
        Bytes of memory that the process has.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def growth(before: int) -> int:
    """Bytes of memory that the process has had at most since ``forget_peak``, beyond those it had then.

    Not below 0: Linux counts pages a few at a time, and gives some back between the two counts.

    Args:
        before: what ``forget_peak`` returned.
    """
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def environment() -> dict[str, Any]:
    """Where and how this was measured."""
    spec = sys.modules["__main__"].__spec__  # None of a script that is no module.
    script = ["-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["python", *script, *sys.argv[1:]]),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "allocator": {name: value for name, value in os.environ.items() if "MALLOC" in name or name == "LD_PRELOAD"},
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown. A column's name is a key; floats are rounded to three digits that count.

    Example:
        >>> print(table([{"chunks": 4, "ratio": 0.98765}]))
        | chunks | ratio |
        |---|---|
        | 4 | 0.988 |
    """
    if not rows:
        return "(nothing measured)"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(row.get(name, '')) for name in columns)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.3f}"


def save(path: str, environment: dict[str, Any], tables: Mapping[str, Sequence[Row]]) -> None:
    """Writes the tables and their environment as JSON."""
    text = json.dumps({"environment": environment, "tables": tables}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")
