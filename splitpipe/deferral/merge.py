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
    start, size = 0, 0
    for number, pair in enumerate(pairs):
        grown = size + sum(x.nbytes for x in pair)
        if number > start and (grown > _TOGETHER or _kind(pair) != _kind(pairs[start])):
            yield pairs[start:number]
            start, grown = number, grown - size
        size = grown
    if pairs:
        yield pairs[start:]


def _kind(pair: Pair) -> tuple[object, ...]:
    return tuple((x.shape[1:], x.dtype) for x in pair)
