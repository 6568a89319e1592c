"""The lock of the host's part of ops on accelerators: one thread at a time, and nobody waits for long."""
from __future__ import annotations

import threading

from splitpipe.core.worker import LaunchLock


def in_thread(lock: LaunchLock, events: list[str]) -> threading.Thread:
    """A thread that takes the lock, says so, and gives it back."""
    thread = threading.Thread(target=lambda: (lock.take(), events.append("taken"), lock.give()))
    thread.start()
    return thread


def test_who_waits_goes_on_without_it_and_leaves_it_to_its_owner() -> None:
    lock, events = LaunchLock(), list[str]()
    lock.take()
    in_thread(lock, events).join(60)
    assert events == ["taken"]
    assert not lock._lock.acquire(blocking=False)  # The other thread's give was no give.
    lock.give()
    assert lock._lock.acquire(blocking=False)
