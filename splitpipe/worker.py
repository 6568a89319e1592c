"""Threads that stay: each takes calls in order, and hands back one Outcome a call.

Guarantees, and what would break them:

* ``Outcome.get`` never waits forever. A thread that ends, for whatever reason, marks itself gone *before* it
  fails what is left in its queue; ``submit`` puts first and looks at the mark *afterwards*. So of a call put in
  at the moment a thread dies, either the thread or the submitter finds it. Look first, put then, and a call can
  fall between the two.
* A thread keeps nothing alive. It drops call and outcome before it waits for the next; a loop variable that
  still named them would hold a microbatch until the next forward, and the pool's owner for good.
* Threads hold their queue, never the pool. Else no pool would ever be collected, and its threads would stay.
"""
from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

import torch

T = TypeVar("T")


class WorkerDiedError(RuntimeError):
    """A worker thread ended while a call was waiting for it."""


class Outcome(Generic[T]):
    """The value or the exception of one call, to be opened once, by one thread.

    ``_settled`` is set before the lock is released. A wait that an interrupt ends just after it got the lock can so
    be repeated; going by the lock alone, the next would find it taken and wait forever.
    """

    __slots__ = ("_done", "_error", "_settled", "_value")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._settled = False
        self._error: BaseException | None = None
        self._value: T | None = None

    def run(self, call: Callable[[], T]) -> None:
        """Runs the call and settles."""
        try:
            self._value = call()
        except BaseException as error:
            self._error = error
        self._settle()

    def fail(self, error: BaseException) -> None:
        """Settles without running."""
        self._error = error
        self._settle()

    def _settle(self) -> None:
        self._settled = True
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


def settle(outcomes: Sequence[Outcome[T]]) -> None:
    """Waits for all, so that no call runs any more when an exception reaches the caller; a second interrupt passes."""
    interrupt: BaseException | None = None
    for outcome in outcomes:
        try:
            outcome.wait()
        except BaseException as error:
            interrupt = error
            outcome.wait()
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt


Item = tuple[Callable[[], object], "Outcome[object]"]


class _Channel:
    """A thread's queue, and whether the thread still reads it. None in the queue ends the thread."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Item | None] = SimpleQueue()
        self.gone = False

    def drain(self) -> None:
        """Fails every call that nobody will take any more."""
        while True:
            try:
                item = self.queue.get_nowait()
            except Empty:
                return
            if item is not None:
                item[1].fail(WorkerDiedError("the worker thread ended before it ran this call; try again"))


def _work(channel: _Channel) -> None:
    try:
        while True:
            item = channel.queue.get()
            if item is None:
                return
            call, outcome = item
            del item
            outcome.run(call)
            del call, outcome
    finally:
        channel.gone = True
        channel.drain()


def _close(channels: list[_Channel]) -> None:
    # Never joins: this may run inside the garbage collector, in any thread, under any lock.
    for channel in channels:
        channel.queue.put(None)


def _compute_on(threads: int) -> None:
    # A thread takes the process's number when it first asks; set before that, its own would be lost.
    torch.get_num_threads()
    torch.set_num_threads(threads)


class Pool:
    """Worker threads of one model, started at once, ended when the pool is collected or the interpreter exits.

    Args:
        names: one a thread.
    """

    def __init__(self, names: list[str]) -> None:
        self._pid = os.getpid()
        self._channels = [_Channel() for _ in names]
        self._intraop: tuple[int, int] | None = None
        for channel, name in zip(self._channels, names):
            threading.Thread(target=_work, args=(channel,), name=name, daemon=True).start()
        weakref.finalize(self, _close, self._channels)

    @property
    def usable(self) -> bool:
        """Whether its threads run in this process: a fork leaves them behind."""
        return self._pid == os.getpid() and not any(channel.gone for channel in self._channels)

    def submit(self, worker: int, call: Callable[[], T]) -> Outcome[T]:
        """Has the worker run the call after those it was given before."""
        channel = self._channels[worker]
        outcome: Outcome[T] = Outcome()
        channel.queue.put((call, cast("Outcome[object]", outcome)))
        if channel.gone:
            channel.drain()
        return outcome

    def share_threads(self, computing: list[int]) -> None:
        """Gives each worker that computes on the CPU its share of the caller's intra-op threads.

        ``torch.set_num_threads`` is a thread's own setting, and the last one called becomes that of threads yet to
        start: the caller repeats its own number at the end, so that nobody else's changes.
        """
        total = torch.get_num_threads()
        if not computing or self._intraop == (total, len(computing)):
            return
        share = max(1, total // len(computing))
        for outcome in [self.submit(worker, lambda: _compute_on(share)) for worker in computing]:
            outcome.get()
        torch.set_num_threads(total)
        self._intraop = total, len(computing)
