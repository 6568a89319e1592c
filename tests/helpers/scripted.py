"""Random forwards: modules whose Python code calls blocks in any order and keeps values wherever Python can.

A case is a plain value, as in ``randomized``: what hypothesis prints of a failing one can be pasted as an @example.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.helpers.randomized import SCHEDULES, Layer, Plain, Step, _layer, stages_a_device
from tests.helpers.randomized_models import CONTAINERS, SIMPLE

#: Statements that call a block, for every microbatch and mode.
CALLS = (
    "call", "call keyword", "call tuple", "call dict", "call dataclass", "call list", "call nested", "no grad",
    "autocast", "checkpoint",
)
#: Those that call it in some microbatches, or in training alone.
SOMETIMES = ("sometimes", "in training")
#: Those that call none: what they do is in ``Scripted``.
BETWEEN = (
    "keep", "keep view", "add", "pop", "stack", "name", "use name", "close", "use closure", "parameter", "buffer",
    "derive", "use derived", "tied", "count", "total", "write", "write kept", "write view", "fill", "detach", "cube",
    "hook", "rows", "mask", "read", "part", "pieces", "states",
)
OUTPUTS = "dict", "dataclass", "frozen", "tuple"
#: What a loss is: of each row's own losses, of those that count (their number differs from microbatch to microbatch),
#: of torch's own with ignored targets, of two terms.
LOSSES = "mean", "sum", "tokens", "tokens sum", "torch", "torch sum", "two"


@dataclass(frozen=True, repr=False)
class Act(Plain):
    """A statement of a forward: its kind, and which block or kept value it is about."""

    kind: str
    which: int = 0


@dataclass(frozen=True, repr=False)
class Scene(Plain):
    """A module with a forward of its own, how it is cut, and what it goes through.

    ``loss`` is one of LOSSES, computed by the module or by a ``function``; ``said``: the user gives its reduction.
    """

    blocks: tuple[Layer, ...]
    acts: tuple[Act, ...]
    cuts: tuple[str, ...] = ()
    schedule: str = ""
    chunks: int = 2
    steps: tuple[Step, ...] = (Step(),)
    checkpoint: str | None = None
    backward: str = "split"
    stash_limit: int | None = None
    output: str = "dict"
    loss: str = "mean"
    function: bool = False
    said: bool = False
    input_grad: bool = False
    deferred: bool = False
    hooks: str = ""
    flat: bool = True
    seed: int = 0


def borders(acts: Sequence[Act], blocks: int) -> list[str]:
    """The names of blocks that may be cuts, in the order of their first calls.

    A block that only some microbatches call may be one if it is called once: its first call comes at one place.
    """
    found: dict[str, None] = {}
    calls: dict[str, int] = {}
    unsure: set[str] = set()
    for act in acts:
        for name in _called(act, blocks):
            found.setdefault(name)
            calls[name] = calls.get(name, 0) + 1
            if act.kind in SOMETIMES:
                unsure.add(name)
    return [name for name in found if name not in unsure or calls[name] == 1]


def _called(act: Act, blocks: int) -> list[str]:
    if act.kind == "part":
        return ["part.blocks.0", "part.blocks.1"]
    return [f"blocks.{act.which % blocks}"] if act.kind in CALLS + SOMETIMES else []


@st.composite
def scenes(draw: Any, more: tuple[str, ...] = ()) -> Scene:
    """Any module with a forward of its own, and any cuts of it.

    Args:
        more: kinds of blocks that are not there otherwise.
    """
    containers = tuple(kind for kind in CONTAINERS if kind != "reentrant")
    blocks = draw(st.lists(_layer(SIMPLE + more, containers), min_size=1, max_size=6))
    act = st.builds(Act, st.sampled_from([*CALLS * 3, *SOMETIMES, *BETWEEN]), st.integers(0, 5))
    acts = draw(st.lists(act, min_size=2, max_size=14))
    name = draw(st.sampled_from(SCHEDULES))
    possible = borders(acts, len(blocks))
    if stages_a_device(name) > len(possible) + 1:
        name = draw(st.sampled_from([each for each in SCHEDULES if stages_a_device(each) <= len(possible) + 1]))
    each = stages_a_device(name)
    count = each * draw(st.integers(1, min(4, (len(possible) + 1) // each))) - 1
    chosen = draw(st.sets(st.sampled_from(possible), min_size=count, max_size=count)) if count else set()
    step = st.builds(Step, st.sampled_from(["train", "accumulate", "eval", "no grad", "thrown"]), st.integers(1, 9))
    # A schedule corrects all gradients by one number: two terms with counts of their own are refused there.
    loss = draw(st.sampled_from([each for each in LOSSES if not name or each != "two"]))
    return Scene(
        tuple(blocks),
        tuple(acts),
        tuple(border for border in possible if border in chosen),
        name,
        draw(st.integers(1, 5)),
        tuple(draw(st.lists(step, min_size=1, max_size=3))),
        draw(st.sampled_from([None, "always", "except_last", "never"])),
        draw(st.sampled_from(["split", "autograd"])),
        draw(st.sampled_from([None, 0, 300])),
        draw(st.sampled_from(OUTPUTS)),
        loss,
        draw(st.sampled_from([False, False, True])),
        draw(st.booleans()) if loss in ("mean", "sum") else False,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["", "count", "change"])),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )
