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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
RUNTIME = "libcudart.so.13"
OPS = "libsoftops.so"
#: Ops that keep torch's CUDA kernel: it makes a view, or asks the runtime; or ops.cpp has them itself.
KEPT = {
    "_conj_physical", "_efficientzerotensor", "_fused_rms_norm", "_fused_sdp_choice", "_has_same_storage_numel",
    "_local_scalar_dense", "_nested_view_from_buffer", "_pin_memory", "_reshape_alias",
    "_sparse_semi_structured_linear", "_to_copy", "as_strided", "copy_", "empty.memory_format", "empty_strided",
    "is_pinned", "is_set_to", "native_dropout", "record_stream", "resize_", "resize_as_", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "unfold", "view", "view_as_complex", "view_as_real",
}
#: Ops whose CUDA kernel is cuDNN's.
ALSO = "convolution", "convolution_backward"


#: Functions of this module that ask the runtime or tell it something, and what each returns: of a text the lines.
FUNCTIONS: dict[str, Any] = {
    "hazards": ctypes.c_char_p,  # Pairs of accesses that nothing orders, each with its count in front.
    "forget_hazards": None,
    "log": None,  # Empties the log of what streams are given, and keeps it from now on.
    "launches": ctypes.c_char_p,  # The log, as tests/devices/log.py reads it.
    "reads": ctypes.c_char_p,  # Of each copy from pinned memory since the last call: "done", or still "reading".
    "locked": ctypes.c_long,  # Events recorded, and waited for, by a thread that had the interpreter's lock meanwhile.
    "unbound": ctypes.c_long,  # Products that a thread began without a context of the device: cuBLAS warns of them.
    "kernels": ctypes.c_char_p,  # Torch's CUDA kernels that were launched, and did nothing, each with its count.
    "launched": ctypes.c_long,  # How many.
    "forget_kernels": None,
}


def fail_at(number: int) -> int:
    """Has the allocation of this number, counted from the next one, raise torch.OutOfMemoryError; 0: none.

    How many there were so far, on all devices.
    """
    return int(_ops.softops_fail_at(ctypes.c_uint64(number)))


def _function(name: str) -> Callable[[], Any]:
    call: Any = getattr(_runtime, f"softcuda_{name}")
    call.restype = FUNCTIONS[name]
    return (lambda: call().decode().splitlines()) if call.restype is ctypes.c_char_p else call


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
    _ops.softops_fail_at.restype = ctypes.c_uint64
    _ops.softops_replace("\n".join([*names, *ALSO]).encode())


class _Finder(importlib.abc.MetaPathFinder):
    """Calls ``_after`` when torch has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), _after(module))
        return spec


if (FOLDER / RUNTIME).exists() and os.environ.get("SOFTCUDA", "1") != "0":
    _runtime = ctypes.CDLL(str(FOLDER / RUNTIME), ctypes.RTLD_GLOBAL)
    for other in sorted(FOLDER.glob("*.so.*")):  # Torch's libraries then find them by their names.
        ctypes.CDLL(str(other), ctypes.RTLD_GLOBAL)
    globals().update({name: _function(name) for name in FUNCTIONS})
    sys.meta_path.insert(0, _Finder())
