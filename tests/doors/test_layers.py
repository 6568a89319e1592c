"""The package is a house: a room imports from those below it only, and within a room no imports go in a circle."""
from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "splitpipe"
#: From the ground up. Those of one line know nothing of each other. A file at the top is a room of its own.
ROOMS: list[set[str]] = [
    {"schedule", "core"},
    {"checks"},
    {"skip", "backward", "microbatch"},
    {"batchnorm", "compiled"},
    {"partition"},
    {"stage", "loss"},
    {"engine"},
    {"runtime"},
    {"piped"},
    {"balance", "distributed"},
    {"attaching", "pipe"},
    {"planner", "checking"},
    {"", "__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
#: What users import from; the package itself takes each name from the file that owns it.
DOORS = {"", "skip", "balance", "distributed", "schedule"}
#: The lines that a room may have; "": the files next to the rooms. A number is only raised if another one falls.
BUDGETS = {
    "core": 850, "schedule": 2800, "microbatch": 850, "skip": 340, "backward": 1100, "loss": 1100,
    "partition": 800, "stage": 600, "engine": 2000, "runtime": 450, "": 1150, "checking": 350,
    "compiled": 550, "balance": 700, "planner": 1150, "distributed": 500,
}
OUTSIDE = sys.stdlib_module_names | {"torch", "typing_extensions"}


def name_of(path: Path) -> str:
    """The module of a file, without the package's name: "skip.box"; "" for the front door."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def imports(source: str) -> list[tuple[str, int]]:
    """Every module that a source imports, or takes a name from, wherever that stands, and its line."""
    return [*_imports(source)]


def _imports(source: str) -> Iterator[tuple[str, int]]:
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
    if not package.startswith("splitpipe") or f"{door}.{name}".lstrip(".") not in FILES:
        return False
    return door in FILES and name not in offered(FILES[door].read_text(encoding="utf-8"))


@cache
def offered(source: str) -> set[str]:
    """The names that a door imports, and so gives away."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def faults(name: str, source: str) -> list[str]:
    """What is wrong with the imports of module ``name``."""
    found = []
    room = name.partition(".")[0]
    for target, line in imports(source):
        top, _, inner = target.partition(".")
        at = f"splitpipe {name or 'door'}, line {line}: imports {target}"
        other = inner.partition(".")[0]
        if not top:
            found.append(f"{at}: write the whole name, splitpipe.(...)")
        elif top != "splitpipe":
            if top not in OUTSIDE:
                found.append(f"{at}: only the standard library, torch and typing_extensions are installed")
        elif inner in DOORS:
            found.append(f"{at}: a door; import from the file that owns the name")
        elif inner not in FILES:
            found.append(f"{at}: there is no such file")
        elif other != room and FLOOR[other] >= FLOOR[room]:
            found.append(f"{at}: not a room below")
    return found


def test_every_room_is_in_the_list_and_every_room_of_the_list_is_there() -> None:
    assert {name.partition(".")[0] for name in FILES} == {*FLOOR}
    assert len(FLOOR) == sum(map(len, ROOMS)), "a room stands on two floors"


def test_a_module_imports_from_its_own_room_and_from_those_below() -> None:
    assert [fault for name, path in FILES.items() for fault in faults(name, path.read_text(encoding="utf-8"))] == []


def test_imports_go_in_no_circle() -> None:
    ours = {name: [target.partition(".")[2] for target, _ in imports(path.read_text(encoding="utf-8"))
                   if target.startswith("splitpipe.")]
            for name, path in FILES.items()}
    TopologicalSorter(ours).prepare()


def test_schedules_import_neither_torch_nor_what_needs_it() -> None:
    for name in (name for name in FILES if name.startswith("schedule")):
        for target, line in imports(FILES[name].read_text(encoding="utf-8")):
            top, _, inner = target.partition(".")
            known = inner.startswith("schedule") if top == "splitpipe" else top in sys.stdlib_module_names
            assert known, f"{name}, {line}: imports {target}"


def test_no_file_is_long_and_no_room_full() -> None:
    assert [name for name, path in FILES.items() if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
    rooms = Counter(path.parent.relative_to(ROOT) for path in FILES.values())
    assert rooms.pop(Path()) <= 8
    full = [str(room) for room, files in rooms.items() if files > 14]
    assert full == [], f"{full} has more than 14 files: put the code into one of them, or merge two"


def test_no_two_classes_have_one_name() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES.values()]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_no_room_has_more_lines_than_its_budget() -> None:
    lines: Counter[str] = Counter()
    for path in FILES.values():
        inside = path.relative_to(ROOT).parts
        lines[inside[0] if len(inside) > 1 else ""] += len(path.read_text(encoding="utf-8").splitlines())
    assert lines.keys() == BUDGETS.keys(), "a room has no budget, or a budget no room"
    full = [
        f"splitpipe/{room or '*.py'} has {count} lines: expected at most {BUDGETS[room]}. Remove some, or raise the "
        "number in BUDGETS, and say why in the change" for room, count in lines.items() if count > BUDGETS[room]
    ]
    assert not full, "\n".join(full)


def test_a_wrong_import_is_seen_wherever_it_stands() -> None:
    for line in ("from splitpipe.pipe import SplitPipe", "import splitpipe", "from splitpipe import skip",
                 "from splitpipe.absent import name", "from . import worker", "from numpy.linalg import norm"):
        assert len(faults("core.transfer", f"def f():\n    {line}")) == 1, line
    assert faults("stage.stage", "from splitpipe.core import note\nimport torch.nn\nimport ast") == []
