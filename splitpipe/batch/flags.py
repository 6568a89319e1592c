"""``batched=``: how the values of an input are split into microbatches.

    True       split: tensors along their first dimension; a list as its sizes suggest
    1, -1      tensors are split along this dimension
    "rows"     a list with one entry per row: split between its entries
    False      every microbatch gets it whole

A flag applies to everything inside. A nesting of flags matches the outer levels of the input:

    (True, False)       for (x, mask): the mask is whole
    {"mask": False}     for {"x": x, "mask": mask}: all others are split
    (True, (False,))    for (x, (tables,)): everything inside tables is whole
"""
from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from splitpipe.schedule.plurals import counted

ROWS = "rows"
_MEANING = (
    "None, which splits all tensors, or a nesting of tuples, lists and dicts that matches the outer levels of the "
    "input, with True for what is split (an int: along this dimension; 'rows': a list with one entry per row) and "
    "False for what every microbatch gets whole, such as (True, False) for (x, mask) or {'mask': False} for a dict"
)


def verify_batched(batched: Any) -> tuple[Any, Any]:
    """``batched=`` for an nn.Sequential: the flags of the input and those of the target."""
    if batched is None:
        return None, None
    target = None
    if isinstance(batched, Mapping) and "target" in batched and batched.keys() <= {"input", "target"}:
        target = nesting_of_flags(batched["target"], "batched['target']")
        batched = batched.get("input")
    found = None if batched is None else nesting_of_flags(batched, "batched")
    if found is False:
        raise ValueError(f"batched is False, which leaves nothing to split into microbatches: expected {_MEANING}.")
    return found, target


def verify_named(batched: Any) -> dict[str, Any] | None:
    """``batched=`` for a module with cuts: by the names of arguments."""
    if batched is None:
        return None
    if not isinstance(batched, Mapping) or not all(isinstance(name, str) for name in batched):
        raise TypeError(
            f"batched is {batched!r}: expected a dict by argument name, with True for what is split (an int: along "
            "this dimension; 'rows': a list with one entry per row) and False for what every microbatch gets whole, "
            "such as {'mask': False}; for a nested argument, a nesting of these."
        )
    return {name: nesting_of_flags(flag, f"batched[{name!r}]") for name, flag in batched.items()}


def nesting_of_flags(flag: Any, where: str) -> Any:
    """A nesting of flags, verified and copied into tuples and dicts."""
    if isinstance(flag, (bool, int)) or flag == ROWS and isinstance(flag, str):
        return flag
    if isinstance(flag, Mapping):
        return {key: nesting_of_flags(inner, f"{where}[{key!r}]") for key, inner in flag.items()}
    if isinstance(flag, (tuple, list)):
        return tuple([nesting_of_flags(inner, f"{where}[{number}]") for number, inner in enumerate(flag)])
    raise TypeError(
        f"{where} is {flag!r}: expected True (split along the first dimension), an int (along that dimension), 'rows' "
        "(a list with one entry per row), False (whole in every microbatch), or a tuple or dict of these."
    )


def is_nested(flag: Any) -> bool:
    """True for a nesting of flags, False for a flag or None."""
    return isinstance(flag, (dict, tuple))


def descend(flag: Any, value: Any, count: int, where: str) -> list[Any]:
    """The flags of a container's ``count`` children. Raises a ValueError if a nesting of flags doesn't match it."""
    if not is_nested(flag):
        return [None if flag == ROWS else flag] * count
    if isinstance(flag, dict):
        named = value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else value
        if not isinstance(named, Mapping):
            raise misfit(where, flag, value)
        if flag.keys() - named.keys():
            raise misfit(where, flag, value, [key for key in flag if key not in named])
        return [flag.get(key, True) for key in named]
    if not isinstance(value, (tuple, list, deque)) or len(value) != len(flag):
        raise misfit(where, flag, value)
    return list(flag)


def misfit(where: str, flag: Any, value: Any, unknown: list[Any] | None = None) -> ValueError:
    """The error for flags that don't match a value."""
    says = f"has {counted(len(flag), 'value')} there"
    if isinstance(flag, dict):
        says = f"names {', '.join(map(repr, unknown))} there" if unknown else "names what is in it"
    found = type(value).__name__
    if isinstance(value, Mapping):
        found += f" of {', '.join(map(repr, value))}" if value else " of nothing"
    elif isinstance(value, (tuple, list, deque)):
        found += f" of {len(value)}"
    return ValueError(
        f"{where} is a {found}, but batched {says}: expected a nesting that matches the outer levels of the input. "
        "Build the model with batched= for the inputs that it gets."
    )
