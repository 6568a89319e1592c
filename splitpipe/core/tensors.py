"""Whether tensors share memory, told from their layouts: no device is asked."""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.thread_state import unobserved

Layout = tuple[tuple[int, ...], tuple[int, ...], int]


def shared(values: Sequence[Any], tainted: Sequence[Tensor] = ()) -> frozenset[int]:
    """Which of the values are tensors that overlap another one, or one of the tainted."""
    if len(values) < 2 and not tainted:
        return frozenset()
    found = [(k, x) for k, x in enumerate(values) if isinstance(x, Tensor)]
    return frozenset(
        k
        for k, x in found
        if any(other != k and overlap(x, y) for other, y in found) or any(overlap(x, y) for y in tainted)
    )


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether some element of one is an element of the other."""
    storages = _storage(x), _storage(y)
    if None in storages or storages[0] != storages[1] or not x.numel() or not y.numel():
        return False
    if x.element_size() != y.element_size():
        return True
    if x.is_contiguous() and y.is_contiguous():
        first, second = x.storage_offset(), y.storage_offset()
        return bool(first < second + y.numel() and second < first + x.numel())
    return _cross(*sorted((_layout(x), _layout(y))))


def version_of(x: Tensor) -> int | None:
    """The tensor's version; None of an inference tensor, which has none."""
    try:
        return x._version  # Asked first whether it is one, torch lets go of the interpreter's lock.
    except RuntimeError:
        return None


def _storage(x: Tensor) -> int | None:
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return None
    identity: int = x.untyped_storage()._cdata
    return identity


def _layout(x: Tensor) -> Layout:
    # What is expanded stands on one element; dimensions of one element step nowhere.
    kept = [(size, stride) for size, stride in zip(x.shape, x.stride()) if size > 1 and stride]
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept), int(x.storage_offset())


@lru_cache(maxsize=256)
def _cross(x: Layout, y: Layout) -> bool:
    ends = [offset + sum((n - 1) * step for n, step in zip(sizes, steps)) for sizes, steps, offset in (x, y)]
    start = min(x[2], y[2])
    if x == y:
        return True
    if ends[0] < y[2] or ends[1] < x[2]:
        return False
    with unobserved():
        touched = torch.zeros(max(ends) + 1 - start, dtype=torch.bool, device="cpu")
        touched.as_strided(x[0], x[1], x[2] - start).fill_(True)
        return bool(touched.as_strided(y[0], y[1], y[2] - start).any())
