"""Interrupts from other threads, each raised once in the main thread."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts(
    error: type[BaseException] = KeyboardInterrupt, number: int = signal.SIGINT
) -> Iterator[Callable[[], None]]:
    """A function that sends the signal until the main thread has raised the error, to be called in other threads.

    None arrives after the block. By then the process's own handler is back: it may end the process, silently.
    """
    armed, sending = threading.Event(), threading.Lock()

    def handle(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise error

    def send() -> None:
        with sending:
            armed.set()
            while armed.is_set():  # One that arrives just before the main thread blocks is noticed with the next.
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    before = signal.signal(number, handle)
    try:
        yield send
    finally:
        with sending:  # Whoever has seen that one was raised too few sends one too many.
            signal.signal(number, before)
