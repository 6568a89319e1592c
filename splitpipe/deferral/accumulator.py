"""The gradient of one weight, summed over calls: in place as soon as the sum has its own memory."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_

import torch
from torch import Tensor

from splitpipe.core.tensors import storage_of
from splitpipe.core.torch_private import _foreach_add, _foreach_add_


class Total:
    """A growing sum, with its weight's dtype and shape; ``like``: a tensor whose layout its memory should have, if any.

    The first gradient's memory may be shared (for example, if it is a view of an output gradient): the sum refers to it
    without writing to it. While autograd records (``create_graph=True``), nothing is written in place.
    """

    __slots__ = ("_like", "_memory", "_owned", "_shape", "dtype", "value")

    def __init__(self, dtype: torch.dtype, shape: torch.Size | None = None, like: Tensor | None = None) -> None:
        self.dtype = dtype
        self._shape = shape
        self._like = like
        self._memory: Tensor | None = None
        self._owned = False
        self.value: Tensor | None = None

    @property
    def lacks_memory(self) -> bool:
        """True if its first gradient would be the sum, in that gradient's own memory."""
        return self.value is None and self._memory is None and self._like is not None

    def allocate(self, device: torch.device) -> None:
        """Allocates memory for the sum, on the current stream."""
        if self._like is not None:
            self._memory = torch.empty_like(self._like, dtype=self.dtype, device=device)

    @classmethod
    def of(cls, grad: Tensor) -> Total:
        """A gradient as a sum, which owns the gradient from now on."""
        total = cls(grad.dtype, grad.shape)
        total.value = grad
        total._owned = grad.layout is torch.strided
        return total

    def add(self, grad: Tensor | None, fresh: bool = False) -> None:
        """Adds a gradient that has or expands to the weight's shape; ``fresh``: its memory isn't shared."""
        if grad is None:
            return
        if self._takes(grad) and grad.shape == self.value.shape:  # type: ignore[union-attr]
            self.value.add_(grad)  # type: ignore[union-attr]
            return
        if grad.shape != self._shape and self._shape is not None:
            grad = self._fitted(grad, self._shape)
        other = grad.dtype is not self.dtype
        if other and grad.is_complex() and not self.dtype.is_complex:
            raise RuntimeError(f"a weight gradient is {grad.dtype}: expected {self.dtype}, like its weight.")
        if self.value is None and self._fills(grad):
            self.value, self._memory, self._owned = self._memory.copy_(grad), None, True  # type: ignore[union-attr]
        elif self.value is None:
            self.value = grad.to(self.dtype) if other else grad
            self._owned = other or (fresh and grad.layout is torch.strided)
        elif self._in_place(grad):
            self.value.add_(grad)
        else:  # A dense sum accepts a sparse summand, but a sparse sum doesn't accept a dense one.
            self.value = grad + self.value if grad.layout is torch.strided else self.value + grad
            self._owned = self.value.layout is torch.strided

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Adds the product of two matrices, in a single kernel."""
        if self._takes(a):
            self.value.addmm_(a, b)  # type: ignore[union-attr]
            return
        if self.value is None and self._fills(a) and a.dtype is b.dtype is self.dtype:
            self.value, self._memory, self._owned = torch.mm(a, b, out=self._memory), None, True
        else:
            self.add(a.mm(b), fresh=True)

    def add_rows(self, grad: Tensor) -> None:
        """Adds the sum of a matrix's rows."""
        if self.value is None and self._fills(grad) and grad.dtype is self.dtype and grad.shape[1:] == self._shape:
            self.value, self._memory, self._owned = torch.sum(grad, 0, out=self._memory), None, True
        else:
            self.add(grad.sum(0), fresh=True)

    def take_over(self, other: Total) -> None:
        """Owns its memory if that belongs to another sum, which isn't used any more."""
        if type(self.value) is Tensor and type(other.value) is Tensor:
            self._owned = self._owned or other._owned and storage_of(self.value) == storage_of(other.value)
        other.value = None

    def join(self, other: Total) -> None:
        """Adds another sum of the same weight, which isn't used any more."""
        self.add(other.value, fresh=other._owned)

    def scaled(self, factor: Tensor, in_place: bool) -> Tensor | None:
        """The sum times a number on its device; ``in_place``: the sum itself may be written to and given away."""
        value = self.value
        if value is None:
            return None
        return value.mul_(factor) if in_place and self._owned else value * factor

    def _fills(self, grad: Tensor) -> bool:
        """True if there is memory for a sum that begins with such a gradient."""
        plain = type(grad) is Tensor and grad.layout is torch.strided
        return self._memory is not None and plain and not torch.is_grad_enabled()

    def _fitted(self, grad: Tensor, shape: torch.Size) -> Tensor:
        try:
            return grad.sum_to_size(shape)
        except RuntimeError as error:
            raise RuntimeError(
                f"a weight gradient has shape {list(grad.shape)}: expected the weight's, {list(shape)}, or a shape "
                "that expands to it."
            ) from error

    def _takes(self, grad: Tensor) -> bool:
        """True for gradients that a kernel adds in place, without conversion."""
        return self._owned and grad.dtype is self.dtype and self._in_place(grad)

    def _in_place(self, grad: Tensor) -> bool:
        # Not to a subclass, as in autograd: a DTensor that is written to would keep its placement, whatever is added.
        owned = self._owned and type(self.value) is Tensor
        return owned and not torch.is_grad_enabled() and grad.layout is torch.strided


#: Input and output gradient of a microbatch.
Pair = tuple[Tensor, Tensor]
#: Bytes of input and output gradient that are concatenated at once.
_TOGETHER = 8 * 2**20


def together(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    """Runs of pairs with equal dimensions except the first, each small enough to concatenate."""
    start, size, kind = 0, 0, None
    for number, (x, grad) in enumerate(pairs):
        own, bytes_ = (x.shape[1:], x.dtype, grad.shape[1:], grad.dtype), x.nbytes + grad.nbytes
        if number > start and (size + bytes_ > _TOGETHER or own != kind):
            yield pairs[start:number]
            start, size = number, 0
        if number == start:
            kind = own
        size += bytes_
    if pairs:
        yield pairs[start:]


def joined(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The pairs, but fewer and longer: concatenated where they are small."""
    for run in together(pairs):
        yield run[0] if len(run) == 1 else (torch.cat([x for x, _ in run]), torch.cat([grad for _, grad in run]))


class Sums:
    """The sums of one stage. Only one thread at a time may add."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Total]] = {}
        #: The last weights given to ``add``, and their sums: a stage's microbatches usually lead to the same ones.
        self._last: tuple[Sequence[Tensor], list[Total]] = ((), [])

    def of(self, weight: Tensor) -> Total:
        """The growing sum of a tensor."""
        found = self._sums.get(id(weight))
        if found is None:
            found = self._sums[id(weight)] = weight, Total(weight.dtype, weight.shape)
        return found[1]

    def add(self, weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Adds gradients from autograd, with each weight's shape and dtype: in a single call where possible.

        No weight may occur twice: one call would then have one sum in two places.

        A convolutional model has hundreds of weights, most of them tiny, and separate calls take longer than the sums.
        """
        known, totals = self._last
        if len(known) != len(weights) or not all(map(is_, known, weights)):
            totals = [self.of(weight) for weight in weights]
            self._last = weights, totals
        if _added_together(totals, grads):
            return
        for total, grad in zip(totals, grads):
            total.add(grad)

    def take(self, weight: Tensor) -> Total | None:
        """Removes and returns the sum of a tensor; None if it has no gradient."""
        _, total = self._sums.pop(id(weight), (None, None))
        self._last = (), []
        return total if total is not None and total.value is not None else None

    def __iter__(self) -> Iterator[tuple[Tensor, Total]]:
        """Each tensor that has a gradient, and its sum."""
        return ((weight, total) for weight, total in self._sums.values() if total.value is not None)


def _added_together(totals: Sequence[Total], found: Sequence[Tensor | None]) -> bool:
    """Adds all in one call, if each has a plain gradient and all sums are alike: empty, or owned, or not owned."""
    if torch.is_grad_enabled():
        return False
    grads = [grad for grad in found if type(grad) is Tensor and grad.layout is torch.strided]
    if len(grads) < len(totals):
        return False
    values = [total.value for total in totals if type(total.value) is Tensor and total.value.layout is torch.strided]
    owned = sum([total._owned for total in totals])
    if not any([total.value is not None for total in totals]):
        _put(totals, grads, owned=False)
    elif len(values) == len(totals) == owned:
        _foreach_add_(values, grads)
    elif len(values) == len(totals) and not owned:  # They may be shared.
        _put(totals, _foreach_add(values, grads), owned=True)
    else:
        return False
    return True


def _put(totals: Sequence[Total], values: Sequence[Tensor], owned: bool) -> None:
    for total, value in zip(totals, values):
        total.value, total._owned = value, owned
