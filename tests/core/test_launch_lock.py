"""The lock of the host's part of ops on accelerators: one thread at a time, and nobody waits for long."""
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from splitpipe.core import launch_lock
from splitpipe.core.launch_lock import LaunchLock
from tests.helpers.twin import stages


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


class Noting(nn.Linear):
    """Notes at each call whether its thread has the call's lock; raises if it is told to."""

    def __init__(self, locks: list[LaunchLock], noted: list[bool]) -> None:
        super().__init__(4, 4)
        self.locks, self.noted, self.fails = locks, noted, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noted.append(self.locks[-1]._owner == threading.get_ident())
        if self.fails:
            raise ValueError("on purpose")
        return super().forward(x).tanh()


@pytest.mark.cuda
@pytest.mark.devices(2)
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_a_layer_runs_in_the_thread_that_has_it_in_the_recomputation_too_and_an_error_frees_it(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, noted, make = list[LaunchLock](), list[bool](), LaunchLock.__init__
    monkeypatch.setattr(LaunchLock, "__init__", lambda self: (make(self), locks.append(self))[0])
    module, where = stages(nn.Sequential(Noting(locks, noted), Noting(locks, noted)), [1, 1], by)
    options: dict[str, Any] = {"devices": [0, 1], "chunks": 2, "checkpoint": "always"}
    model, x = SplitPipe(module, **where, **options), torch.randn(4, 4, device="cuda:0")
    for _ in range(2):  # First runs also wait for the generator.
        model(x).sum().backward()
    monkeypatch.setattr(launch_lock, "_PATIENCE", 20.0)
    noted.clear()
    model(x).sum().backward()
    assert noted == [True] * 2 * 2 * 2
    model[1].fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    assert locks and all(lock._lock.acquire(blocking=False) for lock in locks)
