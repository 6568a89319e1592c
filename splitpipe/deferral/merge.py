"""Which microbatches have their weight gradients computed by one kernel, on concatenated tensors.

One kernel reads and writes the weight's gradient once, where one a microbatch does each time. To concatenate means
to copy, into memory that is new to the cache. benchmarks/README.md has the measurements behind the bound.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

Pair = tuple[Tensor, Tensor]

#: Bytes of input and output gradient that are concatenated at once.
_TOGETHER = 8 * 2**20


def together(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    """Runs of pairs that agree in all but the first dimension, each small enough to concatenate.

    Args:
        pairs: input and output gradient of each microbatch.
    """
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
