"""The gradient of one weight, summed over microbatches: in place as soon as the sum has its own memory."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.torch_private import _foreach_add_


class Total:
    """A growing sum of a weight's gradients. A given ``value`` belongs to the sum from now on.

    The first gradient's memory may be shared (a view of an output gradient): the sum refers to it, but writes nothing.
    """

    __slots__ = ("_owned", "value", "weight")

    def __init__(self, weight: Tensor, value: Tensor | None = None) -> None:
        self.weight, self.value, self._owned = weight, value, value is not None and value.layout is torch.strided

    def allocate(self) -> None:
        """Begins with zeros, on the current stream.

        A gradient outlives backward: in the weight stream's memory, activations could never use its place again.
        """
        if self.value is None and type(self.weight.data) is Tensor and self.weight.layout is torch.strided:
            self.value, self._owned = torch.zeros_like(self.weight), True

    def add(self, grad: Tensor | None, fresh: bool = False) -> None:
        """Adds a gradient that has or expands to the weight's shape; ``fresh``: its memory isn't shared."""
        if grad is None:
            return
        if grad.shape != self.weight.shape:
            grad = grad.sum_to_size(self.weight.shape)
        plain = grad.layout is torch.strided
        if self.value is None:
            self.value = grad.to(self.weight.dtype)
            self._owned = plain and (fresh or self.value is not grad)
        elif self.adds_in_place(grad):
            self.value.add_(grad)
        else:  # A dense sum accepts a sparse summand, but a sparse sum doesn't accept a dense one.
            self.value = grad + self.value if plain else self.value + grad
            self._owned = self.value.layout is torch.strided

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the product of two matrices, in a single kernel."""
        if self.value is not None and a.dtype is self.weight.dtype and self.adds_in_place(a):
            self.value.addmm_(a, b)
        else:
            self.add(a.mm(b), fresh=True)

    def adds_in_place(self, grad: Tensor) -> bool:
        """True if a gradient would be added to memory that the sum has for itself."""
        # Not to a subclass, as in autograd: a DTensor that is written to would keep its placement, whatever is added.
        return self._owned and type(self.value) is Tensor and grad.layout is torch.strided

    def scaled(self, factor: Tensor, in_place: bool) -> Tensor:
        """The sum times a number on its device; ``in_place``: the sum itself may be written to and given away."""
        assert self.value is not None
        return self.value.mul_(factor) if in_place and self._owned else self.value * factor


class Sums:
    """The sums of one stage. Only one thread at a time may add."""

    def __init__(self) -> None:
        self._sums: dict[int, Total] = {}

    def of(self, weight: Tensor) -> Total:
        """The growing sum of a tensor."""
        total = self._sums.get(id(weight))
        if total is None:
            total = self._sums[id(weight)] = Total(weight)
        return total

    def add(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds weights' gradients from autograd, with the same shapes and dtypes; no weight occurs twice.

        Most in one call: a model may have hundreds of weights, most of them tiny.
        """
        values: list[Any] = []
        grads: list[Tensor] = []
        for weight, grad in pairs:
            total = self.of(weight)
            if type(grad) is Tensor and total.adds_in_place(grad):
                values.append(total.value)
                grads.append(grad)
            else:
                total.add(grad)
        if values:
            _foreach_add_(values, grads)

    def take(self, weight: Tensor) -> Tensor | None:
        """Removes and returns the sum of a tensor; None if it has no gradient."""
        total = self._sums.pop(id(weight), None)
        return None if total is None else total.value

    def __iter__(self) -> Iterator[Total]:
        """The sums that aren't empty."""
        return (total for total in self._sums.values() if total.value is not None)
