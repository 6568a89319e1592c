"""Children of a fork, each with one thing to try and a limit of time."""
from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Task = TypeVar("Task")
_fork = multiprocessing.get_context("fork")
#: What a child that has not answered in time has said.
LATE = "no answer in time"
_END: Any = object()


def _child(does: Callable[[Any], object], task: Any, answer: Connection) -> None:
    os.setsid()  # With whatever it starts, it can be ended at once.
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    try:
        answer.send(does(task))
    except BaseException as error:
        answer.send(f"{type(error).__name__}: {error}")
    answer.close()
    os._exit(0)  # No thread of a broken change is waited for.


def _end(child: Any) -> None:
    """Ends a child with all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()  # It may not have had the time to lead a group.
    child.join()


def tried(
    does: Callable[[Task], Any], tasks: Iterable[Task], limit: Callable[[Task], float], processes: int
) -> Iterator[tuple[Task, Any]]:
    """Each task and its answer, as they come.

    Args:
        does: what a child does with its task; gives what can be pickled.
        tasks: are asked for one at a time, when a child can begin.
        limit: seconds for a task; then its answer is ``LATE``. That of a child that ends without one is its status.
        processes: how many children at a time.
    """
    left, running = iter(tasks), {}
    try:
        while True:
            while len(running) < processes:
                task = next(left, _END)
                if task is _END:
                    break
                ours, its = _fork.Pipe(duplex=False)
                child = _fork.Process(target=_child, args=(does, task, its))
                child.start()
                its.close()
                running[ours] = task, child, time.monotonic() + limit(task)
            if not running:
                return
            soonest = min(until for _, _, until in running.values())
            ready = wait(list(running), max(0.0, soonest - time.monotonic()))
            for ours in list(running):
                task, child, until = running[ours]
                if ours not in ready and time.monotonic() < until:
                    continue
                answer: Any = LATE
                if ours in ready:
                    try:
                        answer = ours.recv()
                    except EOFError:
                        child.join()
                        answer = f"it ended with {child.exitcode}"
                _end(child)
                ours.close()
                del running[ours]
                yield task, answer
    finally:  # An interrupt, or nobody asks for more answers.
        for _, child, _ in running.values():
            _end(child)
