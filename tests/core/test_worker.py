"""Worker threads: order, and the threads that torch's ops have; the lock of the host's part of ops; notes on errors."""
from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from splitpipe.core import worker
from splitpipe.core.note import add_note
from splitpipe.core.stream import Place
from splitpipe.core.worker import LaunchLock, Pool, Resources

T = TypeVar("T")


@pytest.fixture
def pool() -> Pool:
    return Pool(2)


def values(pool: Pool, call: Callable[[], T]) -> list[T]:
    """What a function returns in each worker."""
    found: dict[int, T] = {}
    pool.run([lambda number=number: found.update({number: call()}) for number in range(len(pool.threads))])
    return [found[number] for number in range(len(pool.threads))]


def test_calls_of_two_threads_stand_in_one_order(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each could have one at work that waits for what is behind the other's."""
    lock, order, came = pool._submitting, list[tuple[int, int]](), threading.Semaphore(0)

    class Asked:
        def __enter__(self) -> None:
            came.release()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    class Noted:
        def __init__(self, number: int) -> None:
            self.number, self.put = number, pool.threads[number].calls.put

        def __call__(self, call: Any) -> None:
            order.append((threading.get_ident(), self.number))
            if len(order) == 1:
                other.start()
                assert came.acquire(timeout=60) and came.acquire(timeout=60), "nobody asks for the lock"
            self.put(call)

    for number, thread in enumerate(pool.threads):
        thread.calls = SimpleNamespace(get=thread.calls.get, put=Noted(number))  # type: ignore[assignment]
    monkeypatch.setattr(pool, "_submitting", Asked())
    calls = [lambda: None] * 2
    other = threading.Thread(target=pool.run, args=(calls,))
    pool.run(calls)
    other.join()
    assert order == [(ident, n) for ident in (threading.get_ident(), order[-1][0]) for n in range(2)]


def test_a_thread_that_has_ended_since_the_last_look_may_have_finished_its_call(pool, monkeypatch):
    class Late(SimpleQueue):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if timeout:  # It is looked into before the thread ends.
                pool.threads[0].join(60)
                raise Empty
            return super().get(block, timeout)

    monkeypatch.setattr(worker, "SimpleQueue", Late)
    pool.run([lambda: pool.threads[0].calls.put(None)])


@pytest.mark.parametrize("own", [6, 1])
def test_workers_share_the_callers_intra_op_threads(threads: None, own: int) -> None:
    torch.set_num_threads(own)
    for workers, share in (([0, 1], max(1, own // 2)), ([0, 0], own)):
        pool = Resources([Place(torch.device("cpu"))] * 2).pool(workers)
        assert {*values(pool, torch.get_num_threads)} == {share}
        assert torch.get_num_threads() == own == values(Pool(1), torch.get_num_threads)[0]


def test_who_waits_goes_on_without_it_and_leaves_it_to_its_owner() -> None:
    lock, went_on = LaunchLock(), list[bool]()

    def other() -> None:
        with lock.held():
            went_on.append(lock._lock.locked())

    with lock.held():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert went_on == [True] and lock._lock.locked()  # The other thread's end didn't release it.
        with lock.released():
            assert not lock._lock.locked()
        assert lock._lock.locked()
    assert not lock._lock.locked()


class Slotted(Exception):
    __slots__ = ("code",)


class Stubborn(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"no {name}")


@pytest.mark.parametrize("error", [ValueError("why"), KeyboardInterrupt(), Slotted(), Stubborn()], ids=repr)
def test_notes_are_kept_in_order_behind_those_of_others_and_shown(error: BaseException) -> None:
    vars(error)["__notes__"] = ["of others"]
    add_note(error, "in layer '0'")
    add_note(error, "in stage 1")
    assert getattr(error, "__notes__", None) == ["of others", "in layer '0'", "in stage 1"]
    if hasattr(BaseException, "add_note"):
        assert "".join(traceback.format_exception(error)).endswith("in layer '0'\nin stage 1\n")
