"""The places in splitpipe that give streams their order, which can be taken away one at a time."""
from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import splitpipe
from splitpipe.backward.split_backward import WeightGradStore
from splitpipe.core import stream

from .cases import Case

#: What order is made of: each verb, and what it is without effect.
VERBS: dict[str, Callable[..., Any]] = {"wait": lambda *_: None,
                                        "wait_for": lambda *_: None,
                                        "hold": lambda *_: None,
                                        "use": lambda *_: nullcontext()}
ROOT = Path(splitpipe.__file__).parent
#: What W may still be reading, kept until the compute stream has waited for it.
READING = "backward/split_backward.py: WeightGradStore._reading"


def _case(subject: str, schedule: str | None, checkpoint: str, own: Any, parts: bool, *more: Any) -> Case:
    backward, given, stages, chunks = (*more, *("split", "there", 4, 3)[len(more):])
    rows = None if chunks == 3 else 64
    return Case(subject, stages, chunks, checkpoint, backward, schedule, own, parts, given, rows)


#: Places without which a case has a hazard.
CAUGHT = {
    READING: _case("elsewhere, a batch without grad", None, "never", False, False, "split", "cpu", 4, 2),
    "backward/split_backward.py: WeightGradStore.backward_weight: wait":
        _case("module: tied", None, "always", False, False, "split", "pinned", 4, 2),
    "backward/split_backward.py: WeightGradStore.finish: wait_for":
        _case("dropouts", None, "never", False, False, "split", "cpu", 4, 2),
    "core/transfer.py: Route._move: hold": _case("slices", "zb-v", "except_last", True, False, "split", "elsewhere"),
    "core/transfer.py: Route._move: use": _case("skips", None, "except_last", True, False),
    "core/transfer.py: Route._move: wait": _case("elsewhere", "1f1b", "never", True, True, "autograd", "pinned"),
    "core/transfer.py: Route.carry: wait": _case("module: carried", "zb-h1", "never", False, False, "split", "cpu"),
    "core/transfer.py: Route.carry: wait_for":
        _case("module: filled", "zb-h1", "never", False, True, "split", "cpu", 4, 2),
    "engine/crossing.py: Crossing.begin: wait_for": _case("module: nothing tracked", "zb-v", "never", True, True),
    "engine/crossing.py: Crossing._carry: wait_for":
        _case("module: carried", "zb-h1", "always", True, False, "split", "cpu", 4, 2),
    "engine/crossing.py: Crossing.here: hold":
        _case("module: carried", None, "never", False, True, "split", "there", 2),
    "engine/drop_in.py: _run_second_half: wait": _case("tables", None, "never", "forward", True),
    "backward/outer_graph.py: OuterGraph._start: wait_for": _case("tables", None, "never", "forward", True),
    "engine/sequential.py: SequentialForward.forward: wait_for":
        _case("elsewhere", None, "always", False, True, "split", "cpu"),
    "engine/module.py: ModuleForward._enter: use": _case("module: filled", "zb-h1", "never", False, True, "autograd"),
    "engine/scheduled_step.py: ScheduledStep.run: use":
        _case("statistics", "zb-v", "always", False, True, "split", "elsewhere", 4, 2),
    "engine/step.py: StepRun.differentiate: wait_for":
        _case("module: filled", "zb-v", "never", False, True, "autograd", "cpu", 4, 2),
    "engine/step.py: StepRun.run: use": _case("dropouts", "1f1b", "never", True, False, "autograd", "pinned", 2),
    "engine/stitched/copy.py: Copy.forward: hold": _case("ties", None, "always", True, True, "autograd"),
    "engine/stitched/copy.py: Wait.forward: wait":
        _case("chain", None, "except_last", True, False, "autograd", "pinned"),
    "stage/call.py: Call.end: wait": _case("statistics", None, "always", True, True, "autograd"),
    "stage/call.py: Call.rejoin: wait": _case("module: spread", None, "never", True, True, "split", "there", 4, 2),
    "stage/call.py: hand: wait": _case("chain", "zb-h1", "except_last", "forward", True, "autograd"),
    "stage/shared_parameters.py: SharedParameters.bring_home: use":
        _case("module: tied", None, "never", "forward", False),
}
_OTHERS = "The stage's streams, whichever the thread has: on default ones, others' work would be waited for."
_NODES = "The node's stream in backward, and thus what the gradient waits for: not all that the caller has queued."
_BETWEEN = "While the caller is in the call, other threads may use the memory, on a stream that it has given."
#: Places that no case misses, and why they are there.
EXPLAINED = {
    "engine/module.py: ModuleForward.forward_all: use": _OTHERS,
    "engine/drop_in.py: _run_second_half: hold": "Threads of autograd's may run other parts of the graph meanwhile.",
    "stage/call.py: hand: hold": _BETWEEN,
    "partition/call_hook.py: _brought.<locals>.bring: hold":
        "Which thread of autograd's is first, chance decides.",
    "engine/step.py: StepRun.run_rows: wait": "After an error: see test_steps.py.",
    "backward/split_backward.py: WeightGradStore.clear: wait": "After an error: see test_steps.py.",
    "backward/split_backward.py: WeightGradStore.backward_weight: use":
        "W runs beside B: a replay, whose devices do one launch at a time, doesn't show it.",
    "engine/stitched/checkpoint.py: Checkpoint._repeat: use": _OTHERS,
    "engine/stitched/copy.py: Copy.forward: use": "In backward, a thread has any stream of the other device.",
    "engine/stitched/copy.py: Lane.leave: use": _NODES,
    "engine/stitched/copy.py: Lane.bring: use": _NODES,
}


def places() -> set[str]:
    """All calls of the verbs, by file and function: not by line, which every edit moves."""
    found = {READING}
    for file in ROOT.rglob("*.py"):
        def look(node: ast.AST, inside: str, file: Path = file) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    after = "" if isinstance(node, ast.Module) or isinstance(node, ast.ClassDef) else ".<locals>"
                    look(child, f"{inside}{after}.{child.name}" if inside else child.name)
                    continue
                function = child.func if isinstance(child, ast.Call) else None
                if isinstance(function, ast.Attribute) and function.attr in VERBS:
                    if isinstance(function.value, ast.Name) and function.value.id == "stream":
                        found.add(f"{file.relative_to(ROOT)}: {inside}: {function.attr}")
                look(child, inside)

        look(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


@lru_cache(None)
def _function(code: CodeType) -> str:
    name = Path(code.co_filename).resolve()
    if not name.is_relative_to(ROOT):
        return ""
    return f"{name.relative_to(ROOT)}: {getattr(code, 'co_qualname', code.co_name)}"


class _Forgetting:
    """In place of ``WeightGradStore._reading``: keeps the event alone."""

    def __get__(self, store: Any, kind: type) -> Any:
        return vars(store).get("reading")

    def __set__(self, store: Any, value: Any) -> None:
        vars(store)["reading"] = None if value is None else (value[0], None)


@contextmanager
def watched(without: str | None = None) -> Iterator[dict[str, int]]:
    """Counts the calls of each place inside the block; those of one place have no effect."""
    counts: dict[str, int] = {}
    with ExitStack() as patches:
        for verb, nothing in VERBS.items():
            real = getattr(stream, verb)

            def called(*args: Any, verb: str = verb, real: Any = real, nothing: Any = nothing) -> Any:
                function = _function(sys._getframe(1).f_code)
                place = function and f"{function}: {verb}"
                counts[place] = counts.get(place, 0) + 1
                return (nothing if place == without else real)(*args)

            patches.enter_context(mock.patch.object(stream, verb, called))
        if without == READING:
            patches.enter_context(mock.patch.object(WeightGradStore, "_reading", _Forgetting(), create=True))
        yield counts
