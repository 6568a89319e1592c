"""Persistent threads of one model: each takes calls from a separate queue, in order.

Guarantees, and what would break them:

* Every wait ends: who waits looks whether the workers are alive. After a fork, none is.
* When ``Pool.run`` raises, its calls have ended, and so have the threads. The owner creates another pool.
* The calls of two ``Pool.run`` are in the same order in every queue, since those of one may wait for each other.
* A thread keeps nothing alive: neither its last call, nor what that returned or raised, nor the pool.
* The interpreter's exit waits for running calls: a thread that returned from torch after it would abort the process.
"""
from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

Call = Callable[[], object]

_GRACE = 30.0  # Seconds for which the interpreter's exit waits for running calls.
_LOOK = 0.1  # Seconds between two checks of threads whose calls are waited for.


class WorkerDiedError(RuntimeError):
    """Raised if a worker thread ended before it had finished a call."""


class ProcessLock:
    """A lock that is free in a forked child: the thread that held it at the fork only exists in the parent."""

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    @property
    def lock(self) -> Any:
        """The lock of this process."""
        pid = os.getpid()
        lock = self._of.get(pid)
        return self._of.setdefault(pid, threading.RLock()) if lock is None else lock  # Atomic: both get one.


class _Worker(threading.Thread):
    """Runs the calls of its queue; None ends it."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
            del call


def _report(calls: list[Call], number: int, errors: list[BaseException], ended: SimpleQueue[int]) -> None:
    try:
        calls.pop()()
    except BaseException as error:
        errors.append(error)
    del errors  # A traceback refers to this frame: an error that isn't passed on would be a cycle.
    ended.put(number)


def _end(workers: list[_Worker]) -> None:
    # Never joins: this may run inside the garbage collector, in any thread, under any lock.
    for worker in workers:
        worker.calls.put(None)


@atexit.register
def _exit() -> None:
    """Waits for the workers of all pools, also of one that was dropped while they worked."""
    workers = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    _end(workers)
    end = time.monotonic() + _GRACE
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))


class Pool:
    """Worker threads, started together; they end when the pool is collected or the interpreter exits."""

    def __init__(self, names: list[str]) -> None:
        if sys.is_finalizing():  # A thread started now would never run, and its start never return.
            raise RuntimeError("the interpreter is exiting: expected uses of a model before that, or in atexit hooks.")
        self._closed, self.size = False, len(names)
        self._submitting = threading.Lock()
        self.threads: list[_Worker] = []
        self._shares: tuple[int, int] | None = None
        weakref.finalize(self, _end, self.threads).atexit = False
        for name in names:
            worker = _Worker(name)
            worker.start()
            self.threads.append(worker)

    @property
    def usable(self) -> bool:
        """True if its threads run in this process: none do after an error or a fork, or when the interpreter exits."""
        return not self._closed and not sys.is_finalizing() and all(thread.is_alive() for thread in self.threads)

    def has_this_thread(self) -> bool:
        """True if the caller's thread is one of the pool's."""
        return threading.current_thread() in self.threads

    def run(
        self, calls: Sequence[tuple[int, Call]], stop: Callable[[BaseException], None] | None = None
    ) -> None:
        """Runs calls, each in the worker with that number, until all have ended, or raises the first error.

        ``stop`` is called with what is raised, to end calls that wait.
        """
        ended: SimpleQueue[int] = SimpleQueue()
        waiting: dict[int, _Worker] = {}
        errors: list[BaseException] = []
        try:
            with self._submitting:
                for number, (worker, call) in enumerate(calls):
                    waiting[number] = thread = self.threads[worker]
                    thread.calls.put(partial(_report, [call], number, errors, ended))
            while waiting:
                lost = not all([thread.is_alive() for thread in waiting.values()])  # First: it may report, then end.
                try:
                    del waiting[ended.get(timeout=0 if lost else _LOOK)]
                except Empty:
                    if lost:
                        raise WorkerDiedError(
                            "a worker thread ended before it had finished this call; try again") from None
                if errors:
                    raise errors.pop(0)
        except BaseException as error:
            self._closed = True
            if stop is not None:
                stop(error)
            _end(self.threads)
            for thread in self.threads:
                thread.join()
            raise

    def share_threads(self, among: int) -> None:
        """Gives each worker its share of the caller's intra-op threads; ``among`` compute at a time."""
        total = torch.get_num_threads()
        if self._shares != (total, among):
            self.run([*enumerate([partial(_compute_on, max(1, total // among))] * self.size)])
            torch.set_num_threads(total)  # A thread's own setting, but those yet to start get the last one set.
            self._shares = total, among


def _compute_on(threads: int) -> None:
    torch.get_num_threads()  # A thread takes the process's number when it first asks, and would lose its own.
    torch.set_num_threads(threads)
