"""A simulated accelerator: the CPU's memory and kernels behind devices, streams and events, which are logged.

Torch's own autograd engine handles its streams, and whoever asks torch.accelerator finds it there. Work is done when
it is launched; when streams would have done it is what ``simdev.replay`` finds out from the log, in virtual time.

A process that has it keeps it, in place of any other accelerator: tests start one of their own.
"""
from __future__ import annotations

import ctypes
import json
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import classes
from .build import NoCompiler, library

__all__ = [
    "Launch", "NoCompiler", "Piece", "allocated", "asked", "contexts", "fail_at", "forget", "launched", "launches",
    "library", "locked", "most_allocated", "set_pool", "start", "unbound",
]


class Piece(NamedTuple):
    """Bytes of a block of memory, from the first to one past the last."""

    block: int
    first: int
    last: int


class Launch(NamedTuple):
    """One entry of the log: what a stream was given, in the order in which the host gave it.

    Attributes:
        kind: an op of the device, a copy to another device, a record of an event, or a wait for one; "sync", "sync
            device" and "sync event": the host waits for a stream, a device, an event; "alloc" and "free" of memory, and
            "keep": the stream has work with it (``record_stream``).
        device: that the stream is of.
        stream: its number; 0 is the device's default stream.
        priority: of the stream; lower ones first.
        event: of a record and of its waits, the number of that record.
        name: of the op.
        multiplications: of a matrix product or a convolution; 0 for other ops.
        bytes: that a copy moves.
        reads: the memory that an op or a copy reads.
        writes: that it writes to; of "alloc", "free" and "keep": the block.
    """

    kind: Literal["op", "copy", "record", "wait", "sync", "sync device", "sync event", "alloc", "free", "keep"]
    device: int
    stream: int
    priority: int
    event: int
    name: str
    multiplications: float
    bytes: int
    reads: tuple[Piece, ...] = ()
    writes: tuple[Piece, ...] = ()


_KINDS: dict[str, Any] = {
    "o": "op", "c": "copy", "r": "record", "w": "wait", "s": "sync", "d": "sync device", "e": "sync event",
    "a": "alloc", "f": "free", "k": "keep",
}
#: Bytes of each device.
TOTAL = 2**40
_started: list[ctypes.CDLL] = []


def start(devices: int) -> None:
    """Makes so many devices this process's accelerators: sim:0 and so on. Once a process.

    Raises:
        NoCompiler: there is nothing to build it with.
        RuntimeError: it was started before, or does not compile.
    """
    if _started:
        raise RuntimeError("simulated devices were started before in this process: expected one start(devices)")
    loaded = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    loaded.sim_launches.restype = loaded.sim_contexts.restype = loaded.sim_unbound.restype = ctypes.c_char_p
    loaded.sim_allocated.restype = loaded.sim_most_allocated.restype = loaded.sim_launched.restype = ctypes.c_size_t
    loaded.sim_random_size.restype = loaded.sim_locked.restype = loaded.sim_cached.restype = ctypes.c_size_t
    loaded.sim_asked.restype = ctypes.c_uint64
    loaded.sim_start(devices)
    torch.utils.rename_privateuse1_backend("sim")
    torch.set_warn_always(True)  # Not once a process: every run is told.
    module = _module(devices)
    classes.install(module, loaded)
    torch._register_device_module("sim", module)
    _started.append(loaded)


def _module(devices: int) -> ModuleType:
    """What torch asks of torch.sim. There is more memory than the CPU has."""
    module: Any = ModuleType("torch.sim")
    module.is_available = lambda: True
    module.device_count = lambda: devices
    module.current_device = torch.accelerator.current_device_index
    module.device = lambda device: torch.accelerator.device_index(_number(device))
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = _seed
    module.get_rng_state = _random_state
    module.set_rng_state = _set_random_state
    module.get_device_properties = lambda device=None: SimpleNamespace(total_memory=TOTAL)
    module.memory_allocated = lambda device=None: allocated(_number(device))
    module.max_memory_allocated = lambda device=None: most_allocated(_number(device))
    module.reset_peak_memory_stats = lambda device=None: _started[0].sim_reset_peaks(_number(device))
    module.memory_reserved = lambda device=None: int(_started[0].sim_cached(_number(device)))
    module.mem_get_info = lambda device=None: (TOTAL - module.memory_reserved(device), TOTAL)
    return module


def _seed(seed: int) -> None:
    for device in range(torch.accelerator.device_count()):
        _started[0].sim_seed(device, ctypes.c_uint64(seed))


def _number(device: Any) -> int:
    found = torch.device("sim" if device is None else device).index if not isinstance(device, int) else device
    return torch.accelerator.current_device_index() if found is None else found


def _random_state(device: Any = None) -> Tensor:
    state = torch.empty(_started[0].sim_random_size(), dtype=torch.uint8)
    _started[0].sim_get_random(_number(device), ctypes.c_void_p(state.data_ptr()))
    return state


def _set_random_state(state: Tensor, device: Any = None) -> None:
    _started[0].sim_set_random(_number(device), ctypes.c_void_p(state.contiguous().data_ptr()))


def launches() -> list[Launch]:
    """The log since the last ``forget``."""
    return [
        Launch(_KINDS[kind], *numbers_and_name, _pieces(reads), _pieces(writes))
        for kind, *numbers_and_name, reads, writes in json.loads(_started[0].sim_launches())
    ]


def launched() -> int:
    """How many launches the log has."""
    return int(_started[0].sim_launched())


def _pieces(them: list[list[int]]) -> tuple[Piece, ...]:
    return tuple([Piece._make(each) for each in them])


def contexts() -> list[tuple[int, str, str]]:
    """Who made the primary contexts of devices: the device, a call of the runtime, and the thread's name."""
    return [(device, call, thread) for device, call, thread in json.loads(_started[0].sim_contexts())]


def unbound() -> list[str]:
    """Products that a thread began without a context of the device, which cuBLAS warns of."""
    return [str(each) for each in json.loads(_started[0].sim_unbound())]


def locked() -> int:
    """How many events were recorded, and waited for, by a thread that held the interpreter's lock meanwhile."""
    return int(_started[0].sim_locked())


def set_pool(size: int) -> None:
    """Has each device hand out so many streams of a priority, and then the same ones again; 32 at first, as CUDA's."""
    _started[0].sim_set_pool(size)


def forget() -> None:
    """Empties the log, and has ``most_allocated`` start again."""
    _started[0].sim_forget()


def allocated(device: int) -> int:
    """Bytes that tensors of the device have."""
    return int(_started[0].sim_allocated(device))


def most_allocated(device: int) -> int:
    """Bytes that tensors of the device had at most since the last ``forget``, in the order of the host's doings."""
    return int(_started[0].sim_most_allocated(device))


def fail_at(number: int) -> None:
    """Has an allocation raise torch.OutOfMemoryError: that of this number, counted from the next one; 0: none."""
    _started[0].sim_fail_at(ctypes.c_uint64(number))


def asked() -> int:
    """How many allocations there were so far, on all devices."""
    return int(_started[0].sim_asked())
