"""The package stands on floors: a module imports from lower ones only, and every module has its floor."""
from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "splitpipe"

TRAINING: list[set[str]] = [
    {"stream", "microbatch", "batched", "context", "collective", "uncompiled", "variable", "note", "turn", "mailbox",
     "reach",
     "balance.solver", "skip.namespace", "deferral.product", "deferral.weights", "deferral.merge", "deferral.report",
     "deferral.names", "planner.progress", "planner.profile"},
    {"phase", "overlap", "parallel", "priority", "saved", "partition", "dependency", "worker", "catching", "blame",
     "hooks",
     "skip.box", "deferral.lane", "deferral.total", "deferral.idle", "deferral.node"},
    {"transfer", "deferral.sums", "checkpoint", "inventory", "randomness", "skip.skippable", "deferral.slot",
     "losses", "options", "planner.load"},
    {"snapshot", "rowmean", "release", "deferral.stash", "deferral.function", "balance.profile", "steps", "post",
     "planner.written"},
    {"deferral.rule", "deferral.catch", "deferral.inside", "deferral.ledger", "objective"},
    {"deferral.linear", "deferral.convolution", "deferral.embedding", "capture",
     "distributed.loss"},
    {"deferral.mode"},
    {"batchnorm", "stage"},
    {"border", "balance.choose", "resources", "setting", "tape"},
    {"pipeline", "passes", "harvest", "arrangement", "recorder", "planner.ends", "planner.comparison",
     "planner.ways", "planner.arguments", "planner.devices"},
    {"executor", "planner.shares"},
    {"training", "distributed.halves", "planner.choose"},
    {"runtime", "distributed.boundary", "distributed.lowering", "planner.lacking"},
    {"pipe", "distributed.pipeline"},
    {"planner.probe", "planner.plan"},
    {"planner.links", "planner.company"},
    {"planner.measure"},
    {"planner.planning"},
    {"planner.command"},
]
#: The files of splitpipe/schedule, which import each other and nothing else: no torch, nor what needs it.
SCHEDULE: list[set[str]] = [
    {"op", "draw", "searching"},
    {"costs", "play", "draw.palette"},
    {"check", "bounds", "orders"},
    {"played", "text", "reorder", "searching.word"},
    {"draw.measures", "measured", "losses", "tiling", "searching.period", "searching.tighten"},
    {"block", "draw.text", "draw.svg", "draw.html", "draw.trace", "verdict", "searching.offsets",
     "searching.splice", "searching.modulo"},
    {"lengthen", "timeline", "searching.steady"},
    {"blocks", "simulate"},
    {"library", "recording"},
    {"search"},
    {"command"},
]
DOORS = {"", "skip", "balance", "deferral", "distributed", "planner", "schedule", "__main__"}
FLOORS = [
    *(one | {f"schedule.{name}" for name in other} for one, other in zip_longest(TRAINING, SCHEDULE, fillvalue=set())),
    DOORS,
]
OUTSIDE = sys.stdlib_module_names | {"torch", "typing_extensions"}


def name_of(path: Path) -> str:
    """The module of a file, without the package's name: "skip.box"; "" for the front door."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def imports(source: str) -> Iterator[tuple[str, int]]:
    """Every module that a source imports, or takes a name from, wherever that stands, and its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield (f"{module}.{alias.name}" if is_module(module, alias.name) else module), node.lineno


def is_module(package: str, name: str) -> bool:
    """Whether ``from package import name`` gives a file of ours, not what the package's door calls so."""
    door = package.removeprefix("splitpipe").removeprefix(".")
    if not package.startswith("splitpipe") or f"{door}.{name}".lstrip(".") not in FLOOR:
        return False
    return door in FILES and name not in offered(FILES[door].read_text(encoding="utf-8"))


def offered(source: str) -> set[str]:
    """The names that a door imports, and so gives away."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def faults(name: str, source: str) -> list[str]:
    """What is wrong with the imports of module ``name``."""
    found = []
    for target, line in imports(source):
        top, _, inner = target.partition(".")
        at = f"splitpipe {name or 'door'}, line {line}: imports {target}"
        if not top:
            found.append(f"{at}: write the whole name, splitpipe.(...)")
        elif top != "splitpipe":
            if top not in OUTSIDE:
                found.append(f"{at}: only the standard library, torch and typing_extensions are installed")
        elif inner in DOORS:
            found.append(f"{at}: a door; import from the file that owns the name")
        elif FLOOR.get(inner, len(FLOORS)) >= FLOOR[name]:
            found.append(f"{at}: not on a floor below {FLOOR[name]}")
    return found


def test_the_floors_list_exactly_the_files_of_the_package() -> None:
    assert sorted(FLOOR) == sorted(FILES)
    assert len(FLOOR) == sum(map(len, FLOORS)), "a module stands on two floors"


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_module_imports_from_lower_floors_only(name: str) -> None:
    assert name in FLOOR, f"give {name} a floor in FLOORS"
    assert faults(name, FILES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", [name for name in sorted(FILES) if name.startswith("schedule")])
def test_schedules_import_neither_torch_nor_what_needs_it(name: str) -> None:
    for target, line in imports(FILES[name].read_text(encoding="utf-8")):
        top, _, inner = target.partition(".")
        assert inner.startswith("schedule") if top == "splitpipe" else top in sys.stdlib_module_names, f"{name}, {line}"


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_is_longer_than_350_lines(name: str) -> None:
    assert len(FILES[name].read_text(encoding="utf-8").splitlines()) <= 350


@pytest.mark.parametrize(
    "line",
    [
        "from splitpipe.pipe import SplitPipe",
        "from splitpipe.worker import Worker",
        "import splitpipe.pipeline",
        "from splitpipe import pipeline",
        "from splitpipe import is_recomputing",
        "from splitpipe import skip",
        "import splitpipe",
        "from splitpipe.skip import stash",
        "from splitpipe.skip import skippable",
        "from splitpipe.absent import name",
        "from .phase import entered",
        "from . import phase",
        "import numpy",
        "from numpy.linalg import norm",
    ],
)
@pytest.mark.parametrize(
    "around", ["{}", "def f():\n    {}", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}"]
)
def test_an_import_upwards_is_seen_wherever_it_stands(line: str, around: str) -> None:
    assert len(faults("worker", around.format(line))) == 1


@pytest.mark.parametrize(
    "line",
    ["from splitpipe.note import add_note", "from splitpipe import note", "import torch.nn", "import ast"],
)
def test_an_import_downwards_is_fine(line: str) -> None:
    assert faults("worker", line) == []
