"""Random cases: a model, how it is cut, and what it goes through.

A case is a plain value: what hypothesis prints of a failing one can be pasted as an @example. Every value of a field
goes with every other, so that a case shrinks far.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

from splitpipe import schedule
from tests.helpers.randomized_layers import PACKS
from tests.helpers.randomized_models import CASTS, CONTAINERS, FRONT, HANDING, IN_PLACE, NOT_TWICE, SIMPLE


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
class Case(Plain):
    """A model, how it is cut, and what it goes through.

    A schedule is "", a name, or "name split", "name 3"; a loss "", or one of LOSSES.
    """

    layers: tuple[Layer, ...]
    balance: tuple[int, ...]
    schedule: str = ""
    chunks: int = 1
    steps: tuple[Step, ...] = (Step(),)
    checkpoint: str | None = None
    backward: str = "split"
    stash_limit: int | None = None
    skips: tuple[Skip, ...] = ()
    dtype: str = "float64"
    flat: bool = False
    input_grad: bool = False
    deferred: bool = False
    counted: bool = False
    hooks: str = ""
    zeros: bool = False
    seed: int = 0
    loss: str = ""


STEPS = ("train", "accumulate", "eval", "no grad", "eval grad", "thrown", "retained")
SCHEDULES = (
    *[""] * 5, *schedule.names(), "gpipe split", "1f1b split", "eager-1f1b split", "interleaved-1f1b 3", "looped-bfs 1",
    "interleaved-low-memory 3",
)
#: torch's own losses: one, and some words of what it does; in a lambda, with a second term, or averaged by hand.
LOSSES = (
    "mse", "mse sum", "mse sum lambda", "mse lambda two", "cross_entropy ignoring lambda",
    "cross_entropy ignoring hand",
    "smooth_l1 sum partial", "nll", "nll sum ignoring", "nll ignoring weighted partial",
    *(f"cross_entropy{more}{how}" for more in ("", " sum") for how in (
        "", " ignoring", " weighted", " smooth", " ignoring weighted", " ignoring smooth partial",
        " ignoring weighted smooth")),
)


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


@st.composite
def cases(draw: Any, more: tuple[str, ...] = ()) -> Case:
    """Any case.

    Args:
        more: kinds of layers that are not there otherwise.
    """
    name = draw(st.sampled_from(SCHEDULES))
    # Refused during a schedule.
    containers = tuple(kind for kind in CONTAINERS if not name or kind != "reentrant")
    inner = _layer(SIMPLE + more, containers)
    top = inner | st.sampled_from([*PACKS, "merge", *CASTS, *HANDING]).map(Layer)
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
    skips = draw(st.lists(skip, max_size=3)) if last else []
    step = st.builds(Step, st.sampled_from(STEPS), st.integers(1, 9))
    dtype = draw(st.sampled_from(["float64", "float64", "float64", "float32", "bfloat16"]))
    return Case(
        tuple(layers),
        tuple(end - start for start, end in zip([0, *ends], ends)),
        name,
        draw(st.integers(1, 6)),
        tuple(draw(st.lists(step, min_size=1, max_size=4))),
        draw(st.sampled_from([None, "always", "except_last", "never"])),
        draw(st.sampled_from(["split", "autograd"])),
        draw(st.sampled_from([None, 0, 300])),
        tuple(skips),
        dtype,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["", "count", "change"])),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(["", *LOSSES]) if name and draw(st.booleans()) else st.just("")),
    )
