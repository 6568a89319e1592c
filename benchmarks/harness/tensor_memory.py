"""Bytes that torch's tensors take at most in a step, by the allocator's own events, in all threads of the process.

On the CPU torch has no counter. Its profiler notes every block that the allocator hands out or takes back, with the sum
of those that are out, but only in the thread that has started it. Other threads may join, by a function that C++ alone
is given (``enableProfilerInChildThread``); here each one does as it starts. Memory that oneDNN or the system's
libraries ask for themselves is none of torch's, and not counted.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler, _profiler_enabled
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

#: Where C++ has them. Each takes nothing and gives nothing.
_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_JOIN = "_ZN5torch8autograd8profiler27enableProfilerInChildThreadEv"


@dataclass(frozen=True)
class Peak:
    """The most bytes of a step's tensors, beyond those that are there before it.

    Attributes:
        devices: bytes, by device.
    """

    devices: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all devices together, each at its own most."""
        return sum(self.devices.values())


@dataclass(frozen=True)
class Block:
    """The allocator hands out a block of memory, or takes one back.

    Attributes:
        time: in nanoseconds.
        address: of the block.
        size: in bytes; below zero if it is taken back.
        out: bytes of all blocks that are out after that.
    """

    time: int
    address: int
    size: int
    out: int


@dataclass
class Watch:
    """The allocations of a block of code.

    Attributes:
        blocks: of all threads, in order of time; empty before the end.
    """

    blocks: list[Block] = field(default_factory=list)
    _old: list[threading.Thread] = field(default_factory=threading.enumerate)

    def unseen(self) -> list[str]:
        """The names of other threads that started before, and may allocate what is not noted."""
        me = threading.current_thread()
        return [thread.name for thread in self._old if thread is not me and thread.is_alive()]


def peak(
    step: Callable[[], object],
    *,
    prepare: Callable[[], object] = lambda: None,
    warm_up: int = 2,
    device: str = "cpu",
) -> Peak:
    """Counts the last of a few steps.

    A block that was handed out earlier is not missed when it is taken back, and a thread that started earlier is not
    seen. So the steps before the one that counts are watched as well: threads that stay start in the first of them,
    and what a step leaves for the next one to free is known.

    Args:
        step: what to count.
        prepare: called before each step, and not counted.
        warm_up: number of steps before the one that counts.
        device: type of the devices, "cpu" or "cuda".

    Raises:
        RuntimeError: a profiler runs already, or other threads started before the first step.
        OSError: this torch lets no thread join.

    Example:
        >>> peak(lambda: torch.empty(1000).exp().neg()).total
        8000
    """
    if device == "cuda":
        return _on_cuda(step, prepare, warm_up)
    with watched() as watch:
        for _ in range(warm_up):
            prepare()
            step()
        prepare()
        before = torch.empty(1)
        step()
        after = torch.empty(1)
        unseen = watch.unseen()
    if unseen:
        raise RuntimeError(
            f"other threads started before the first step, and what they allocate is not seen: found {unseen}. "
            "Expected none: give peak a model that was not called yet, in a process of its own."
        )
    return Peak({"cpu": highest(watch.blocks, before.data_ptr(), after.data_ptr())})


@contextmanager
def watched() -> Iterator[Watch]:
    """Notes the blocks of this thread and of those that start inside; the others' neither now nor later.

    Raises:
        RuntimeError: a profiler runs already.
        OSError: this torch lets no thread join.
    """
    join = _join()
    if _profiler_enabled():
        raise RuntimeError("a profiler runs already, and there can be but one: expected none around this.")
    watch = Watch()
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _prepare_profiler(config, {ProfilerActivity.CPU})
    # With a scope that nothing here has, no operator is noted, and blocks are.
    _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.CUSTOM_CLASS})  # type: ignore[call-arg]
    others, lock, open_ = threading.getprofile(), threading.Lock(), True

    def start(*_: object) -> None:
        # Called in a thread, before all that it runs.
        sys.setprofile(others)
        with lock:
            if open_:
                join()

    threading.setprofile(start)
    try:
        yield watch
    finally:
        threading.setprofile(others)
        with lock:
            open_ = False
            found = _disable_profiler()
        watch.blocks.extend(_blocks(found.experimental_event_tree()))


def highest(blocks: Sequence[Block], first: int, last: int) -> int:
    """The most bytes that are out at a time, beyond those that are out at its start.

    Args:
        blocks: of all threads, in order of time.
        first: address of the block that was handed out at the start, and held.
        last: of the one that was handed out at the end.

    Example:
        >>> blocks = [Block(0, 1, 4, 100), Block(1, 2, 50, 150), Block(2, 2, -50, 100), Block(3, 3, 4, 104)]
        >>> highest(blocks, first=1, last=3)
        50
    """
    start, end = _last(blocks, first), _last(blocks, last)
    return max(block.out - blocks[start].out for block in blocks[start:end])


def _last(blocks: Sequence[Block], address: int) -> int:
    """The index of the last block at an address; earlier ones at it may be others."""
    return max(number for number, block in enumerate(blocks) if block.address == address and block.size > 0)


def _blocks(tree: Sequence[Any]) -> list[Block]:
    found, stack = [], list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        its = event.extra_fields
        if event.tag.name == "Allocation" and its.device.type == "cpu":
            found.append(Block(event.start_time_ns, its.ptr, its.alloc_size, its.total_allocated))
    return sorted(found, key=lambda block: block.time)


@cache
def _join() -> Callable[[], object]:
    """The function that has its thread join the profiler."""
    for library in _LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / library
        if path.exists():
            join = getattr(ctypes.CDLL(str(path)), _JOIN, None)
            if join is not None:
                join.restype = None
                return join  # type: ignore[no-any-return]
    raise OSError(
        f"torch {torch.__version__} has no function by which a thread joins its profiler: expected {_JOIN} in one of "
        f"{', '.join(_LIBRARIES)}. Count resident memory instead (measure.growth), or on another system."
    )


def _on_cuda(step: Callable[[], object], prepare: Callable[[], object], warm_up: int) -> Peak:
    """By the allocator's own counter, which knows all threads."""
    for _ in range(warm_up):
        prepare()
        step()
    prepare()
    gc.collect()
    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = [torch.cuda.memory_allocated(device) for device in devices]
    step()
    for device in devices:
        torch.cuda.synchronize(device)
    most = [torch.cuda.max_memory_allocated(device) for device in devices]
    return Peak({f"cuda:{device}": most[device] - before[device] for device in devices})
