"""The threads and streams of one model, which last as long as the model, and the lock of the host's part of ops.

Each thread takes calls from a separate queue, in order. Guarantees, and what would break them:

* Every wait ends: who waits looks whether the workers are alive. After a fork, none is.
* When ``Pool.run`` raises, its calls have ended, and so have the threads. The owner creates another pool.
* The calls of two ``Pool.run`` are in the same order in every queue, since those of one may wait for each other.
* A thread keeps nothing alive: neither its last call, nor what that returned or raised, nor the pool.
* The interpreter's exit waits for running calls: a thread that returned from torch after it would abort the process.
"""
from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from queue import Empty, SimpleQueue

import torch

from splitpipe.core import stream
from splitpipe.core.stream import NamedStreams, Place, Stream
from splitpipe.core.transfer import Route

Call = Callable[[], object]

_GRACE = 30.0  # Seconds for which the interpreter's exit waits for running calls.
_LOOK = 0.1  # Seconds between two checks of threads whose calls are waited for.
#: Seconds after which a thread goes on without the launch lock, as after the interpreter's own switch interval.
_PATIENCE = 0.005


class LaunchLock:
    """The lock of one model: one thread at a time runs the host's part of an op on an accelerator, if that is short.

    torch releases the GIL in each of its functions. If another thread waits for the GIL then, both are woken for each
    kernel: two stages that launch side by side take longer than one after the other. So a thread waits for this lock,
    and not for the GIL; but for a few milliseconds only, since one that waits for its device (``.item()``, a full
    queue) would keep the others from theirs. While autograd runs nodes, which need no GIL, the lock is free.
    """

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Takes the lock for the block, if it is free soon."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Lets go of the lock for the block, if this thread has it."""
        self._give()
        yield
        self._take()

    def _take(self) -> None:
        if self._lock.acquire(timeout=_PATIENCE):
            self._owner = threading.get_ident()

    def _give(self) -> None:
        if self._owner == threading.get_ident():
            self._owner = 0
            self._lock.release()


class _Worker(threading.Thread):
    """Runs the calls of its queue, and reports the end of each, with its error; None ends it."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"splitpipe worker {number}", daemon=True)
        self._number = number
        self.calls: SimpleQueue[tuple[Call, list[BaseException], SimpleQueue[int]] | None] = SimpleQueue()

    def run(self) -> None:
        while (task := self.calls.get()) is not None:
            call, errors, ended = task
            del task
            try:
                call()
            except BaseException as error:
                errors.append(error)
            del call, errors  # A traceback refers to this frame: an error that isn't passed on would be a cycle.
            ended.put(self._number)
            del ended


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

    def __init__(self, size: int) -> None:
        if sys.is_finalizing():  # A thread started now would never run, and its start never return.
            raise RuntimeError("the interpreter is exiting: expected uses of a model before that, or in atexit hooks.")
        self.closed, self._submitting = False, threading.Lock()  #: ``closed``: it ended with an error.
        self.threads: list[_Worker] = []
        weakref.finalize(self, _end, self.threads).atexit = False
        for number in range(size):
            worker = _Worker(number)
            worker.start()
            self.threads.append(worker)

    def run(self, calls: Sequence[Call], stop: Call = lambda: None) -> None:
        """Runs calls, each in the worker with its number, until all have ended, or raises the first error.

        ``stop`` is called before it is raised, to end calls that wait.
        """
        ended: SimpleQueue[int] = SimpleQueue()
        waiting: dict[int, _Worker] = {}
        errors: list[BaseException] = []
        try:
            with self._submitting:
                for number, call in enumerate(calls):
                    waiting[number] = thread = self.threads[number]
                    thread.calls.put((call, errors, ended))
            while waiting:
                lost = not all([thread.is_alive() for thread in waiting.values()])  # First: it may report, then end.
                try:
                    del waiting[ended.get(timeout=0 if lost else _LOOK)]
                except Empty:
                    if lost:
                        errors.append(RuntimeError("a worker thread ended before it had finished this call"))
                if errors:
                    raise errors.pop(0)
        except BaseException:
            self.closed = True
            stop()
            _end(self.threads)
            for thread in self.threads:
                thread.join()
            raise


def _start(device: torch.device, share: int) -> None:
    """Gives a worker's thread its device, and its share of the caller's intra-op threads."""
    stream.bind(device)
    torch.get_num_threads()  # A thread takes the process's number when it first asks, and would lose its own.
    torch.set_num_threads(share)


class Resources:
    """The threads and streams of one model, which it has only in its own process: each is created when first needed."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.devices = [place.device for place in places]
        self._pool: Pool | None = None
        self.named, self.lock = cache(stream.new), threading.RLock()  #: The lock is that of a call.
        self.launching = LaunchLock()
        #: Given the streams on which the stages compute, a function of two stages: see ``_routes``.
        self.routes = cache(partial(_routes, self.devices, self.named))

    def pool(self, workers: Sequence[int], waiting: int = 0) -> Pool:
        """Usable threads: one for each worker, and as many for forwards that are ``waiting`` at a cut."""
        size, pool = max(workers) + 1 + waiting, self._pool
        # After a fork, no thread is alive; when the interpreter exits, a new pool raises.
        usable = pool is not None and not pool.closed and not sys.is_finalizing() and len(pool.threads) >= size
        if pool is None or not usable or not all([thread.is_alive() for thread in pool.threads]):
            self._pool = None  # First, since an interrupt may come in between.
            pool = Pool(size)
            homes = dict(zip(reversed(workers), reversed(self.devices)))  # The device of each worker's first stage.
            computing = {worker for worker, device in zip(workers, self.devices) if device.type == "cpu"}
            total = torch.get_num_threads()
            share = max(1, total // len(computing)) if computing else total
            pool.run([partial(_start, homes.get(number, self.devices[0]), share) for number in range(size)])
            torch.set_num_threads(total)  # A thread's own setting, but those yet to start get the last one set.
            self._pool = pool
        return pool

    def refuse_own_threads(self) -> None:
        """Raises in the model's own worker threads, where waiting for a call of the model would be a deadlock."""
        if self._pool is not None and threading.current_thread() in self._pool.threads:
            raise RuntimeError(
                "a SplitPipe was called by one of its layers, inside its own forward, and would wait for itself."
            )


def _routes(
    devices: Sequence[torch.device], named: NamedStreams, computes: tuple[Stream, ...]
) -> Callable[[int, int], Route | None]:
    """The routes between stages that compute on these streams; None where both compute on the same one."""
    @cache
    def route(source: int, target: int) -> Route | None:
        here, there = devices[source], devices[target]
        if here == there and computes[source] == computes[target]:
            return None
        # One stream per link: on a common one, a copy would wait for copies from stages that aren't ready.
        out, into = named(here, "out"), named(there, f"in from {source}")
        return Route(here, there, (computes[source], computes[target]), out, into)

    return route
