"""``batched=``: tells which tensors of an input are cut, and which go whole into every microbatch.

It is a nesting of True (cut) and False (whole), with which the input's nesting begins:

    (True, False)       of (x, mask): the mask goes whole
    {"mask": False}     of {"x": x, "mask": mask}: all others are cut
    (True, (False,))    of (x, (tables,)): all that is inside of tables goes whole
"""
from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from splitpipe.core.microbatch import flatten
from splitpipe.schedule.plurals import counted

_MEANING = (
    "None, which cuts all tensors, or a nesting of tuple, list and dict that the input's begins with, with True for "
    "what is cut and False for what goes whole, as (True, False) for (x, mask) or {'mask': False} for a dict"
)


def verify_batched(batched: Any) -> Any:
    """The argument, as a nesting of our own."""
    if batched is None:
        return None
    found = nesting_of_flags(batched, "batched")
    if found is False:
        raise ValueError(f"batched is False, which leaves nothing to cut into microbatches: expected {_MEANING}.")
    return found


def nesting_of_flags(flag: Any, where: str) -> Any:
    """A nesting of True and False, verified, as one of our own."""
    if isinstance(flag, bool):
        return flag
    if isinstance(flag, Mapping):
        return {key: nesting_of_flags(inner, f"{where}[{key!r}]") for key, inner in flag.items()}
    if isinstance(flag, (tuple, list)):
        return tuple([nesting_of_flags(inner, f"{where}[{number}]") for number, inner in enumerate(flag)])
    raise TypeError(f"{where} is {flag!r}: expected {_MEANING}.")


def spread(flag: Any, value: Any, where: str = "the input") -> list[bool]:
    """A flag for each leaf of a value, in the order that they are flattened in: True if it is cut."""
    if isinstance(flag, bool):
        return [flag] * len(flatten(value, where, batch=True)[0])
    if isinstance(flag, Mapping):
        named = value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else value
        if not isinstance(named, Mapping):
            raise _misfit(where, "names what is in it", value)
        if flag.keys() - named.keys():
            raise _misfit(where, f"names {', '.join(repr(key) for key in flag if key not in named)} there", value)
        return [
            cut for key, inner in named.items() for cut in spread(flag.get(key, True), inner, f"{where}[{key!r}]")
        ]
    if not isinstance(value, (tuple, list, deque)) or len(value) != len(flag):
        raise _misfit(where, f"has {counted(len(flag), 'value')} there", value)
    return [
        cut
        for number, (one, inner) in enumerate(zip(flag, value))
        for cut in spread(one, inner, f"{where}[{number}]")
    ]


def _misfit(where: str, says: str, value: Any) -> ValueError:
    found = type(value).__name__
    if isinstance(value, Mapping):
        found += f" of {', '.join(map(repr, value))}" if value else " of nothing"
    elif isinstance(value, (tuple, list, deque)):
        found += f" of {len(value)}"
    return ValueError(
        f"{where} is a {found}, but batched {says}: expected a nesting that the input's begins with. Build the model "
        "with batched= for the inputs that it is given."
    )
