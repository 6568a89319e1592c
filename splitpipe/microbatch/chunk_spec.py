"""``batched=``: a flag for everything inside a value, or a nesting of flags that matches its outer levels.

    True, 0, 1, -1   split along the first dimension, or along this one; a list as its sizes suggest
    "rows"           a list with one entry per row, split between its entries
    "groups"         a tensor or list with k entries per row, side by side, split between rows
    False            every microbatch gets it whole
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitpipe.microbatch.messages import misfit
from splitpipe.microbatch.tree import Level

ROWS, GROUPS = "rows", "groups"
#: What a nesting of flags is made of.
NESTED = dict, tuple


def verify_batched(batched: Any) -> tuple[Any, Any]:
    """``batched=`` for an nn.Sequential: the flags of the input and of the target; one dimension is that of both."""
    target = batched if type(batched) is int else None
    if isinstance(batched, Mapping) and "target" in batched and batched.keys() <= {"input", "target"}:
        target = _verify(batched["target"], "batched['target']")
        batched = batched.get("input")
    return None if batched is None else _verify(batched, "batched"), target


def verify_named(batched: Any) -> dict[str, Any] | None:
    """``batched=`` for a module with cuts: by the names of arguments."""
    if batched is None:
        return None
    if not isinstance(batched, Mapping) or not all(isinstance(name, str) for name in batched):
        raise TypeError(f"batched is {batched!r}: expected a dict by argument name, such as {{'mask': False}}.")
    return {name: _verify(flag, f"batched[{name!r}]") for name, flag in batched.items()}


def _verify(flag: Any, where: str) -> Any:
    if isinstance(flag, int) or isinstance(flag, str) and flag in (ROWS, GROUPS):
        return flag
    if isinstance(flag, Mapping):
        return {key: _verify(inner, f"{where}[{key!r}]") for key, inner in flag.items()}
    if isinstance(flag, (tuple, list)):
        return tuple([_verify(inner, f"{where}[{number}]") for number, inner in enumerate(flag)])
    raise TypeError(f"{where} is {flag!r}: expected True, False, an int, 'rows', 'groups', or a nesting of these.")


def flags_inside(flag: dict[str, Any] | tuple[Any, ...], value: Any, level: Level, where: str) -> list[Any]:
    """The flags of a container's parts, of a nesting of flags. Raises a ValueError if that doesn't match it."""
    if isinstance(flag, dict) and isinstance(value, Mapping) and not flag.keys() - {*level.keys}:
        return [flag.get(key, True) for key in level.keys]
    if isinstance(flag, tuple) and not isinstance(value, Mapping) and len(level.parts) == len(flag):
        return [*flag]
    raise misfit(where, flag, value)
