"""The gradient of one weight, summed over microbatches: in place as soon as the sum has its own memory."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from splitpipe.core.torch_private import _foreach_add, _foreach_add_


class Total:
    """A growing sum, with the shape and dtype of a weight. A given ``value`` belongs to the sum from now on.

    The first gradient's memory may be shared (a view of an output gradient): the sum refers to it, but writes nothing.
    """

    __slots__ = ("_memory", "_owned", "_shape", "dtype", "value")

    def __init__(self, like: Tensor, value: Tensor | None = None) -> None:
        self.dtype = like.dtype
        self._shape = like.shape
        self.value = value
        self._owned = value is not None and value.layout is torch.strided
        self._memory: Tensor | None = None  # For the first gradient.

    def allocate(self, weight: Tensor) -> None:
        """Allocates memory for the first gradient, on the current stream.

        A gradient outlives backward: in the weight stream's memory, activations could never use its place again.
        """
        if self.value is None and type(weight.data) is Tensor and weight.layout is torch.strided:
            self._memory = torch.empty_like(weight)

    def add(self, grad: Tensor | None, fresh: bool = False) -> None:
        """Adds a gradient that has or expands to the weight's shape; ``fresh``: its memory isn't shared."""
        if grad is None:
            return
        if grad.shape != self._shape:
            grad = grad.sum_to_size(self._shape)
        plain = grad.layout is torch.strided
        if self.value is not None:
            if self._in_place(grad):
                self.value.add_(grad)
                return
            # A dense sum accepts a sparse summand, but a sparse sum doesn't accept a dense one.
            self.value = grad + self.value if plain else self.value + grad
            self._owned = self.value.layout is torch.strided
        elif self._memory is not None and plain and type(grad) is Tensor:
            self.value, self._owned = self._memory.copy_(grad), True
        else:
            other = grad.dtype is not self.dtype
            self.value, self._owned = grad.to(self.dtype) if other else grad, plain and (other or fresh)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the product of two matrices, in a single kernel."""
        if a.dtype is self.dtype and a.layout is torch.strided:
            if self.value is None and self._memory is not None:
                self.value, self._owned = self._memory.addmm_(a, b, beta=0), True
                return
            if self._in_place(a):
                self.value.addmm_(a, b)  # type: ignore[union-attr]
                return
        self.add(a.mm(b), fresh=True)

    def scaled(self, factor: Tensor, in_place: bool) -> Tensor:
        """The sum times a number on its device; ``in_place``: the sum itself may be written to and given away."""
        assert self.value is not None
        return self.value.mul_(factor) if in_place and self._owned else self.value * factor

    def _in_place(self, grad: Tensor) -> bool:
        # Not to a subclass, as in autograd: a DTensor that is written to would keep its placement, whatever is added.
        return self._owned and type(self.value) is Tensor and grad.layout is torch.strided


class Sums:
    """The sums of one stage. Only one thread at a time may add."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Total]] = {}

    def of(self, weight: Tensor) -> Total:
        """The growing sum of a tensor."""
        entry = self._sums.get(id(weight))
        if entry is None:
            entry = self._sums[id(weight)] = weight, Total(weight)
        return entry[1]

    def add(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Adds gradients from autograd, with the shapes and dtypes of weights, none of which occurs twice.

        In one call, if possible: a model may have hundreds of weights, most of them tiny.
        """
        totals = [self.of(weight) for weight in weights]
        if not _added_together(totals, grads):
            for total, grad in zip(totals, grads):
                total.add(grad)

    def take(self, weight: Tensor) -> Tensor | None:
        """Removes and returns the sum of a tensor; None if it has no gradient."""
        _, total = self._sums.pop(id(weight), (None, None))
        return None if total is None else total.value

    def __iter__(self) -> Iterator[tuple[Tensor, Total]]:
        """Each tensor that has a gradient, and its sum."""
        return ((x, total) for x, total in self._sums.values() if total.value is not None)


def _added_together(totals: Sequence[Total], grads: Sequence[Tensor]) -> bool:
    """Adds all in one call, if each has a plain gradient and all sums are alike: absent, or owned, or not owned."""
    if not all([type(grad) is Tensor and grad.layout is torch.strided for grad in grads]):
        return False
    values = [x for total in totals if type(x := total.value) is Tensor and x.layout is torch.strided]
    owned = sum([total._owned for total in totals])
    if not any([total.value is not None for total in totals]):
        results: Sequence[Tensor] = grads
    elif len(values) == len(totals) == owned:
        _foreach_add_(values, grads)  # type: ignore[arg-type]
        return True
    elif len(values) == len(totals) and not owned:  # They may be shared.
        results = _foreach_add(values, grads)  # type: ignore[arg-type]
    else:
        return False
    for total, value in zip(totals, results):
        total.value, total._owned = value, results is not grads
    return True
