"""Worker threads: order, outcomes, exceptions, death, interrupts, and what they leave behind."""
from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitpipe.core import worker
from splitpipe.core.worker import Outcome, Pool, WorkerDiedError, settle
from tests.helpers.twin import NotRung

DIED = "a worker thread ended before it was through with this call; try again"


class Thing:
    """Something that a weak reference can follow."""


def fails(error: BaseException) -> None:
    raise error


def threads_of(pool: Pool) -> list[threading.Thread]:
    return [pool.submit(number, threading.current_thread).get() for number in range(len(pool._channels))]


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
    outcomes = [pool.submit(0, partial(order.append, number)) for number in range(50)]
    settle(outcomes)
    assert order == list(range(50))
    assert [outcome.get() for outcome in outcomes] == [None] * 50
    first, second = threads_of(pool)
    assert (first.name, second.name) == ("first", "second")
    assert first.daemon and second.daemon and threads_of(pool) == [first, second]


def test_workers_run_at_the_same_time(pool: Pool) -> None:
    meet = threading.Barrier(2, timeout=60)
    settle(outcomes := [pool.submit(number, meet.wait) for number in range(2)])
    assert sorted(outcome.get() for outcome in outcomes) == [0, 1]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
def test_every_kind_of_exception_is_carried_as_it_is_and_the_worker_goes_on(
    pool: Pool, kind: type[BaseException]
) -> None:
    error = kind("why")
    failed, after = pool.submit(0, partial(fails, error)), pool.submit(0, lambda: 3)
    with pytest.raises(kind) as caught:
        failed.get()
    assert caught.value is error
    assert [entry.name for entry in caught.traceback][-1] == "fails"
    assert after.get() == 3 and pool.usable


def test_an_outcome_is_opened_once() -> None:
    outcome = Outcome(Thing)
    outcome.run()
    assert isinstance(outcome.get(), Thing)
    assert outcome._value is None and outcome._call is None
    outcome.wait()


def test_a_settled_outcome_does_not_fail_any_more() -> None:
    outcome = Outcome(lambda: 3)
    outcome.run()
    outcome.fail(ValueError("late"))
    assert outcome.get() == 3


class Bell(SimpleQueue[bool]):
    """Takes the place of a thread's bell, and kills whoever listens."""

    def get(self, block: bool = True, timeout: float | None = None) -> bool:
        raise SystemExit


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says nothing of threads that end with an exception."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


class Doomed:
    """The first worker of a pool: in a call, at whose end it dies."""

    def __init__(self, pool: Pool) -> None:
        self._go = threading.Event()
        self.thread = threads_of(pool)[0]
        self.running = pool.submit(0, self._go.wait)
        self.channel = pool._channels[0]
        self.waiting = [pool.submit(0, Thing) for _ in range(2)]
        self.channel.bell = Bell()

    def die(self) -> None:
        self._go.set()
        self.thread.join()


@pytest.mark.parametrize("ended", [0, 1])
def test_a_thread_that_dies_before_it_listens_is_an_error_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    """Not a pool, the first call of which nobody would run."""
    work, threads = worker._work, set(threading.enumerate())

    def dying(channel: Any) -> None:
        if threading.current_thread().name != str(ended):
            work(channel)

    monkeypatch.setattr(worker, "_work", dying)
    monkeypatch.setattr(worker, "_LOOK", 0.01)
    with pytest.raises(WorkerDiedError, match="ended before it was ready for its first call"):
        Pool(["0", "1"])
    monkeypatch.undo()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()
    assert Pool(["0"]).submit(0, lambda: 3).get() == 3


def test_a_thread_that_dies_fails_waiting_and_later_calls_and_no_other_thread(pool: Pool, quiet: None) -> None:
    doomed = Doomed(pool)
    doomed.die()
    assert doomed.running.get() is True
    for outcome in [*doomed.waiting, pool.submit(0, Thing)]:
        with pytest.raises(WorkerDiedError, match=DIED):
            outcome.get()
    assert not pool.usable
    assert pool.submit(1, lambda: 3).get() == 3


def test_a_thread_killed_while_it_waits_fails_the_call_that_wakes_it(pool: Pool, quiet: None, untraced: None) -> None:
    thread = threads_of(pool)[0]
    ident = ctypes.c_ulong(thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1
    with pytest.raises(WorkerDiedError, match=DIED):
        pool.submit(0, Thing).get()
    thread.join()
    assert not pool.usable


class Slow(deque[Any]):
    """Calls of a channel, to which a call comes only after the thread has died and failed what it found."""

    def __init__(self, before: Callable[[], object]) -> None:
        super().__init__()
        self._before = before

    def append(self, call: Any) -> None:
        self._before()
        super().append(call)


def test_a_call_given_at_the_moment_of_death_fails(pool: Pool, quiet: None) -> None:
    doomed = Doomed(pool)
    slow = Slow(doomed.die)
    slow.extend(doomed.channel.calls)
    doomed.channel.calls = slow
    late = pool.submit(0, Thing)
    assert doomed.running.get() is True
    with pytest.raises(WorkerDiedError, match=DIED):
        late.get()


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
    settle(outcomes)
    try:
        outcomes[0].get()
    except ValueError:
        pass
    del outcomes
    assert [ref() for ref in refs] == [None, None]


def test_a_call_that_fails_without_running_is_let_go_of(no_collector: None) -> None:
    given = Thing()
    ref = weakref.ref(given)
    outcome = Outcome(partial(fails, given))  # type: ignore[arg-type]
    del given
    outcome.fail(ValueError("never"))
    assert ref() is None
    with pytest.raises(ValueError, match="never"):
        outcome.get()


def test_a_channel_goes_with_its_pool_and_its_thread(no_collector: None) -> None:
    pool = Pool(["one"])
    (thread,), channel = threads_of(pool), weakref.ref(pool._channels[0])
    del pool
    thread.join()
    assert channel() is None


def test_threads_end_with_their_pool(no_collector: None) -> None:
    pool = Pool(["one", "two"])
    threads = threads_of(pool)
    pool.share_threads([0, 1])
    ref = weakref.ref(pool)
    del pool
    assert ref() is None
    for thread in threads:
        thread.join()


def test_a_call_that_runs_when_its_pool_is_collected_ends_in_peace() -> None:
    pool = Pool(["one"])
    go = threading.Event()
    outcomes = [pool.submit(0, go.wait), pool.submit(0, lambda: True)]
    del pool
    go.set()
    assert [outcome.get() for outcome in outcomes] == [True, True]


def test_a_pool_whose_threads_cannot_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and this platform has none")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_a_fork_the_pool_is_not_usable_and_its_calls_fail(pool: Pool) -> None:
    threads_of(pool)
    child = os.fork()
    if not child:
        try:
            if not pool.usable:
                pool.submit(0, Thing).get()
        except WorkerDiedError:
            os._exit(Pool(["one"]).submit(0, lambda: 7).get())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert pool.usable and pool.submit(0, lambda: 3).get() == 3


SCRIPT = """
import gc, os, sys, threading, torch
from splitpipe.core import worker
from splitpipe.core.worker import Pool

class Owner: ...

torch.set_num_threads(1)
pool = Pool(["one", "two"])
x = torch.ones(300, 300)
ready = threading.Event()

def idle():
    ready.set()

def busy():
    x @ x
    ready.set()
    for _ in range(100):
        x @ x

def endless():
    while True:
        ready.set()
        threading.Event().wait(0.01)

def forks():
    ready.set()
    if os.fork() == 0:
        sys.exit(0)

outcome = pool.submit(0, {call})
ready.wait()
{end}
"""


@pytest.mark.parametrize(
    ("call", "end"),
    [("idle", ""), ("busy", "sys.exit(0)"), ("busy", "owner = Owner(); owner.pool, owner.me = pool, owner; del pool")],
)
def test_the_interpreter_exits_cleanly(call: str, end: str) -> None:
    assert exit_of(call, end) == (0, "")


def test_the_exit_waits_for_an_endless_call_no_longer_than_said() -> None:
    assert exit_of("endless", "worker._GRACE = 0.01") == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and this platform has none")
def test_a_forked_child_exits_without_waiting_for_threads_that_it_has_not() -> None:
    # After the worker's first product: that registers the ends of torch's statics, and a child forked at that moment
    # finds the C library's lock of such ends taken by a thread that it has not. Its own exit would wait for it forever.
    fork = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "if os.fork() == 0: sys.exit(5)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert exit_of("busy", fork) == (5, "")


def exit_of(call: str, end: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(call=call, end=end)], capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stderr


def in_thread(call: Callable[[], Any]) -> Any:
    outcome = Outcome(call)
    threading.Thread(target=outcome.run).start()
    return outcome.get()


@pytest.fixture
def numbers() -> Iterator[None]:
    """Gives back the caller's number of threads, and that of new ones."""
    own, new = torch.get_num_threads(), in_thread(torch.get_num_threads)
    yield
    torch.set_num_threads(own)
    in_thread(partial(torch.set_num_threads, new))


@pytest.mark.parametrize(("own", "new"), [(6, 6), (6, 2), (1, 3)])
def test_workers_share_the_callers_threads_and_leave_its_number_and_that_of_new_threads_alone(
    pool: Pool, numbers: None, own: int, new: int
) -> None:
    torch.set_num_threads(own)
    in_thread(partial(torch.set_num_threads, new))
    pool.share_threads([0, 1])
    assert [pool.submit(n, torch.get_num_threads).get() for n in range(2)] == [max(1, own // 2)] * 2
    assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (own, new)
    pool.share_threads([1])
    assert [pool.submit(n, torch.get_num_threads).get() for n in range(2)] == [max(1, own // 2), own]
    assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (own, new)


def test_sharing_repeats_only_what_has_changed(pool: Pool, numbers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    pool.share_threads([0])
    monkeypatch.setattr(pool, "submit", None)
    pool.share_threads([0])
    pool.share_threads([])
    monkeypatch.undo()
    torch.set_num_threads(2)
    pool.share_threads([0])
    assert pool.submit(0, torch.get_num_threads).get() == 2


def test_sharing_with_a_dead_thread_fails_and_leaves_the_numbers_alone(pool: Pool, numbers: None, quiet: None) -> None:
    torch.set_num_threads(4)
    Doomed(pool).die()
    with pytest.raises(WorkerDiedError):
        pool.share_threads([0, 1])
    assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (4, 4)


class Interrupted(BaseException):
    """What the signal handler raises."""


class Entered(list[Any]):
    """Outcomes that tell when someone starts to wait for them, and starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        (self.again if self.first.is_set() else self.first).set()
        return super().__iter__()


class Interrupts:
    """Raises in the main thread, from another one."""

    def __init__(self) -> None:
        self._armed = False

    def handle(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise Interrupted

    def send(self) -> None:
        # A signal that arrives just before the main thread blocks is noticed with the next one only.
        self._armed = True
        while self._armed:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    found = Interrupts()
    before = signal.signal(signal.SIGUSR1, found.handle)
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_a_first_interrupt_waits_for_every_running_call(pool: Pool, interrupts: Interrupts) -> None:
    ended: list[str] = []
    outcomes = Entered()

    def call(name: str) -> None:
        outcomes.first.wait()
        if name == "interrupts":
            interrupts.send()
        outcomes.again.wait()
        ended.append(name)

    outcomes.extend(pool.submit(number, partial(call, name)) for number, name in enumerate(["interrupts", "other"]))
    with pytest.raises(Interrupted):
        settle(outcomes)
    assert sorted(ended) == ["interrupts", "other"]
    assert [outcome.get() for outcome in list.__iter__(outcomes)] == [None, None]


def test_a_second_interrupt_gets_through(pool: Pool, interrupts: Interrupts) -> None:
    outcomes = Entered()
    go = threading.Event()

    def call() -> None:
        outcomes.first.wait()
        interrupts.send()
        outcomes.again.wait()
        interrupts.send()
        go.wait()

    outcomes.append(outcome := pool.submit(0, call))
    with pytest.raises(Interrupted):
        settle(outcomes)
    assert outcomes.again.is_set() and not outcome._settled
    go.set()
    outcome.get()


class Scripted(Outcome[None]):
    """An outcome that is interrupted in some of its waits."""

    def __init__(self, *interrupted: bool) -> None:
        super().__init__(lambda: None)
        self.waits = 0
        self._interrupted = interrupted

    def wait(self) -> None:
        self.waits += 1
        if self._interrupted[self.waits - 1]:
            raise Interrupted


def test_two_interrupts_get_through_whichever_outcomes_they_meet() -> None:
    first, second = Scripted(True, False), Scripted(True)
    with pytest.raises(Interrupted):
        settle([first, second])
    assert (first.waits, second.waits) == (2, 1)
    alone, last = Scripted(False, False), Scripted(True, False)
    with pytest.raises(Interrupted):
        settle([alone, last])
    assert (alone.waits, last.waits) == (2, 2)


def test_an_interrupt_that_comes_with_the_end_of_the_call_loses_nothing() -> None:
    outcome = Outcome(lambda: 3)
    outcome.run()
    outcome._done.acquire()  # As a wait that got the lock and was interrupted leaves it.
    settle([outcome])
    assert outcome.get() == 3


def test_at_the_end_of_the_process_threads_are_told_and_waited_for() -> None:
    channel = worker._Channel()
    thread = threading.Thread(target=worker._work, args=(channel,))
    thread.start()
    worker._exit([channel], [thread])
    assert not thread.is_alive() and channel.gone


def test_the_exit_joins_each_thread_of_a_pool_that_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[Callable[[], None]] = []
    finalizers: list[Any] = []
    joined: list[threading.Thread] = []
    finalize = weakref.finalize
    with monkeypatch.context() as patch:
        patch.setattr("atexit.register", exits.append)
        patch.setattr("weakref.finalize", lambda *given: finalizers.append(finalize(*given)) or finalizers[-1])
        pool = Pool(["one", "two"])
    threads, join = threads_of(pool), threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, limit: (joined.append(self), join(self, limit)))
    (leaves,) = exits
    leaves()
    monkeypatch.undo()
    assert joined == threads and not any(thread.is_alive() for thread in threads)
    assert [one.atexit for one in finalizers] == [False], "it would tell the exit not to join, if it came first"


def test_threads_share_the_time_that_the_exit_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    class Busy(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert timeout is not None
            limits.append(timeout)

    clock = SimpleNamespace(monotonic=iter([100.0, 101.0, 129.5, 140.0]).__next__)
    monkeypatch.setattr(worker, "time", clock)
    worker._exit([], [Busy(), Busy(), Busy()])
    assert limits == [29.0, 0.5, 0.0]


def test_no_threads_are_started_while_the_interpreter_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.is_finalizing", lambda: True)
    assert not pool.usable
    with pytest.raises(RuntimeError, match="the interpreter is exiting"):
        Pool(["late"])


def test_a_child_that_a_call_has_forked_ends_when_it_comes_back(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def end() -> None:
        ended.append(1)
        raise SystemExit

    channel = worker._Channel()
    channel.calls.append(Outcome(lambda: monkeypatch.setattr("os.getpid", lambda: -1)))
    channel.bell.put(True)
    monkeypatch.setattr(worker, "_orphaned", end)
    with pytest.raises(SystemExit):
        worker._work(channel)
    assert ended == [1] and channel.gone


def test_a_forked_child_that_comes_back_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, bytes]] = []

    def end(status: int) -> None:
        raise SystemExit(status)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("os.write", lambda file, text: said.append((file, text)))
        patch.setattr("os._exit", end)
        worker._orphaned()
    ((file, text),) = said
    assert ended.value.code == 1 and file == 2
    assert text.startswith(b"splitpipe: a layer forked, and the child came back") and text.endswith(b"do.\n")


def test_calls_whose_submission_is_interrupted_have_ended_when_the_interrupt_arrives(pool: Pool) -> None:
    channel, ran = pool._channels[1], list[int]()
    channel.bell = NotRung(channel.bell)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        pool.run([(0, partial(ran.append, 0)), (1, partial(ran.append, 1)), (0, partial(ran.append, 2))])
    assert sorted(ran) == [0, 1]
    assert pool.run([(1, lambda: 3)]) == [3]


def test_a_bell_for_no_call_does_no_harm() -> None:
    channel, ran = worker._Channel(), list[int]()
    for ring in (True, True, False):
        channel.bell.put(ring)
    channel.calls.append(Outcome(partial(ran.append, 0)))
    worker._work(channel)
    assert ran == [0]


def test_a_run_that_raises_has_waited_for_all_of_its_calls(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited, ended, real = threading.Event(), list[int](), worker.wait

    def wait(outcomes: list[Outcome[Any]]) -> None:
        waited.set()
        real(outcomes)

    monkeypatch.setattr(worker, "wait", wait)
    with pytest.raises(KeyError):
        pool.run([(0, partial(fails, KeyError())), (1, lambda: ended.append(waited.wait()))])  # type: ignore[func-returns-value]
    try:
        assert ended == [True]
    finally:
        waited.set()
