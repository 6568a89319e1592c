"""The process's default generator, lent to one thread at a time with a state of its own.

Guarantee: outside of the lock the default generator holds the state that the caller left in it. What would break it:
a swap without the lock, since the second of two threads would put back the first one's state.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar

import torch
from torch import Tensor


class Gate:
    """A lock of the process, as on its default generator; a child of a fork gets one that nobody holds.

    It is reentrant: a layer that differentiates inside a checkpointed forward recomputes under the lock it holds.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def renew(self) -> None:
        self.lock = threading.RLock()


def gate() -> Gate:
    """A gate to be kept in a module: a child of a fork renews it."""
    made = Gate()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=made.renew)
    return made


#: Seconds that a stage waits for its turn to draw, so that a layer in its own way is an error and no hang.
_PATIENCE = 600.0

_gate = gate()

# A stage that runs alone may be a pipeline itself. Its workers must not wait for the lock that is held for them.
_inner: ContextVar[Gate | None] = ContextVar("splitpipe.turn", default=None)


def share(context: Context) -> None:
    """Has this context draw in the turn that another one has, whose thread waits for this one meanwhile."""
    _inner.set(context.get(_inner))


@contextmanager
def own_state(state: Tensor) -> Iterator[None]:
    """Gives the default generator a state inside the block; nobody else draws meanwhile."""
    lock = (_inner.get() or _gate).lock
    if not lock.acquire(timeout=_PATIENCE):
        raise RuntimeError(
            f"waited {_PATIENCE:.0f} s for another stage that draws random numbers alone. If a layer there waits for a "
            "pipeline that it runs in a thread of its own, start that thread with the layer's context "
            "(contextvars.copy_context().run), or draw nothing in it."
        )
    try:
        kept = torch.default_generator.get_state()
        token = _inner.set(Gate())
        try:
            torch.default_generator.set_state(state)
            yield
        finally:
            torch.default_generator.set_state(kept)
            _inner.reset(token)
    finally:
        lock.release()
