"""The product of two matrices, by the faster of torch's kernels.

On a CPU torch multiplies float32 matrices by the BLAS it was built with, MKL mostly, whose kernels are slow on other
makers' processors: oneDNN, which torch has too, was seen to take 0.45 to 0.92 of the time there (benchmarks/README.md).
torch asks oneDNN only where a model is compiled or frozen, by an operator that autograd doesn't know. So it is asked
for here where nothing records: neither autograd, nor a dispatch mode (a counter of floating-point operations, say).
"""
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

#: Multiplications from which on oneDNN was seen to be faster.
_MANY = 2**23


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b"""
    return _onednn(a, b) if _by_onednn(a, b) else a.mm(b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place."""
    if _by_onednn(a, b):
        total.add_(_onednn(a, b))
    else:
        total.addmm_(a, b)


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return y


def _by_onednn(a: Tensor, b: Tensor) -> bool:
    return (
        a.numel() * b.shape[1] >= _MANY  # First, since it settles it for small ones.
        and a.dtype is torch.float32
        and b.dtype is torch.float32
        and a.device.type == "cpu"
        and _available()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_grad_enabled()
        and not torch._C._len_torch_dispatch_stack()
    )


@cache
def _available() -> bool:
    # Measured on x86 alone. On ARM torch multiplies by oneDNN anyway.
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
