"""Only one thread compiles, and meanwhile no other thread runs compiled code.

torch.compile isn't thread-safe (pytorch#118260, #168042): while one thread traces, another one that calls compiled code
is told that it is being traced, and the compiler's settings are global. So calls of compiled layers *pass* the gate,
many at a time, and a thread that must compile closes it: it waits until the others have passed or wait to compile too,
and is then alone.

Guarantee: every wait ends. A thread that waits to compile doesn't count as passing; one that passes waits for nothing
that a compiling thread may hold, because the lock of random numbers is taken before the gate, both to draw and to
compile. There is one gate per process, as there is one compiler. Calls inside a user's compiled layer have a separate
gate: a pipeline inside it has other threads, which must not wait for the one that waits for them.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from splitpipe.core.worker import ProcessLock


class Gate:
    """See the module."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passing: dict[int, int] = {}  # The number of nested calls inside, by thread.
        self._alone: int | None = None
        self._waiting = 0  # Threads that want to be alone: later ones let them go first.

    @property
    def is_alone(self) -> bool:
        """True if this thread compiles."""
        return self._alone == threading.get_ident()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Lets the block's calls of compiled code through, unless another thread compiles."""
        here = threading.get_ident()
        with self._changed:
            inside = self._passing.get(here, 0)
            while not inside and self._alone != here and (self._alone is not None or self._waiting):
                self._changed.wait()
            self._passing[here] = inside + 1
        try:
            yield
        finally:
            self._left(here)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compiles in the block: no other thread compiles or runs compiled code meanwhile."""
        here = threading.get_ident()
        with self._changed:
            if self._alone == here:
                inside, nested = 0, True
            else:
                nested = False
                inside = self._passing.pop(here, 0)
                self._changed.notify_all()
                self._waiting += 1
                try:
                    while self._alone is not None or self._passing:
                        self._changed.wait()
                    self._alone = here
                finally:
                    self._waiting -= 1
                    self._changed.notify_all()
                    if inside:
                        self._passing[here] = inside
        try:
            yield
        finally:
            if not nested:
                with self._changed:
                    self._alone = None
                    self._changed.notify_all()

    def _left(self, here: int) -> None:
        with self._changed:
            left = self._passing[here] - 1
            if left:
                self._passing[here] = left
            else:
                del self._passing[here]
                self._changed.notify_all()


_GATES = ProcessLock(Gate)


_inner: ContextVar[ProcessLock | None] = ContextVar("splitpipe.gate", default=None)


def gate() -> Gate:
    """The gate of this process, or of the call that this context is in."""
    found: Gate = (_inner.get() or _GATES).lock
    return found


@contextmanager
def gate_inside() -> Iterator[None]:
    """Gives a separate gate to everything that the block calls, including pipelines' workers."""
    token = _inner.set(ProcessLock(Gate))
    try:
        yield
    finally:
        _inner.reset(token)
