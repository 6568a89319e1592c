"""The lock of the host's part of ops on accelerators: one thread at a time, and nobody waits for long."""
from __future__ import annotations

import threading

import pytest

from splitpipe.core import launch_lock
from splitpipe.core.launch_lock import LaunchLock


def in_thread(lock: LaunchLock, events: list[str]) -> threading.Thread:
    """A thread that takes the lock, says so, and gives it back."""
    thread = threading.Thread(target=lambda: (lock.take(), events.append("taken"), lock.give()))
    thread.start()
    return thread


def test_who_waits_has_the_lock_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_lock, "_PATIENCE", 60.0)
    lock, events = LaunchLock(), list[str]()
    lock.take()
    thread = in_thread(lock, events)
    events.append("given")
    lock.give()
    thread.join(60)
    assert events == ["given", "taken"]


def test_who_waits_goes_on_without_it_and_leaves_it_to_its_owner() -> None:
    lock, events = LaunchLock(), list[str]()
    lock.take()
    in_thread(lock, events).join(60)
    assert events == ["taken"]
    assert not lock._lock.acquire(blocking=False)  # The other thread's give was no give.
    lock.give()
    assert lock._lock.acquire(blocking=False)
