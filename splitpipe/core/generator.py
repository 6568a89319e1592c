"""The process's default generator: seeds made from it, and its exclusive use by one thread with a separate state.

Guarantee: outside the lock, the default generator has the state in which the caller left it. A swap without the lock
would break it, since the second of two threads would restore the first one's state.

``torch.utils.checkpoint`` makes such a swap itself when it recomputes. So the first recomputation in a B takes the
lock, and B keeps it to its end: stages that draw wait, others continue. Then the state is restored. This only concerns
the CPU's generator: an accelerator's is used by a single worker.

Guarantee: two threads of a model never ask for a generator's state at the same time. For this, torch takes the
generator's mutex while it has the GIL, and makes a tensor. There, Python 3.10 and 3.11 may collect garbage, and freeing
a tensor releases the GIL for a moment. A second thread that asked then would wait for the mutex forever, with the GIL.
``get_state`` and ``set_state`` of a shared generator anywhere else would break it.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import string_at
from sys import _current_frames as frames_of_threads
from typing import Any

import torch
from torch import Generator, Tensor

from splitpipe.core.thread_state import unobserved
from splitpipe.core.torch_private import (
    _get_graph_exec_group,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _set_graph_exec_group,
)
from splitpipe.core.worker import ProcessLock


class _Lock:
    """Reentrant, and released by any thread: autograd's acquires it, and the worker that waited for it releases it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self.changes = 0  # Counts changes of its owner: odd while it has one.

    def acquire(self, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self._owner != me:
            if not self._lock.acquire(timeout=timeout):
                return False
            self._owner = me
            self.changes += 1
        self._depth += 1
        return True

    @property
    def place(self) -> tuple[int | None, int, int]:
        """Where the owner is in its code."""
        owner = self._owner
        frame = None if owner is None else frames_of_threads().get(owner)
        return owner, id(frame), -1 if frame is None else frame.f_lasti

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self.changes += 1
            self._lock.release()


#: Seconds that a stage waits to draw for another one that makes no progress, so that a layer that waits for itself is
#: an error rather than a hang. A stage that is slow, or compiles, is waited for.
LOCK_TIMEOUT = 600.0

# Reentrant: a layer that differentiates inside a checkpointed forward recomputes under the lock it holds.
_process_lock = ProcessLock(_Lock)

# A stage that runs alone may itself be a pipeline. Its workers must not wait for the lock that is held for them.
_inner: ContextVar[_Inside | LockOnRecompute | None] = ContextVar("splitpipe.generator", default=None)


_states = ProcessLock()


def state_lock() -> Any:
    """The lock under which to ask for generators' states."""
    return _states.lock


def state_of(generator: Generator | None = None) -> Tensor:
    """The state of a generator that other threads may use; by default, the process's."""
    with _states.lock:
        return (torch.default_generator if generator is None else generator).get_state()


def set_state(state: Tensor, generator: Generator | None = None) -> None:
    """Sets the state of a generator; by default, the process's."""
    with _states.lock:
        (torch.default_generator if generator is None else generator).set_state(state)


def lock_here() -> Any:
    """The lock that this context draws under; None: the process's."""
    return _inner.get()


def inherit_lock(lock: Any) -> None:
    """Lets this context draw under the lock of another one, whose thread waits for this one meanwhile."""
    _inner.set(lock)


class _Inside:
    """The lock for code inside a block that has the generator; for the block's contexts after it, the outer one."""

    __slots__ = ("_outer", "_own")

    def __init__(self, outer: ProcessLock | _Inside | LockOnRecompute) -> None:
        self._outer = outer
        self._own: ProcessLock | None = ProcessLock(_Lock)

    @property
    def lock(self) -> Any:
        """The lock to take now."""
        own = self._own
        return (self._outer if own is None else own).lock

    def end(self) -> None:
        """Ends the block: a context that was copied in it for a recomputation no longer has the generator to itself."""
        self._own = None


@contextmanager
def exclusive_generator(state: Tensor) -> Iterator[None]:
    """Sets the default generator to a state inside the block, in which no other stage draws."""
    outer = _inner.get() or _process_lock
    lock = outer.lock
    _acquire(lock)
    try:
        kept, inside = state_of(), _Inside(outer)
        token = _inner.set(inside)
        try:
            set_state(state)
            yield
        finally:
            inside.end()
            set_state(kept)
            _inner.reset(token)
    finally:
        lock.release()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Prevents other stages from drawing in the block, for code that restores the default generator's state."""
    outer = _inner.get() or _process_lock
    lock = outer.lock
    _acquire(lock)
    try:
        inside = _Inside(outer)
        token = _inner.set(inside)  # For a pipeline inside the block, whose workers are other threads.
        try:
            yield
        finally:
            inside.end()
            _inner.reset(token)
    finally:
        lock.release()


def _acquire(lock: Any) -> None:
    if lock.acquire(timeout=0):
        return
    place = lock.place
    while not lock.acquire(timeout=LOCK_TIMEOUT):
        before, place = place, lock.place
        if place != before:
            continue
        raise RuntimeError(
            f"waited {LOCK_TIMEOUT:.0f} s for another stage that draws random numbers. If a layer there waits "
            "for a pipeline that it runs in a separate thread, start that thread with the layer's context "
            "(contextvars.copy_context().run), or draw nothing in it."
        )


#: The default generator while its lock has no owner: its state, the lock, and how often the owner has changed.
Observation = tuple[Tensor, Any, int]


def observe() -> Observation | None:
    """Observes the default generator; None while its lock has an owner."""
    lock = (_inner.get() or _process_lock).lock
    changes = lock.changes
    with _states.lock:
        state = torch.default_generator.get_state()
    return None if changes % 2 or lock.changes != changes else (state, lock, changes)


def has_drawn(before: Observation | None, after: Observation | None) -> bool | None:
    """Whether the default generator has drawn; None if another context owned it meanwhile."""
    if before is None or after is None or before[1:] != after[1:]:
        return None
    return states_differ(before[0], after[0])


def has_moved(state: Tensor) -> bool:
    """True if the default generator has drawn since it had this state."""
    return states_differ(state, state_of())


def states_differ(state: Tensor, other: Tensor) -> bool:
    """True if two states of generators differ."""
    if _len_torch_function_stack() or _len_torch_dispatch_stack():
        with unobserved():
            return not torch.equal(state, other)
    # Not with torch's ops, which release Python's lock: a checkpointed block comes here twice.
    return string_at(state.data_ptr(), state.nbytes) != string_at(other.data_ptr(), other.nbytes)


@contextmanager
def lock_on_recompute(begin: Callable[[], None]) -> Iterator[None]:
    """Around a backward pass: if ``torch.utils.checkpoint`` recomputes in it, calls ``begin`` under the lock."""
    one = LockOnRecompute(_inner.get() or _process_lock, begin)
    token = _inner.set(one)
    before = _get_graph_exec_group()
    try:
        _set_graph_exec_group(one)  # type: ignore[arg-type]
        yield
    finally:
        _set_graph_exec_group(before)
        one.end()
        _inner.reset(token)


class LockOnRecompute:
    """Takes the lock as soon as ``torch.utils.checkpoint`` recomputes in a backward pass, for the rest of the pass."""

    # Before it recomputes, torch.utils.checkpoint looks up whether it has already done so, in a dict whose key is the
    # thread's GraphExecGroup. Autograd passes the group to its threads. This object is set as the group, so the look-up
    # calls its ``__hash__``, in whichever thread recomputes, and that takes the lock.

    def __init__(self, outer: ProcessLock | _Inside | LockOnRecompute, begin: Callable[[], None]) -> None:
        self._outer = outer
        self._begin = begin
        self._inside = _Lock()
        self._taking = threading.Lock()
        self._over = False
        self._taken: Any = None
        self._kept: Tensor | None = None

    @property
    def lock(self) -> Any:
        """The lock that calls inside this one take to draw."""
        return self._outer.lock if self._taken is None else self._inside

    def __hash__(self) -> int:
        self._take()
        return id(self)

    def _take(self) -> None:
        # Autograd's thread keeps this object in its context after the pass; `lock` is the process's lock then.
        if _inner.get() is not self:
            _inner.set(self)
        if self._taken is not None:
            return
        with self._taking:  # A stage with nodes on the CPU and on its device has two threads.
            if self._taken is not None or self._over:
                return
            lock = self._outer.lock
            _acquire(lock)
            self._kept, self._taken = state_of(), lock
        self._begin()

    def end(self) -> None:
        """Ends the pass."""
        with self._taking:
            self._over = True
            held, kept = self._taken, self._kept
            self._taken, self._kept, self._outer = None, None, _process_lock
        if held is not None and kept is not None:
            try:
                set_state(kept)
            finally:
                held.release()


class Seeds:
    """The seeds of one call, made from one number of the default generator, which advances only if something drew.

    ``doubts``: called if a stage may draw that isn't known to.
    """

    def __init__(self, stages: int, microbatches: int, doubts: Callable[[], None] = lambda: None) -> None:
        self._before = state_of()
        self.doubts = doubts
        self._sizes = stages, microbatches
        self._seeds: list[int] = []
        self.drew = False

    def of(self, stage: int, microbatch: int) -> int:
        """The seed of one microbatch on one stage. Two threads that ask at the same time get the same ones."""
        stages, microbatches = self._sizes
        if not self._seeds:
            generator = Generator()
            generator.set_state(self._before)
            with unobserved():
                # If they were drawn one by one from the default generator, the next call's seeds would be these,
                # shifted.
                generator.manual_seed(int(torch.randint(2**62, (), generator=generator, device="cpu")))
                count = max(1, stages * microbatches)
                self._seeds = torch.randint(2**62, (count,), generator=generator, device="cpu").tolist()
        return self._seeds[stage * microbatches + microbatch]

    @property
    def untouched(self) -> bool:
        """True if nothing has drawn from the default generator. Must be called under its lock, or between calls."""
        return not states_differ(self._before, state_of())

    def settle(self) -> bool:
        """Advances the default generator if something drew; returns False if that generator was used directly."""
        untouched = self.untouched
        if self.drew:
            with unobserved():
                torch.randint(2**62, (), generator=torch.default_generator, device="cpu")
        return untouched
