"""``split=``: a user's function that divides the arguments of a call into microbatches."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: ``split(args, kwargs, chunks)`` returns the arguments of each microbatch.
Split = Callable[[tuple[Any, ...], dict[str, Any], int], list[tuple[tuple[Any, ...], dict[str, Any]]]]
Parts = list[tuple[tuple[Any, ...], dict[str, Any]]]
_EXPECTED = "expected a list of pairs (args, kwargs), a tuple and a dict, one for each microbatch"


def verify_split(split: object) -> None:
    """Raises a TypeError unless ``split`` is a function or None."""
    if split is not None and not callable(split):
        raise TypeError(
            f"split is {split!r}: expected a function split(args, kwargs, chunks), which returns a list of (args, "
            "kwargs), one for each microbatch."
        )


def parts_of(
    split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, limit: int | None = None
) -> Parts:
    """The arguments of each microbatch; a schedule allows at most ``limit`` of them."""
    found: Any = split(args, dict(kwargs), chunks)
    if not isinstance(found, (list, tuple)) or not found:
        what = "an empty one" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise TypeError(f"split returned {what}: {_EXPECTED}.")
    parts: Parts = []
    for number, part in enumerate(found):
        if not isinstance(part, tuple) or len(part) != 2:
            raise TypeError(f"split returned {_shown(part)} for microbatch {number}: {_EXPECTED}.")
        own, named = part
        if not isinstance(own, (tuple, list)) or not isinstance(named, Mapping):
            raise TypeError(f"split returned ({_shown(own)}, {_shown(named)}) for microbatch {number}: {_EXPECTED}.")
        parts.append((tuple(own), dict(named)))
    first = parts[0]
    for number, (own, named) in enumerate(parts):
        if len(own) != len(first[0]) or named.keys() != first[1].keys():
            raise ValueError(
                f"split returned different arguments for microbatch {number} than for microbatch 0: "
                f"{_listed(own, named)} and {_listed(*first)}. Expected the same for all."
            )
    if limit is not None and len(parts) > limit:
        raise ValueError(
            f"split returned {len(parts)} microbatches, and the schedule has {limit}: expected at most that many. Give "
            "fewer, or build the model with more chunks."
        )
    return parts


def _shown(value: object) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{size}"


def _listed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return f"{len(args)} positional and {sorted(kwargs)}"
