"""Random cases: a module, how it is cut, and what it goes through.

A case is a plain value: what hypothesis prints of a failing one can be pasted as an @example. Every value of a field
goes with every other, so that a case shrinks far.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from splitpipe import schedule
from tests.helpers.randomized_forwards import BETWEEN
from tests.helpers.randomized_layers import PACKS
from tests.helpers.randomized_models import CONTAINERS, FRONT, HANDING, IN_PLACE, NOT_TWICE, SIMPLE

#: Statements that call a block, for every microbatch and mode.
CALLS = (
    "call", "call keyword", "call tuple", "call dict", "call dataclass", "call list", "call nested", "no grad",
    "checkpoint",
)
#: Those that call it in some microbatches, or in training alone.
SOMETIMES = ("sometimes", "in training")
OUTPUTS = "dict", "dataclass", "tuple"
#: What the loss of a forward is: of each row's own losses, of those that count (their number differs from microbatch
#: to microbatch), of two terms.
OWN_LOSSES = "mean", "sum", "tokens", "two"


class Plain:
    """Shows what differs from the defaults."""

    def __repr__(self) -> str:
        values: list[tuple[str, Any, Any]] = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        shown = ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({shown})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # What hypothesis asks first.


@dataclass(frozen=True, repr=False)
class Layer(Plain):
    """A layer: its kind, which of its parameters are frozen, and the layers that it contains."""

    kind: str
    frozen: str = ""
    inside: tuple[Layer, ...] = ()


@dataclass(frozen=True, repr=False)
class Skip(Plain):
    """What the layer ``start`` gives is added to what the layer ``end`` is given."""

    start: int
    end: int


@dataclass(frozen=True, repr=False)
class Step(Plain):
    """One batch; its kind is one of STEPS: with retained the graph is differentiated twice."""

    kind: str = "train"
    rows: int = 4


@dataclass(frozen=True, repr=False)
class Act(Plain):
    """A statement of a forward: its kind, and which block or kept value it is about."""

    kind: str
    which: int = 0


@dataclass(frozen=True, repr=False)
class Case(Plain):
    """A module, how it is cut, and what it goes through.

    Without ``acts`` it is an nn.Sequential of the layers, cut by a balance; with them a module whose own forward calls
    the layers as blocks, cut by names. A schedule is "", a name, or "name split", "name 3". A loss is "", one of LOSSES
    or, of a forward, of OWN_LOSSES, computed by the module or by a ``function``; if ``said``, the user gives its
    reduction.
    """

    layers: tuple[Layer, ...]
    balance: tuple[int, ...] = ()
    acts: tuple[Act, ...] = ()
    cuts: tuple[str, ...] = ()
    schedule: str = ""
    chunks: int = 1
    steps: tuple[Step, ...] = (Step(),)
    checkpoint: str | None = None
    backward: str = "split"
    stash_limit: int | None = None
    skips: tuple[Skip, ...] = ()
    flat: bool = False
    input_grad: bool = False
    deferred: bool = False
    counted: bool = False
    hooks: str = ""
    zeros: bool = False
    seed: int = 0
    loss: str = ""
    output: str = "dict"
    function: bool = False
    said: bool = False


STEPS = ("train", "accumulate", "eval", "no grad", "eval grad", "thrown", "retained")
SCHEDULES = (
    *[""] * 5, *schedule.names(), "gpipe split", "1f1b split", "eager-1f1b split", "interleaved-1f1b 3", "looped-bfs 1",
    "interleaved-low-memory 3",
)
#: torch's own losses; tests/promise/losses.py has all of them.
WEIGHT = torch.tensor([0.5, 2.0, 0.25, 1.0], dtype=torch.float64)
LOSSES: dict[str, Any] = {
    "values": nn.MSELoss(), "values sum": partial(F.smooth_l1_loss, reduction="sum"),
    "classes": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1, label_smoothing=0.125),
    "classes sum": partial(F.cross_entropy, weight=WEIGHT, reduction="sum"),
    "classes counted": lambda output, target: F.cross_entropy(output, target, reduction="sum", ignore_index=1) / (
        target != 1).sum().clamp(min=1),
}


def planned(name: str, devices: int, chunks: int) -> schedule.Schedule:
    """The schedule of that name, with the option after it."""
    name, _, option = name.partition(" ")
    options: dict[str, Any] = {"": {}, "split": {"split": True}}.get(option) or (
        {"stages_per_device": int(option)} if option else {})
    return schedule.build(name, devices, chunks, **options)


def stages_a_device(name: str) -> int:
    """How many stages a device has."""
    return planned(name, 1, 1).stages if name else 1


@st.composite
def _layer(draw: Any, simple: tuple[str, ...], containers: tuple[str, ...], depth: int = 1) -> Layer:
    kind = draw(st.sampled_from(simple + containers * bool(depth)))
    inside: tuple[Layer, ...] = ()
    if kind in CONTAINERS:
        within = simple
        if kind in ("checkpointed", "reentrant"):
            within = tuple(k for k in simple if k not in IN_PLACE + NOT_TWICE)
        inside = tuple(draw(st.lists(_layer(within, containers, depth - 1), min_size=1, max_size=3)))
    return Layer(kind, draw(st.sampled_from(["", "", "", "first", "rest", "all"])), inside)


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


def _common(draw: Any) -> dict[str, Any]:
    """What both kinds of cases have."""
    return {
        "checkpoint": draw(st.sampled_from([None, "always", "except_last", "never"])),
        "backward": draw(st.sampled_from(["split", "autograd"])),
        "stash_limit": draw(st.sampled_from([None, 0, 300])),
        "flat": draw(st.booleans()), "input_grad": draw(st.booleans()), "deferred": draw(st.booleans()),
        "hooks": draw(st.sampled_from(["", "count", "change"])), "seed": draw(st.integers(0, 3)),
    }


@st.composite
def chains(draw: Any, more: tuple[str, ...] = ()) -> Case:
    """Any nn.Sequential, and any balance of it.

    Args:
        more: kinds of layers that are not there otherwise.
    """
    name = draw(st.sampled_from(SCHEDULES))
    # Refused during a schedule.
    containers = tuple(kind for kind in CONTAINERS if not name or kind != "reentrant")
    inner = _layer(SIMPLE + more, containers)
    top = inner | st.sampled_from([*PACKS, "merge", *HANDING]).map(Layer)
    each = stages_a_device(name)
    layers = draw(st.lists(inner | top, min_size=each, max_size=max(7, each + 1)))
    front = draw(st.sampled_from(["", "", "", *FRONT]))
    if front:
        layers[0] = Layer(front)
    stages = each * draw(st.integers(1, min(3, len(layers) // each)))
    cuts = draw(st.lists(st.integers(1, len(layers) - 1), min_size=stages - 1, max_size=stages - 1, unique=True)
                if stages > 1 else st.just([]))
    ends = [*sorted(cuts), len(layers)]
    last = len(layers) - 1
    skip = st.integers(0, max(0, last - 1)).flatmap(lambda k: st.builds(Skip, st.just(k), st.integers(k + 1, last)))
    step = st.builds(Step, st.sampled_from(STEPS), st.integers(1, 9))
    return Case(
        tuple(layers), tuple(end - start for start, end in zip([0, *ends], ends)), schedule=name,
        chunks=draw(st.integers(1, 6)), steps=tuple(draw(st.lists(step, min_size=1, max_size=4))),
        skips=tuple(draw(st.lists(skip, max_size=3)) if last else []),
        counted=draw(st.booleans()), zeros=draw(st.booleans()),
        loss=draw(st.sampled_from(["", *LOSSES]) if name and draw(st.booleans()) else st.just("")), **_common(draw),
    )


@st.composite
def forwards(draw: Any, more: tuple[str, ...] = ()) -> Case:
    """Any module with a forward of its own, and any cuts of it.

    Args:
        more: kinds of blocks that are not there otherwise.
    """
    containers = tuple(kind for kind in CONTAINERS if kind != "reentrant")
    blocks = draw(st.lists(_layer(SIMPLE + more, containers), min_size=1, max_size=6))
    act = st.builds(Act, st.sampled_from([*CALLS * 3, *SOMETIMES, *BETWEEN, "part"]), st.integers(0, 5))
    acts = draw(st.lists(act, min_size=2, max_size=14))
    possible = borders(acts, len(blocks))
    name = draw(st.sampled_from([each for each in SCHEDULES if stages_a_device(each) <= len(possible) + 1]))
    each = stages_a_device(name)
    count = each * draw(st.integers(1, min(4, (len(possible) + 1) // each))) - 1
    chosen = draw(st.sets(st.sampled_from(possible), min_size=count, max_size=count)) if count else set()
    step = st.builds(Step, st.sampled_from(["train", "accumulate", "eval", "no grad", "thrown"]), st.integers(1, 9))
    # A schedule corrects all gradients by one number: two terms with counts of their own are refused there.
    loss = draw(st.sampled_from([each for each in OWN_LOSSES if not name or each != "two"]))
    return Case(
        tuple(blocks), acts=tuple(acts), cuts=tuple(border for border in possible if border in chosen), schedule=name,
        chunks=draw(st.integers(1, 5)), steps=tuple(draw(st.lists(step, min_size=1, max_size=3))), loss=loss,
        output=draw(st.sampled_from(OUTPUTS)), function=draw(st.sampled_from([False, False, True])),
        said=draw(st.booleans()) if loss in ("mean", "sum") else False, **_common(draw),
    )
