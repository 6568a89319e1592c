"""A call in a thread of its own, which runs only while another thread waits for it, from one pause to the next.

Guarantees: ``resume`` returns when the call has paused or ended, or its thread has died. A call that is not to go on is
abandoned: its pause raises Stopped, its own code unwinds, and the thread is free.
"""
from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from splitpipe.core.mailbox import Stopped
from splitpipe.core.worker import Outcome, Pool, WorkerDiedError

#: Seconds between two looks at a thread that is waited for.
_LOOK = 0.1


class Coroutine:
    """One call, in the thread of a pool that has this number."""

    def __init__(self, number: int, call: Callable[[], None]) -> None:
        self._number = number
        self._call = call
        self._goes: SimpleQueue[bool] = SimpleQueue()
        self._came: SimpleQueue[None] = SimpleQueue()
        self._outcome: Outcome[None] | None = None
        self._errors: list[BaseException] = []
        self._abandoned = False

    def resume(self, pool: Pool) -> None:
        """Runs the call to its next pause, or to its end; raises what it raises."""
        if self._abandoned:
            raise Stopped
        if self._outcome is None:
            self._outcome = pool.submit(self._number, self._run)
        else:
            self._goes.put(True)
        while True:
            try:
                self._came.get(timeout=_LOOK)
                break
            except Empty:
                if self._outcome.lost:
                    raise WorkerDiedError("a microbatch's thread ended during its forward; try again") from None
        if self._errors:
            [error] = self._errors
            self._errors = []
            try:
                raise error
            finally:
                del error

    def pause(self) -> None:
        """Lets the other thread go on, and waits to be resumed. Called by the call."""
        if not self._abandoned:
            self._came.put(None)
        if self._abandoned or not self._goes.get():
            raise Stopped

    def abandon(self) -> None:
        """Ends the call, if it has paused, or when it does."""
        self._abandoned = True
        self._goes.put(False)  # Also if it has not started: after a second interrupt a worker may be about to do that.

    def ended(self) -> None:
        """Waits until the thread is through with the call, or has died."""
        while self._outcome is not None and not self._outcome.ended(_LOOK) and not self._outcome.lost:
            pass

    def _run(self) -> None:
        try:
            self._call()
        except Stopped:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._came.put(None)
