"""The colour of an op: by its kind, and lighter for later stages of its device."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from splitpipe.schedule.op import Kind

Colour = tuple[int, int, int]

#: Distinguishable with any kind of colour vision (after Okabe and Ito); black text is readable on all of them.
BASE: dict[Kind, Colour] = {"F": (108, 158, 228), "B": (240, 168, 62), "W": (92, 188, 150), "BW": (228, 126, 84)}
MEANING: dict[Kind, str] = {"F": "forward", "B": "input gradient", "W": "weight gradients", "BW": "both gradients"}

TERMINAL: dict[Kind, tuple[int, ...]] = {
    "F": (75, 117, 153, 189), "B": (214, 221, 228, 230), "W": (72, 115, 151, 194), "BW": (173, 216, 217, 224)
}

_WHITEST = 0.62  # For a device's last stage.


def shade(kind: Kind, turn: int, turns: int) -> Colour:
    """The colour of a kind of op."""
    white = _WHITEST * turn / max(2, turns - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in BASE[kind])
    return red, green, blue


def web(colour: Colour) -> str:
    """A colour for SVG and CSS."""
    return "#" + bytes(colour).hex()


def terminal(kind: Kind, turn: int, turns: int) -> int:
    """The same in a terminal's 256 colours, which have four shades per kind."""
    shades = TERMINAL[kind]
    return shades[turn if turns <= len(shades) else turn * (len(shades) - 1) // (turns - 1)]


def turns(placement: Sequence[int]) -> list[int]:
    """For each stage, its number among the stages of its device."""
    seen: Counter[int] = Counter()
    found = []
    for device in placement:
        found.append(seen[device])
        seen[device] += 1
    return found
