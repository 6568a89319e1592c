"""Gradients that a stage has summed in one pass, by what they are gradients of."""
from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from splitpipe.deferral.accumulator import Total


class Sums:
    """The sums of one stage. One thread at a time may add."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Total]] = {}

    def of(self, weight: Tensor) -> Total:
        """The sum of a tensor, which grows."""
        found = self._sums.get(id(weight))
        if found is None:
            found = self._sums[id(weight)] = weight, Total(weight.dtype, weight.shape)
        return found[1]

    def __iter__(self) -> Iterator[tuple[Tensor, Total]]:
        """Each tensor that has a gradient, and its sum."""
        return ((weight, total) for weight, total in self._sums.values() if total.value is not None)
