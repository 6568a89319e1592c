"""Worker threads: order, outcomes, exceptions, death, interrupts, and what they leave behind."""
from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitpipe.core import worker
from splitpipe.core.worker import Outcome, Pool, ProcessLock, WorkerDiedError, in_new_thread

DIED = "a worker thread ended before it had finished this call; try again"


class Thing:
    """Something that a weak reference can follow."""


def fails(error: BaseException) -> None:
    raise error


@pytest.fixture
def pool() -> Pool:
    return Pool(["first", "second"])


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_worker_runs_its_calls_in_order_and_in_its_own_thread(pool: Pool) -> None:
    order: list[int] = []
    assert pool.run([(0, partial(order.append, number)) for number in range(50)]) == [None] * 50
    assert order == list(range(50))
    first, second = pool.run([(number, threading.current_thread) for number in range(2)])
    assert (first.name, second.name) == ("first", "second") and first.daemon and second.daemon
    assert pool.run([(number, threading.current_thread) for number in range(2)]) == [first, second] == pool._threads


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
def test_any_exception_is_raised_unchanged_and_the_worker_goes_on(
    pool: Pool, kind: type[BaseException]
) -> None:
    error = kind("why")
    with pytest.raises(kind) as caught:
        pool.run([(0, partial(fails, error))])
    assert caught.value is error
    assert [entry.name for entry in caught.traceback][-1] == "fails"
    assert pool.usable and pool.run([(0, lambda: 3)]) == [3]


def test_calls_of_two_threads_stand_in_one_order(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each could have one at work that waits for what is behind the other's."""
    submit, lock, order, came = Pool.submit, pool._submitting, list[tuple[int, int]](), threading.Semaphore(0)

    class Asked:
        def __enter__(self) -> None:
            came.release()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def first_of_two(self: Pool, number: int, call: Any) -> Outcome[Any]:
        order.append((threading.get_ident(), number))
        if len(order) == 1:
            other.start()
            assert came.acquire(timeout=60) and came.acquire(timeout=60), "nobody asks for the lock"
        return submit(self, number, call)

    monkeypatch.setattr(Pool, "submit", first_of_two)
    monkeypatch.setattr(pool, "_submitting", Asked())
    calls = [(number, lambda: None) for number in range(2)]
    other = threading.Thread(target=pool.run, args=(calls,))
    pool.run(calls)
    other.join()
    assert order == [(ident, n) for ident in (threading.get_ident(), order[-1][0]) for n in range(2)]


# Death


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says nothing of threads that end with an exception."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def kill(thread: threading.Thread) -> None:
    """Has it raise, as soon as it does something."""
    ident = ctypes.c_ulong(thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1


@pytest.mark.thorough
def test_calls_to_a_killed_thread_fail(
    pool: Pool, quiet: None, untraced: None
) -> None:
    kill(pool._threads[0])
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match=DIED):
            pool.submit(0, Thing).get()
    assert not pool.usable and not pool._threads[0].is_alive()
    assert pool.submit(1, lambda: 3).get() == 3


def test_a_call_fails_if_its_thread_dies_during_or_before_it(
    monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    for name, dies in (("_work", lambda calls: None), ("Outcome", type("Dies", (Outcome,), {"run": sys.exit}))):
        with monkeypatch.context() as patch:
            patch.setattr(worker, name, dies)
            with pytest.raises(WorkerDiedError, match=DIED):
                Pool(["one"]).run([(0, Thing)])


@pytest.mark.parametrize("error", [WorkerDiedError, KeyError], ids=["its thread dies", "it fails"])
def test_a_call_that_waits_for_another_one_is_stopped_and_waited_for(
    error: type[Exception], pool: Pool, quiet: None, request: pytest.FixtureRequest
) -> None:
    if error is WorkerDiedError:
        request.getfixturevalue("untraced")
        kill(pool._threads[0])
    stop, ended, told = threading.Event(), list[bool](), list[BaseException]()
    with pytest.raises(error) as caught:
        pool.run([(1, lambda: ended.append(stop.wait(60))), (0, partial(fails, KeyError()))],
                 lambda error: (told.append(error), stop.set()))  # type: ignore[func-returns-value]
    assert ended == [True] and told == [caught.value] and not pool.usable


# What is kept alive


def test_nothing_is_kept_alive_once_an_outcome_is_opened(pool: Pool, no_collector: None) -> None:
    for _ in range(20):
        given, value = Thing(), Thing()
        refs = [weakref.ref(given), weakref.ref(value)]
        outcome = pool.submit(0, partial(lambda *things: things[1], given, value))
        del given
        assert outcome.get() is value
        del value
        assert [ref() for ref in refs] == [None, None]


def test_exceptions_keep_nothing_alive_even_if_nobody_opens_them(pool: Pool, no_collector: None) -> None:
    refs = []

    def call() -> None:
        thing = Thing()
        refs.append(weakref.ref(thing))
        raise ValueError

    outcomes = [pool.submit(number, call) for number in range(2)]
    with pytest.raises(ValueError):
        outcomes[0].get()
    worker.wait(outcomes)
    pool.run([(number, lambda: None) for number in range(2)])  # Then a worker has let go of the call before.
    del outcomes
    assert [ref() for ref in refs] == [None, None]


def test_threads_and_their_queues_end_with_the_pool(no_collector: None) -> None:
    pool = Pool(["one", "two"])
    pool.share_threads([0, 1])
    threads, ref = pool._threads, weakref.ref(pool)
    del pool
    assert ref() is None
    for thread in threads:
        thread.join()


def test_a_pool_whose_threads_cannot_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Pool(["one", "two"])
    gc.collect()
    started[0].join()


# Fork and exit


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and this platform has none")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_needs_a_new_pool_and_has_free_locks(pool: Pool) -> None:
    lock = ProcessLock()
    pool.run([(0, lock.lock.acquire)])  # By another thread than the one that forks.
    child = os.fork()
    if not child:
        try:
            if not pool.usable and lock.lock.acquire(timeout=1):
                pool.submit(0, Thing).get()
        except WorkerDiedError:
            os._exit(Pool(["one"]).submit(0, lambda: 7).get())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert pool.usable and not lock.lock.acquire(timeout=0)


@pytest.mark.thorough
def test_the_exit_joins_each_thread_of_a_pool_that_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:
        patch.setattr("atexit.register", exits.append)
        pool = Pool(["one", "two"])
    exits[0]()
    assert not any(thread.is_alive() for thread in pool._threads) and not pool.usable
    with pytest.raises(WorkerDiedError):
        pool.run([(0, Thing)])


def test_exit_waits_for_busy_threads_of_a_dropped_pool(
    monkeypatch: pytest.MonkeyPatch, no_collector: None
) -> None:
    exits: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:
        patch.setattr("atexit.register", exits.append)
        patch.setattr("atexit.unregister", lambda each: exits.remove(each) if each in exits else None)
        pool = Pool(["a", "b"])
        threads, go = pool._threads[:], threading.Event()
        pool.submit(0, lambda: go.wait(60))
        del pool
        threads[1].join(60)
        assert len(exits) == 1 and threads[0].is_alive()
        go.set()
        exits[0]()
        assert not threads[0].is_alive() and exits == []


def test_threads_share_the_time_that_the_exit_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    thread: Any = SimpleNamespace(join=limits.append)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=iter([100.0, 101.0, 129.5, 140.0]).__next__))
    worker._exit([], [thread] * 3)
    assert limits == [29.0, 0.5, 0.0]


def test_no_threads_are_started_while_the_interpreter_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.is_finalizing", lambda: True)
    assert not pool.usable
    with pytest.raises(RuntimeError, match="the interpreter is exiting"):
        Pool(["late"])


# Intra-op threads


@pytest.fixture
def numbers() -> Iterator[None]:
    """Gives back the caller's number of threads, and that of new ones."""
    own, new = torch.get_num_threads(), in_new_thread(torch.get_num_threads)
    yield
    torch.set_num_threads(own)
    in_new_thread(partial(torch.set_num_threads, new))


def of_workers(pool: Pool) -> list[int]:
    return pool.run([(number, torch.get_num_threads) for number in range(2)])


@pytest.mark.parametrize(("own", "new"), [(6, 6), (6, 2), (1, 3)])
def test_workers_share_the_callers_intra_op_threads(
    pool: Pool, numbers: None, own: int, new: int
) -> None:
    torch.set_num_threads(own)
    in_new_thread(partial(torch.set_num_threads, new))
    for computing, shares in (([0, 1], [max(1, own // 2)] * 2), ([1], [max(1, own // 2), own])):
        pool.share_threads(computing)
        assert of_workers(pool) == shares
        assert (torch.get_num_threads(), in_new_thread(torch.get_num_threads)) == (own, new)


def test_sharing_repeats_only_what_has_changed(pool: Pool, numbers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    pool.share_threads([0])
    with monkeypatch.context() as patch:
        patch.setattr(pool, "submit", None)
        pool.share_threads([0])
        pool.share_threads([])
    torch.set_num_threads(2)
    pool.share_threads([0])
    assert of_workers(pool)[0] == 2


# Interrupts


class Interrupting:
    """The queue of a worker's calls, which an interrupt comes after, when the first call is in it."""

    def __init__(self, queue: Any) -> None:
        self.queue, self.interrupted = queue, False

    def put(self, value: Any) -> None:
        self.queue.put(value)
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt


def test_an_interrupt_during_submission_waits_for_submitted_calls(pool: Pool) -> None:
    ran: list[int] = []
    pool._queues[1] = Interrupting(pool._queues[1])  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        pool.run([(number, partial(ran.append, number)) for number in (0, 1, 0)])
    assert sorted(ran) == [0, 1] and not pool.usable


def test_an_interrupt_that_comes_with_the_end_of_the_call_loses_nothing() -> None:
    outcome = Outcome(lambda: 3, threading.current_thread())
    outcome.run()
    outcome._done.acquire()  # As a wait that got the lock and was interrupted leaves it.
    assert outcome.get() == 3
