"""Persistent threads: each takes calls from one queue, in order, and returns one Outcome per call.

Guarantees, and what would break them:

* Every wait ends. A waiting thread checks ten times per second that the worker is alive: it may die anywhere, even
  during a call that isn't in any queue any more. In a forked child, no thread of the parent is alive.
* When ``Pool.run`` raises, its calls have ended. An interrupt may arrive at any line, even between a call's submission
  and the recording of its outcome. So another call is put into each queue and waited for; earlier ones have ended
  then. The owner creates another pool. A second interrupt during that wait gets through.
* The calls of two ``Pool.run`` are in the same order in every queue. They may wait for each other: in other orders,
  each of two threads could run a call that waits for one queued after the other's.
* A thread keeps nothing alive. It forgets the call before it settles the outcome, and the outcome before it waits for
  the next one; a variable that still referred to them would keep a microbatch alive until the next forward, and the
  pool's owner forever. Threads refer to their queue, never to the pool: otherwise, no pool would ever be collected,
  and its threads would stay.
* The interpreter's exit waits for running calls. A thread that returns from torch to an interpreter that has exited
  aborts the process.
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
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import torch

from splitpipe.core.note import raise_first
from splitpipe.core.thread_state import profiled

T = TypeVar("T")

#: Seconds for which the interpreter's exit waits for running calls.
_GRACE = 30.0
#: Seconds between two checks of threads whose calls are waited for.
_LOOK = 0.1


class WorkerDiedError(RuntimeError):
    """Raised if a worker thread ended before it had finished a call."""


class Outcome(Generic[T]):
    """The value or the exception of one call, to be retrieved once, by one thread."""

    __slots__ = ("_call", "_done", "_errors", "_settled", "_thread", "_value")

    def __init__(self, call: Callable[[], T], thread: threading.Thread) -> None:
        self._call: Callable[[], T] | None = call
        self._thread = thread
        self._done = threading.Lock()
        self._done.acquire()
        self._settled = False
        self._errors: list[BaseException] = []
        self._value: T | None = None

    def run(self) -> None:
        """Runs the call, forgets it, and settles the outcome."""
        call, self._call = cast(Callable[[], T], self._call), None
        try:
            self._value = call()
        except BaseException as error:
            self._errors.append(error)
        del call
        self._settled = True  # Before the lock: a wait that got it and was then interrupted can be repeated.
        self._done.release()
        del self  # The error's traceback refers to this frame: an unretrieved outcome would be a cycle.

    def ended(self, seconds: float) -> bool:
        """Waits for the end of the call for at most this long; returns True if it has ended."""
        if not self._settled:
            self._done.acquire(timeout=seconds)
        return self._settled

    @property
    def lost(self) -> bool:
        """True if the thread has died during the call."""
        return not self._thread.is_alive() and not self._settled  # In this order: it may settle, then end.

    def verify(self) -> None:
        """Raises the call's error, or an error if its thread has died."""
        if self.lost:
            raise WorkerDiedError("a worker thread ended before it had finished this call; try again")
        raise_first(self._errors)

    def get(self) -> T:
        """Waits for the call; returns its value or raises its exception, and forgets both."""
        if not self._settled:
            wait([self])
        if self._errors or not self._settled:
            self.verify()
        value, self._value = self._value, None
        return cast(T, value)


def wait(outcomes: Sequence[Outcome[Any]]) -> None:
    """Returns when all calls have ended; raises earlier if one has failed or is lost, since others may wait for it."""
    for outcome in outcomes:
        while not outcome.ended(_LOOK):
            for each in outcomes:
                each.verify()


class ProcessLock:
    """A lock that is free in a forked child: the thread that held it at the fork only exists in the parent."""

    def __init__(self, make: Callable[[], Any] = threading.RLock) -> None:
        self._make = make
        self._of: dict[int, Any] = {}

    @property
    def lock(self) -> Any:
        """The lock of this process."""
        pid = os.getpid()
        found = self._of.get(pid)
        return self._of.setdefault(pid, self._make()) if found is None else found  # Atomic: two threads get the same.


_Calls = SimpleQueue[Outcome[Any] | None]  # None ends the thread.


def _work(calls: _Calls, working: list[_Calls], exiting: Callable[[], None]) -> None:
    try:
        while (outcome := calls.get()) is not None:
            outcome.run()
            del outcome
    finally:
        working.remove(calls)
        if not working:
            # Not before: the exit must also wait for threads of a pool that was dropped just then. One that is still
            # ending when the interpreter has exited crashes the process, in what torch does at a thread's end.
            atexit.unregister(exiting)


def _close(queues: list[_Calls]) -> None:
    # Never joins: this may run inside the garbage collector, in any thread, under any lock.
    for calls in queues:
        calls.put(None)


def _exit(queues: list[_Calls], threads: list[threading.Thread]) -> None:
    for calls in queues:
        calls.put(None)
    end = time.monotonic() + _GRACE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _compute_on(threads: int) -> None:
    # A thread takes the process's number of threads when it first asks; if it set its own before that, it would be
    # lost.
    torch.get_num_threads()
    torch.set_num_threads(threads)


class Pool:
    """Worker threads of one model, started together; they end when the pool is collected or the interpreter exits."""

    def __init__(self, names: list[str]) -> None:
        if sys.is_finalizing():  # A thread started now would never run, and its start never return.
            raise RuntimeError(
                "the interpreter is exiting, and no longer starts worker threads: expected the model to be used "
                "earlier. If a destructor or a generator's finally uses it, register that with atexit."
            )
        self._closed = False
        #: True after a second interrupt: the calls that run in its threads haven't been waited for.
        self.left = False
        self._submitting = threading.Lock()
        self._queues: list[_Calls] = [SimpleQueue() for _ in names]
        self._threads: list[threading.Thread] = []
        self._intraop: tuple[int, list[int]] | None = None
        exiting = partial(_exit, self._queues, self._threads)
        atexit.register(exiting)
        weakref.finalize(self, _close, self._queues).atexit = False
        working = [*self._queues]
        for calls, name in zip(self._queues, names):
            thread = threading.Thread(target=_work, args=(calls, working, exiting), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def usable(self) -> bool:
        """True if its threads run in this process: none do after a fork, or when the interpreter exits."""
        return not self._closed and not sys.is_finalizing() and all(thread.is_alive() for thread in self._threads)

    @property
    def size(self) -> int:
        """The number of threads."""
        return len(self._threads)

    def has_this_thread(self) -> bool:
        """True if the caller's thread is one of the pool's."""
        here = threading.get_ident()
        return any(thread.ident == here and thread.is_alive() for thread in self._threads)  # Numbers are reused.

    def submit(self, worker: int, call: Callable[[], T]) -> Outcome[T]:
        """Queues a call for the worker, after earlier ones."""
        outcome = Outcome(call, self._threads[worker])
        self._queues[worker].put(outcome)
        return outcome

    def run(
        self, calls: Sequence[tuple[int, Callable[[], T]]], stop: Callable[[BaseException], None] | None = None
    ) -> list[T]:
        """Runs calls, each in the worker with that number and under the profiler of this thread.

        ``stop`` is called with what is raised, to end calls that wait.
        """
        outcomes: list[Outcome[T]] = []
        try:
            with self._submitting:
                for worker, call in calls:
                    outcomes.append(self.submit(worker, profiled(call)))
            wait(outcomes)
        except BaseException as error:
            self._closed = True
            if stop is not None:
                stop(error)
            self.left = True
            self._rest()
            self.left = False
            raise
        return [outcome.get() for outcome in outcomes]

    def _rest(self) -> None:
        # After these, calls that were submitted without a record of their outcome have ended too.
        for outcome in [self.submit(worker, lambda: None) for worker in range(len(self._queues))]:
            while not outcome.ended(_LOOK) and not outcome.lost:
                pass

    def share_threads(self, computing: list[int], among: int | None = None) -> None:
        """Gives each worker that computes on the CPU its share of the caller's intra-op threads.

        ``among``: how many compute at a time, if not all of them.
        """
        # torch.set_num_threads is a thread's own setting, and the last number set becomes that of threads yet to start.
        # A thread that starts for this purpose restores that number: the caller's own may be different.
        total = torch.get_num_threads()
        if not computing or self._intraop == (total, computing):
            return
        call = partial(_compute_on, max(1, total // (among or len(computing))))
        others = in_new_thread(torch.get_num_threads)
        try:
            self.run([(worker, call) for worker in computing])
        finally:
            in_new_thread(partial(torch.set_num_threads, others))
        self._intraop = total, computing


def in_new_thread(call: Callable[[], T]) -> T:
    """The value of a call that doesn't raise, made in a new thread."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]
