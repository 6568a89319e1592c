"""Threads that stay: each takes calls in order, and hands back one Outcome a call.

Guarantees, and what would break them:

* ``Outcome.get`` never waits forever. A call stays in its channel until it has ended. A thread that ends, for
  whatever reason, marks itself gone *before* it fails what is left there; ``submit`` puts first and looks at the
  mark *afterwards*. So of a call put in at the moment a thread dies, either the thread or the submitter finds it.
  Look first, put then, and a call can fall between the two; take it out first, run it then, and a thread that dies
  in between takes it along.
* A pool is there when all its threads are where they will mark themselves gone. One that is killed before that leaves
  a pool that is not made, not a call that nobody runs.
* ``submit`` may be interrupted anywhere; who submits calls then ``rest``. A call that was put in is run, rung or not:
  one bell too few, and every later call would be late by one, and the last of them waited for forever.
* A thread keeps nothing alive. It forgets the call before it settles the outcome; a variable that still named it
  would hold a microbatch until the next forward, and the pool's owner for good.
* Threads hold their channel, never the pool. Else no pool would ever be collected, and its threads would stay.
* The interpreter's exit waits for a call that runs. A thread that comes back from torch to an interpreter that is
  gone aborts the process.
"""
from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch

T = TypeVar("T")

#: Seconds that the interpreter's exit waits for calls that run.
_GRACE = 30.0
#: Seconds between two looks at a thread that starts.
_LOOK = 0.1


class WorkerDiedError(RuntimeError):
    """A worker thread ended before it was through with a call."""


class Outcome(Generic[T]):
    """The value or the exception of one call, to be opened once, by one thread.

    ``_settled`` is set before the lock is released. A wait that an interrupt ends just after it got the lock can so
    be repeated; going by the lock alone, the next would find it taken and wait forever.
    """

    __slots__ = ("_call", "_done", "_error", "_lost", "_settled", "_value")

    def __init__(self, call: Callable[[], T], lost: Callable[[BaseException], None] | None = None) -> None:
        self._call: Callable[[], T] | None = call
        self._lost = lost
        self._done = threading.Lock()
        self._done.acquire()
        self._settled = False
        self._error: BaseException | None = None
        self._value: T | None = None

    def run(self) -> None:
        """Runs the call, forgets it, and settles."""
        try:
            call, self._call = self._call, None
            assert call is not None
            self._value = call()
            self._lost = None
        except BaseException as error:
            call = None
            self.fail(error)
        call = None
        self._settle()
        del self  # The error's traceback holds this frame: if nobody opens the outcome, it would be a cycle.

    def fail(self, error: BaseException) -> None:
        """Settles without running, unless it has settled."""
        lost, self._lost = self._lost, None
        if not self._settled:
            self._call = None
            self._error = error
        try:
            if lost is not None:
                lost(error)  # Before anybody stops waiting for the call: whoever does may go by what this has noted.
        finally:
            self._settle()

    def _settle(self) -> None:
        self._settled = True
        if self._done.locked():
            self._done.release()

    def wait(self) -> None:
        """Returns when the call has ended."""
        if not self._settled:
            self._done.acquire()

    def get(self) -> T:
        """Waits for the call; gives its value or raises its exception, and forgets both."""
        self.wait()
        value, error = self._value, self._error
        self._value = self._error = None
        if error is None:
            return cast(T, value)
        try:
            raise error
        finally:
            del error  # The exception's traceback holds this frame; holding it in turn would make a cycle.


class ProcessLock:
    """A lock that a forked child finds open: the thread that held it at the fork is in the parent alone."""

    def __init__(self, make: Callable[[], Any] = threading.RLock) -> None:
        self._make = make
        self._of: dict[int, Any] = {}

    @property
    def lock(self) -> Any:
        """The lock of this process."""
        return self._of.setdefault(os.getpid(), self._make())  # One step: two threads get the same one.


def settle(outcomes: Sequence[Outcome[Any]]) -> None:
    """Waits for all, so that no call still runs when an exception reaches the caller.

    An interrupt waits with it, wherever it arrives; a second one gets through.
    """
    try:
        wait(outcomes)
    except BaseException:
        wait(outcomes)
        raise


def wait(outcomes: Sequence[Outcome[Any]]) -> None:
    """Waits for all; an interrupt gets through."""
    for outcome in outcomes:
        outcome.wait()


class _Channel:
    """A thread's calls, those that have not ended; a bell, rung for each at least; whether the thread listens."""

    def __init__(self) -> None:
        self.listening = threading.Event()  # Never cleared.
        self.calls: deque[Outcome[Any]] = deque()
        self.bell: SimpleQueue[bool] = SimpleQueue()  # False ends the thread.
        self.gone = False

    def drain(self) -> None:
        """Fails every call that nobody will run any more."""
        while True:
            try:
                outcome = self.calls.popleft()
            except IndexError:
                return
            outcome.fail(WorkerDiedError("a worker thread ended before it was through with this call; try again"))


def _work(channel: _Channel) -> None:
    try:
        channel.listening.set()
        pid = os.getpid()
        while channel.bell.get():
            if channel.calls:
                channel.calls[0].run()
                channel.calls.popleft()
            if os.getpid() != pid:
                _orphaned()
    finally:
        channel.gone = True
        channel.drain()


def _orphaned() -> NoReturn:
    """Ends a child that a call has forked: nobody there waits for the call, nor will ring again.

    Without Python's help: a thread that is the last one can't end without aborting the process.
    """
    os.write(2, b"splitpipe: a layer forked, and the child came back from the layer, or raised in it. The pipeline's "
                b"other threads are in the parent alone: expected a child that ends itself, with os._exit or as "
                b"multiprocessing's do.\n")
    os._exit(1)


def _close(channels: list[_Channel], exiting: Callable[[], None]) -> None:
    # Never joins: this may run inside the garbage collector, in any thread, under any lock.
    atexit.unregister(exiting)
    for channel in channels:
        channel.bell.put(False)


def _exit(channels: list[_Channel], threads: list[threading.Thread]) -> None:
    for channel in channels:
        channel.bell.put(False)
    end = time.monotonic() + _GRACE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _compute_on(threads: int) -> None:
    # A thread takes the process's number when it first asks; set before that, its own would be lost.
    torch.get_num_threads()
    torch.set_num_threads(threads)


def _nothing() -> None:
    pass


def _in_new_thread(call: Callable[[], T]) -> T:
    outcome = Outcome(call)
    threading.Thread(target=outcome.run, daemon=True).start()
    return outcome.get()


class Pool:
    """Worker threads of one model, started at once, ended when the pool is collected or the interpreter exits.

    Args:
        names: one a thread.

    Raises:
        RuntimeError: the interpreter is exiting, or the system has no more threads.
        WorkerDiedError: a thread ended while it started.
    """

    def __init__(self, names: list[str]) -> None:
        if sys.is_finalizing():  # A thread that starts now never runs, and its start never returns.
            raise RuntimeError(
                "the interpreter is exiting, and starts no worker threads any more: expected the model to be used "
                "before. Where a destructor or a generator's finally uses it, register that with atexit."
            )
        self._pid = os.getpid()
        self._channels = [_Channel() for _ in names]
        self._intraop: tuple[int, list[int]] | None = None
        threads: list[threading.Thread] = []
        exiting = partial(_exit, self._channels, threads)
        atexit.register(exiting)
        weakref.finalize(self, _close, self._channels, exiting).atexit = False
        for channel, name in zip(self._channels, names):
            thread = threading.Thread(target=_work, args=(channel,), name=name, daemon=True)
            thread.start()
            threads.append(thread)
        for channel, thread in zip(self._channels, threads):
            while not channel.listening.wait(_LOOK):
                if not thread.is_alive():
                    raise WorkerDiedError("a worker thread ended before it was ready for its first call; try again")

    @property
    def usable(self) -> bool:
        """Whether its threads run in this process: a fork leaves them behind, an interpreter that ends stops them."""
        if self._pid != os.getpid() or sys.is_finalizing():
            return False
        return not any(channel.gone for channel in self._channels)

    def submit(
        self, worker: int, call: Callable[[], T], lost: Callable[[BaseException], None] | None = None
    ) -> Outcome[T]:
        """Has the worker run the call after those it was given before.

        Args:
            worker: its number.
            call: to run.
            lost: called, in any thread, if the call will never run, or raises: for those who wait for what it would
                have done.
        """
        channel = self._channels[worker]
        outcome = Outcome(call, lost)
        channel.calls.append(outcome)
        channel.bell.put(True)
        if channel.gone or self._pid != os.getpid():
            channel.drain()
        return outcome

    def run(self, calls: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
        """Has workers run calls, and gives their values. When it raises, none of them is at work.

        Args:
            calls: the number of a worker, and what it is to run.
        """
        outcomes: list[Outcome[T]] = []
        try:
            for worker, call in calls:
                outcomes.append(self.submit(worker, call))
            wait(outcomes)
        except BaseException:
            self.rest()
            raise
        return [outcome.get() for outcome in outcomes]

    def rest(self) -> None:
        """Returns when all calls have ended, also one whose submission was interrupted, so that nobody knows of it."""
        for channel in self._channels:
            channel.bell.put(True)  # For a call that was put in, and not rung. One bell too many does no harm.
        settle([self.submit(worker, _nothing) for worker in range(len(self._channels))])

    def share_threads(self, computing: list[int]) -> None:
        """Gives each worker that computes on the CPU its share of the caller's intra-op threads.

        ``torch.set_num_threads`` is a thread's own setting, and the last one called becomes that of threads yet to
        start. That one is put back, by a thread that starts for it: the caller's own number may be another.
        """
        total = torch.get_num_threads()
        if not computing or self._intraop == (total, computing):
            return
        call = partial(_compute_on, max(1, total // len(computing)))
        others = _in_new_thread(torch.get_num_threads)
        try:
            self.run([(worker, call) for worker in computing])
        finally:
            _in_new_thread(partial(torch.set_num_threads, others))
        self._intraop = total, computing
