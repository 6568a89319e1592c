"""The gradient of one weight, summed over calls: in place as soon as the sum is its own tensor."""
from __future__ import annotations

import torch
from torch import Tensor


class Total:
    """A sum that grows.

    What is added first may be anybody's (a view of an output gradient, say), so the sum takes its place and does not
    write to it. Where autograd records (``create_graph=True``), nothing is written in place.

    Args:
        dtype: of the weight, and of the sum.
    """

    __slots__ = ("_owned", "dtype", "value")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._owned = False
        self.value: Tensor | None = None

    def add(self, grad: Tensor | None) -> None:
        """Adds a gradient of the weight's shape."""
        if grad is None:
            return
        if self.value is None:
            self.value = grad.to(self.dtype)
            self._owned = self.value is not grad
        elif self._in_place(grad):
            self.value.add_(grad)
        else:
            self.value = self.value + grad
            self._owned = True

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the product of two matrices, by one kernel."""
        if self.value is None:
            self.value = a.mm(b).to(self.dtype)
            self._owned = True
        elif self._in_place(a) and a.dtype == self.dtype:
            self.value.addmm_(a, b)
        else:
            self.add(a.mm(b))

    def _in_place(self, grad: Tensor) -> bool:
        return self._owned and not torch.is_grad_enabled() and grad.layout is torch.strided
