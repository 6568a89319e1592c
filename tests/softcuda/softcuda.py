"""Has torch's CUDA build find the fake runtime in place of CUDA, in a process of the environment.

A .pth file imports it before all else, from the folder that has the libraries (``libraries.build`` puts a copy there).
``SOFTCUDA=0`` leaves it out; ``SOFTCUDA_NUMBERS=0`` leaves torch its kernels, which do nothing.
"""
from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
RUNTIME = "libcudart.so.13"
OPS = "libsoftops.so"
#: Ops that keep torch's CUDA kernel: it makes a view, or asks the runtime; or ops.cpp has them itself.
KEPT = {
    "_conj_physical", "_efficientzerotensor", "_fused_sdp_choice", "_has_same_storage_numel", "_local_scalar_dense",
    "_nested_view_from_buffer", "_pin_memory", "_reshape_alias", "_sparse_semi_structured_linear", "_to_copy",
    "as_strided", "copy_", "empty.memory_format", "empty_strided", "is_pinned", "is_set_to", "native_dropout",
    "record_stream", "resize_", "resize_as_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "set_.source_Tensor", "unfold", "view", "view_as_complex", "view_as_real",
}
#: Ops without a kernel of their own on the CPU, or whose CUDA kernel is cuDNN's: ops.cpp has them.
ALSO = {
    "convolution", "convolution_backward", "native_dropout", "_fused_rms_norm_backward", "_thnn_fused_lstm_cell",
    "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward",
}


def hazards() -> list[str]:
    """Pairs of accesses that nothing orders, each with its count in front; SOFTCUDA_HAZARDS=1 looks for them."""
    return _lines(_runtime.softcuda_hazards)


def forget_hazards() -> None:
    """Forgets those found so far."""
    _runtime.softcuda_forget_hazards()


def log() -> None:
    """Empties the log of what streams are given, and keeps it from now on."""
    _runtime.softcuda_log()


def launches() -> list[str]:
    """The log: kind (op, copy, record, wait), device, stream, priority, event, multiplications, bytes, name of each.

    ``tests/devices/log.py`` reads them.
    """
    return _lines(_runtime.softcuda_launches)


def reads() -> tuple[int, int]:
    """Copies from pinned memory since the last call that nobody waited for when they began, and those still going on.

    Whoever writes to that memory then changes what is copied.
    """
    unread = ctypes.c_int()
    return int(_runtime.softcuda_reads(ctypes.byref(unread))), unread.value


def locked() -> int:
    """How many events were recorded, and waited for, by a thread that held the interpreter's lock meanwhile."""
    return int(_runtime.softcuda_locked())


def unbound() -> int:
    """Products that a thread began without a context of the device, which cuBLAS warns of."""
    return int(_runtime.softcuda_unbound())


def fail_at(number: int) -> None:
    """Has the allocation of this number, counted from the next one, raise torch.OutOfMemoryError; 0: none."""
    _ops.softops_fail_at(ctypes.c_uint64(number))


def asked() -> int:
    """How many allocations there were so far, on all devices."""
    return int(_ops.softops_asked())


def kernels() -> list[str]:
    """Torch's CUDA kernels that were launched, and so did nothing, each with its count in front."""
    return _lines(_runtime.softcuda_kernels)


def launched() -> int:
    """How many kernels of torch's were launched."""
    return int(_runtime.softcuda_launched())


def forget_kernels() -> None:
    """Starts ``kernels`` and ``launched`` again."""
    _runtime.softcuda_forget_kernels()


def _lines(call: Any) -> list[str]:
    size = call(None, ctypes.c_size_t(0)) + 1
    out = ctypes.create_string_buffer(size)
    call(out, ctypes.c_size_t(size))
    return out.value.decode().splitlines()


def _load() -> ctypes.CDLL:
    """Loads all of them: torch's libraries then find those by their names."""
    runtime = ctypes.CDLL(str(FOLDER / RUNTIME), ctypes.RTLD_GLOBAL)
    for name in "launched", "locked", "unbound":
        getattr(runtime, f"softcuda_{name}").restype = ctypes.c_long
    for name in "hazards", "kernels", "launches":
        getattr(runtime, f"softcuda_{name}").restype = ctypes.c_size_t
    for path in sorted(FOLDER.glob("*.so.*")):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    return runtime


def _after(torch: Any) -> None:
    """Leaves out what has no sibling on the CPU, and replaces the kernels."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("SOFTCUDA_NUMBERS", "1") == "0":
        return
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    every = [full.partition("::") for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")]
    names = [name for space, _, name in every if space == "aten" and name not in KEPT and has(f"aten::{name}", "CPU")]
    global _ops
    _ops = ctypes.CDLL(str(FOLDER / OPS), ctypes.RTLD_GLOBAL)
    _ops.softops_asked.restype = ctypes.c_uint64
    _ops.softops_replace("\n".join([*names, *sorted(ALSO)]).encode())


class _Finder(importlib.abc.MetaPathFinder):
    """Calls ``_after`` when torch has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _after(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if (FOLDER / RUNTIME).exists() and os.environ.get("SOFTCUDA", "1") != "0":
    _runtime = _load()
    sys.meta_path.insert(0, _Finder())
