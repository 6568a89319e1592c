"""The names of all schedules, and the functions that build them: of ops by rules (``orders``), or of ``blocks``."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from splitpipe.schedule.construct import blocks, orders
from splitpipe.schedule.op import Schedule, counted

#: The most ops of the model that a schedule may have, which take gigabytes.
MOST = 10_000_000

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": orders.gpipe,
    "1f1b": orders.one_f_one_b,
    "eager-1f1b": orders.eager_one_f_one_b,
    "interleaved-1f1b": orders.interleaved_one_f_one_b,
    "looped-bfs": orders.looped_bfs,
    "interleaved-low-memory": blocks.interleaved_low_memory,
    "zb-h1": orders.zb_h1,
    "zb-h2": orders.zb_h2,
    "zb-v": orders.zb_v,
    "v-zb": blocks.v_zb,
    "v-half": blocks.v_half,
    "v-min": blocks.v_min,
    "1f1b-v": blocks.one_f_one_b_v,
    "two-thirds": blocks.two_thirds,
    "dualpipe-v": orders.dualpipe_v,
}


def names() -> list[str]:
    """The names of all schedules that ``build`` knows.

    Example:
        >>> "zb-h1" in names()
        True
    """
    return list(SCHEDULES)


def options(name: str) -> list[str]:
    """The names of the options that ``build`` takes for a schedule; empty for an unknown schedule."""
    return list(inspect.signature(SCHEDULES[name]).parameters)[2:] if name in SCHEDULES else []


def build(name: str, devices: int, chunks: int, **options: Any) -> Schedule:
    """Builds a named schedule.

    Args:
        name: one of ``names()``.
        devices: number of devices, at least 1.
        chunks: number of microbatches, at least 1.
        **options: of the schedule: ``split=True`` for gpipe, 1f1b and eager-1f1b (W separate from B, in idle slots:
            2BP); ``stages_per_device`` for interleaved-1f1b, looped-bfs and interleaved-low-memory (default: 2);
            ``group`` for interleaved-low-memory, from half the number of devices to all of it: how many microbatches
            pass through a stage before its device turns to the next stage. None means the default.

    Raises:
        ValueError: there is no schedule with this name, it has no such option, or it doesn't support these numbers.

    Example:
        >>> print(build("1f1b", devices=2, chunks=3))
        0F0 0F1 0BW0 0F2 0BW1 0BW2
        1F0 1BW0 1F1 1BW1 1F2 1BW2
    """
    function = SCHEDULES.get(name) if isinstance(name, str) else None
    if function is None:
        hint = "".join(f" Did you mean {near!r}?" for near in get_close_matches(str(name), SCHEDULES, 1))
        raise ValueError(f"there is no schedule named {name!r}: expected one of {', '.join(SCHEDULES)}.{hint}")
    chosen = {option: value for option, value in options.items() if value is not None}
    known = list(inspect.signature(function).parameters)[2:]
    for option in chosen:
        if option not in known:
            others = f"expected {', '.join(known)} or none" if known else "it has none"
            raise ValueError(f"{name} has no option {option!r}: {others}.")
    if not isinstance(chosen.get("split", False), bool):
        raise ValueError(f"split={chosen['split']!r}: expected True or False.")
    numbers = {option: value for option, value in chosen.items() if option != "split"}
    verify_numbers(devices=devices, chunks=chunks, **numbers)
    return replace(function(devices, chunks, **chosen), name=name)


def verify_numbers(devices: int, chunks: int, stages_per_device: int = 1, **others: int) -> None:
    """Raises for anything but whole numbers of at least 1, and for those that make too many ops."""
    numbers = {"devices": devices, "chunks": chunks, "stages_per_device": stages_per_device, **others}
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}={number!r}: expected a whole number of at least 1.")
    if devices * stages_per_device * max(chunks, devices) > MOST:
        whole = f"{counted(chunks, 'chunk')}, {counted(devices, 'device')} and {stages_per_device} per device"
        raise ValueError(f"{whole} make too many ops: expected at most {MOST:,} forward.")


def variants(
    name: str, devices: int, chunks: int, counts: Sequence[int]
) -> Iterator[tuple[dict[str, Any], Schedule]]:
    """All combinations of options that a schedule can be built with, each once, without defaults, and what they build.

    ``counts``: of stages per device.
    """
    groups = range(-(-devices // 2), devices + 1)
    choices: dict[str, Sequence[object]] = {"split": (False, True), "stages_per_device": counts, "group": groups}
    default = {"split": False, "stages_per_device": 2, "group": devices}
    own = options(name)
    for values in product(*(choices[option] for option in own)):
        chosen = dict(zip(own, values))
        if chosen.get("stages_per_device") != 1 or chosen.get("group", devices) == devices:  # One stage: all alike.
            with suppress(ValueError):  # The schedule doesn't support these numbers.
                schedule = build(name, devices, chunks, **chosen)
                yield {option: value for option, value in chosen.items() if value != default[option]}, schedule
