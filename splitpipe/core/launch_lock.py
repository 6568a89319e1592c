"""One thread at a time runs the host's part of an op on an accelerator, as long as that is short.

torch releases the GIL in each of its functions. If another thread waits for the GIL then, both are woken for each
kernel: two stages that launch side by side take longer than one after the other. So a thread waits for this lock, and
not for the GIL; but for a few milliseconds only, since one that waits for its device (``.item()``, a full queue) would
keep the others from theirs. While autograd runs nodes, which need no GIL, the lock is free.
"""
from __future__ import annotations

from threading import Lock, get_ident

#: Seconds after which a thread goes on without the lock, as after the interpreter's own switch interval.
_PATIENCE = 0.005


class LaunchLock:
    """The lock of one call."""

    def __init__(self) -> None:
        self._lock, self._owner = Lock(), 0

    def take(self) -> None:
        """Takes the lock, if it is free soon."""
        if self._lock.acquire(timeout=_PATIENCE):
            self._owner = get_ident()

    def give(self) -> None:
        """Lets go of the lock, if this thread has it."""
        if self._owner == get_ident():
            self._owner = 0
            self._lock.release()
