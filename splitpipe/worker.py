"""Threads that stay: each takes calls in order, and hands back one Outcome a call.

Guarantees, and what would break them:

* ``Outcome.get`` never waits forever. A call stays in its channel until it has ended. A thread that ends, for
  whatever reason, marks itself gone *before* it fails what is left there; ``submit`` puts first and looks at the
  mark *afterwards*. So of a call put in at the moment a thread dies, either the thread or the submitter finds it.
  Look first, put then, and a call can fall between the two; take it out first, run it then, and a thread that dies
  in between takes it along.
* A thread keeps nothing alive. It forgets the call before it settles the outcome; a variable that still named it
  would hold a microbatch until the next forward, and the pool's owner for good.
* Threads hold their channel, never the pool. Else no pool would ever be collected, and its threads would stay.
* The interpreter's exit waits for a call that runs. A thread that comes back from torch to an interpreter that is
  gone aborts the process.
"""
from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import torch

T = TypeVar("T")

#: Seconds that the interpreter's exit waits for calls that run.
_GRACE = 30.0


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
            call, self._call, self._lost = self._call, None, None
            assert call is not None
            self._value = call()
        except BaseException as error:
            self._error = error
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
    """A thread's calls, those that have not ended; a bell that is rung for each; whether the thread still listens."""

    def __init__(self) -> None:
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
        while channel.bell.get():
            channel.calls[0].run()
            channel.calls.popleft()
    finally:
        channel.gone = True
        channel.drain()


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


def _in_new_thread(call: Callable[[], T]) -> T:
    outcome = Outcome(call)
    threading.Thread(target=outcome.run, daemon=True).start()
    return outcome.get()


class Pool:
    """Worker threads of one model, started at once, ended when the pool is collected or the interpreter exits.

    Args:
        names: one a thread.
    """

    def __init__(self, names: list[str]) -> None:
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

    @property
    def usable(self) -> bool:
        """Whether its threads run in this process: a fork leaves them behind."""
        return self._pid == os.getpid() and not any(channel.gone for channel in self._channels)

    def submit(
        self, worker: int, call: Callable[[], T], lost: Callable[[BaseException], None] | None = None
    ) -> Outcome[T]:
        """Has the worker run the call after those it was given before.

        Args:
            worker: its number.
            call: to run.
            lost: called, in any thread, if the call will never run: for those who wait for what it would have done.
        """
        channel = self._channels[worker]
        outcome = Outcome(call, lost)
        channel.calls.append(outcome)
        channel.bell.put(True)
        if channel.gone or self._pid != os.getpid():
            channel.drain()
        return outcome

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
        outcomes: list[Outcome[None]] = []
        try:
            for worker in computing:
                outcomes.append(self.submit(worker, call))
            settle(outcomes)
        finally:
            _in_new_thread(partial(torch.set_num_threads, others))
        for outcome in outcomes:
            outcome.get()
        self._intraop = total, computing
