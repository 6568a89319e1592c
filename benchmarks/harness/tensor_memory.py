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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

#: Where C++ has it. It takes nothing and gives nothing.
_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_JOIN = "_ZN5torch8autograd8profiler27enableProfilerInChildThreadEv"


@dataclass(frozen=True)
class Allocation:
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


def peaks(
    step: Callable[[], object], prepare: Callable[[], object], passes: int, device: str = "cpu"
) -> list[dict[str, int]]:
    """The most bytes that each of so many steps takes beyond those before it, by device.

    One step more comes before them: it starts the threads that stay, and leaves what a step leaves for the next one.

    Args:
        step: to count; of a model that was not called yet, in a process in which no other threads run.
        prepare: called before each step, and not counted.
        passes: number of steps.
        device: type of the devices, "cpu" or "cuda".

    Raises:
        RuntimeError: a thread that runs already may allocate what is not noted.
        OSError: this torch lets no thread join.

    Example:
        >>> peaks(lambda: torch.empty(1000).exp().neg(), lambda: None, passes=2)
        [{'cpu': 8000}, {'cpu': 8000}]
    """
    if device == "cuda":
        return [_on_cuda(step, prepare) for _ in range(1 + passes)][1:]
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    marks, blocks = [], list[Allocation]()
    with watched(blocks):
        for _ in range(1 + passes):
            prepare()
            first = torch.empty(1)
            step()
            marks.append((first, torch.empty(1)))
    unseen = [thread.name for thread in others if thread.is_alive()]
    if unseen:
        raise RuntimeError(f"found other threads, {unseen}; expected a process in which nothing has run.")
    return [{"cpu": highest(blocks, first.data_ptr(), last.data_ptr())} for first, last in marks[1:]]


@contextmanager
def watched(blocks: list[Allocation]) -> Iterator[None]:
    """Adds the blocks of this thread and of those that start inside, in order of time, when it ends.

    Raises:
        OSError: this torch lets no thread join.
    """
    join = _join()
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
        yield
    finally:
        threading.setprofile(others)
        with lock:
            open_ = False
            profile = _disable_profiler()
        blocks.extend(_blocks(profile.experimental_event_tree()))


def highest(blocks: Sequence[Allocation], first: int, last: int) -> int:
    """The most bytes that are out at a time, beyond those that are out at its start.

    Args:
        blocks: of all threads, in order of time.
        first: address of the block that was handed out at the start, and held.
        last: of the one that was handed out at the end.

    Example:
        >>> events = (0, 1, 4, 100), (1, 2, 50, 150), (2, 2, -50, 100), (3, 3, 4, 104)
        >>> highest([Allocation(*event) for event in events], first=1, last=3)
        50
    """
    start, end = _last(blocks, first), _last(blocks, last)
    return max(block.out - blocks[start].out for block in blocks[start:end])


def _last(blocks: Sequence[Allocation], address: int) -> int:
    """The index of the last block at an address; earlier ones at it may be others."""
    return max(number for number, block in enumerate(blocks) if block.address == address and block.size > 0)


def _blocks(tree: Sequence[Any]) -> list[Allocation]:
    blocks, stack = [], list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        its = event.extra_fields
        if event.tag.name == "Allocation" and its.device.type == "cpu":
            blocks.append(Allocation(event.start_time_ns, its.ptr, its.alloc_size, its.total_allocated))
    return sorted(blocks, key=lambda block: block.time)


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
    raise OSError(f"torch {torch.__version__} has no function by which a thread joins its profiler: expected {_JOIN} "
                  f"in one of {', '.join(_LIBRARIES)}. Count on another system.")


def _on_cuda(step: Callable[[], object], prepare: Callable[[], object]) -> dict[str, int]:
    """By the allocator's own counter, which knows all threads."""
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
    return {f"cuda:{device}": torch.cuda.max_memory_allocated(device) - before[device] for device in devices}
