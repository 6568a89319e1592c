"""Probes run side by side: what a device's rows would do to one another's times, they do while they are measured."""
from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from splitpipe.core import thread_state
from splitpipe.core.note import raise_first
from splitpipe.core.worker import Pool, in_new_thread

T = TypeVar("T")
#: Of a row. The event is set when the measured part is done, or any has failed.
Part = Callable[[threading.Event], T]


class Load:
    """Threads that share the caller's, as those of a model with a stage a row on the CPU do.

    Args:
        rows: how many compute at once.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._pool: Pool | None = None

    def run(self, measured: Part[T], others: Sequence[Part[object]]) -> T:
        """Runs parts side by side, each in a row; gives what the first one gives.

        Args:
            measured: this one. It may end early when the event is set: another has failed then.
            others: go on until the event is set. There are fewer than rows.

        Raises:
            BaseException: the first that any part raised.
        """
        ended = threading.Event()
        if self.rows == 1:
            return measured(ended)
        if self._pool is None or not self._pool.usable:
            self._pool = Pool([f"splitpipe profile {row}" for row in range(self.rows)])
        with _default_threads():
            self._pool.share_threads(list(range(self.rows)))
            state = thread_state.capture()
            errors: list[BaseException] = []
            found: list[T] = []

            def first(ended: threading.Event) -> None:
                found.append(measured(ended))
                ended.set()

            def walk(part: Part[object]) -> None:
                try:
                    with thread_state.entered(state):
                        part(ended)
                except BaseException as error:
                    errors.append(error)
                    ended.set()

            parts = [partial(contextvars.copy_context().run, walk, part) for part in (first, *others)]
            self._pool.run(list(enumerate(parts)), lambda _: ended.set())
            raise_first(errors)
            return found[0]


@contextmanager
def _default_threads() -> Iterator[None]:
    """Threads yet to start have as many intra-op threads after the block as before it.

    Models that start their workers at once take each other's number for the default.
    """
    number = in_new_thread(torch.get_num_threads)
    try:
        yield
    finally:
        in_new_thread(partial(torch.set_num_threads, number))
