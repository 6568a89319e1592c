"""The threads of a call: after an error no op begins, and every call ends, also where no op of any row can run."""
from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context

import pytest

from splitpipe.core import thread_state
from splitpipe.core.worker import Pool
from splitpipe.engine.rows import OpRun
from splitpipe.engine.step import Executor, Stopped
from tests.helpers.faults import throws

F00, F10, B00, B10 = OpRun("F", 0, (0,)), OpRun("F", 1, (0,)), OpRun("B", 0, (0,)), OpRun("B", 1, (0,))


def run(rows: list[list[OpRun]], how: str, does: Callable[[OpRun], object] = lambda op: None) -> None:
    """Forwards by cuts, which are parked at split points; ops that are each a call; all in the caller's thread."""

    def do(op: OpRun, pause: Callable[[], None]) -> None:
        does(op)
        if how == "parked" and op.kind == "F":
            try:
                pause()
            except Stopped:  # A forward may catch anything, and call another block.
                pause()
            does(OpRun("F", 1, op.microbatches))

    executor = Executor(rows, do, thread_state.capture(), copy_context(), how == "parked")
    executor.run(None if how == "caller" else Pool(executor.size))


@pytest.mark.parametrize("how", ["parked", "called"])
def test_after_an_error_no_other_op_begins(how: str) -> None:
    begun, second = list[OpRun](), threading.Event()
    rows = [[OpRun("F", stage, (i,)) for i in range(2)] for stage in range(2)]

    def does(op: OpRun) -> None:
        begun.append(op)
        if op == rows[0][1]:
            second.set()
        if op == F10:
            assert second.wait(60)
            raise LookupError("of an op")

    with pytest.raises(LookupError, match="of an op"):
        run(rows, how, does)
    assert sorted(begun) == [*rows[0], F10]


@pytest.mark.parametrize("how", ["parked", "called"])
def test_an_error_outside_of_ops_stops_all_threads(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = throws(LookupError("of the bookkeeping"))
    with pytest.raises(LookupError, match="of the bookkeeping"):
        run([[F00, B00], [F10, B10]], how,
            lambda op: monkeypatch.setattr(Executor, "_after", broken) if op == F10 else None)


def test_two_stages_are_at_work_on_a_forward_that_has_ended_while_another_is_parked() -> None:
    both = threading.Barrier(2)
    W10, F01, F11 = OpRun("W", 1, (0,)), OpRun("F", 0, (1,)), OpRun("F", 1, (1,))
    run([[F00, F01, B00], [F10, B10, W10, F11]], "parked", lambda op: both.wait(60) if op in (B00, W10) else None)


@pytest.mark.parametrize("how", ["parked", "called", "caller"])
@pytest.mark.parametrize("rows", [[[F00, B00], [F10]], [[B00, F00], [F10, B10]]])
def test_rows_that_cannot_go_on_are_an_error_and_no_hang(rows: list[list[OpRun]], how: str) -> None:
    with pytest.raises(RuntimeError, match="no op of the schedule's rows can run"):
        run(rows, how)
