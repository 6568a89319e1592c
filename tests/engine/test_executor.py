"""The threads of a call: every call ends, also where no op of any row can run, or the bookkeeping itself fails."""
from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

import pytest

from splitpipe.core import thread_state
from splitpipe.core.worker import Pool
from splitpipe.engine.executor import Executor
from splitpipe.engine.rows import OpRun

F00, F10, B00, B10 = OpRun("F", 0, (0,)), OpRun("F", 1, (0,)), OpRun("B", 0, (0,)), OpRun("B", 1, (0,))


def run(rows: list[list[OpRun]], how: str, does: Callable[[OpRun], object] = lambda op: None) -> None:
    """Forwards by cuts, which are parked at split points; ops that are each a call; all in the caller's thread."""

    def whole(i: int, pause: Callable[[], None]) -> None:
        does(F00)
        pause()
        does(F10)

    executor = Executor(rows, does, thread_state.capture(), copy_context(), whole if how == "parked" else None)
    executor.run(None if how == "caller" else Pool([str(number) for number in range(executor.size)]))


@pytest.mark.parametrize("how", ["parked", "called"])
def test_an_error_outside_of_ops_stops_all_threads(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise LookupError("of the bookkeeping")

    with pytest.raises(LookupError, match="of the bookkeeping"):
        run([[F00, B00], [F10, B10]], how,
            lambda op: monkeypatch.setattr(Executor, "_after", broken) if op == F10 else None)


@pytest.mark.parametrize("how", ["parked", "called", "caller"])
@pytest.mark.parametrize("rows", [[[F00, B00], [F10]], [[B00, F00], [F10, B10]]])
def test_rows_that_cannot_go_on_are_an_error_and_no_hang(rows: list[list[OpRun]], how: str) -> None:
    with pytest.raises(RuntimeError, match="no op of the schedule's rows can run"):
        run(rows, how)
