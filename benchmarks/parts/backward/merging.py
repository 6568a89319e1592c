"""The weight gradient of several microbatches: a kernel for each, or one for all of them on concatenated tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.measure import Row, interleaved

Pairs = list[tuple[Tensor, Tensor]]  # input and output gradient, one a microbatch
Way = Callable[[Pairs], object]


@dataclass(frozen=True)
class Shape:
    """One weight, and the batch that its gradient is summed over.

    Attributes:
        kind: of the layer.
        name: for the table.
        rows: of the whole batch, in all.
        make: input and output gradient for a number of rows.
        ways: how to compute the gradient of all microbatches.
    """

    kind: str
    name: str
    rows: int
    make: Callable[[int], tuple[Tensor, Tensor]]
    ways: dict[str, Way]


def _separate(one: Callable[[Tensor, Tensor], Tensor]) -> Way:
    """A gradient a microbatch, and their sum, as autograd's own accumulation does."""

    def way(pairs: Pairs) -> Tensor:
        total = one(*pairs[0])
        for x, grad in pairs[1:]:
            total.add_(one(x, grad))
        return total

    return way


def _together(one: Callable[[Tensor, Tensor], Tensor], size: int | None = None) -> Way:
    """Concatenated, all of them or as many as fit into ``size`` bytes."""

    def way(pairs: Pairs) -> Tensor:
        each = sum(x.nbytes for x in pairs[0])
        step = len(pairs) if size is None else max(1, size // each)
        runs = [pairs[start : start + step] for start in range(0, len(pairs), step)]
        found = [
            one(*run[0]) if len(run) == 1 else one(torch.cat([x for x, _ in run]), torch.cat([g for _, g in run]))
            for run in runs
        ]
        for more in found[1:]:
            found[0].add_(more)
        return found[0]

    return way


def _product(x: Tensor, grad: Tensor) -> Tensor:
    return grad.t().mm(x)


def _in_place(pairs: Pairs) -> Tensor:
    total = _product(*pairs[0])
    for x, grad in pairs[1:]:
        total.addmm_(grad.t(), x)
    return total


def linear(rows: int, inner: int, outer: int, **to: object) -> Shape:
    """A linear layer."""
    ways = {"separate": _separate(_product), "addmm_": _in_place, "concatenated": _together(_product)}
    ways["concatenated by 8 MiB"] = _together(_product, 8 * 2**20)

    def make(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, inner, **to), torch.randn(count, outer, **to)  # type: ignore[call-overload]

    return Shape("linear", f"{inner} to {outer}", rows, make, ways)


def convolution(rows: int, channels: int, more: int, size: int, kernel: int, **to: object) -> Shape:
    """A convolution in two dimensions, with a bias."""
    weight = torch.randn(more, channels, kernel, kernel, **to)  # type: ignore[call-overload]
    around = kernel // 2

    def one(x: Tensor, grad: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            grad, x, weight, [more], [1, 1], [around, around], [1, 1], False, [0, 0], 1, (False, True, True)
        )[1]
        return found

    def make(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, channels, size, size, **to)  # type: ignore[call-overload]
        return x, torch.randn(count, more, size, size, **to)  # type: ignore[call-overload]

    ways = {"separate": _separate(one), "concatenated": _together(one)}
    ways["concatenated by 8 MiB"] = _together(one, 8 * 2**20)
    return Shape("convolution", f"{channels} to {more}, {size} x {size}, kernel {kernel}", rows, make, ways)


def embedding(rows: int, vocab: int, width: int, **to: object) -> Shape:
    """An embedding."""

    def one(x: Tensor, grad: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.embedding_dense_backward(grad, x, vocab, -1, False)
        return found

    def in_place(pairs: Pairs) -> Tensor:
        total = one(*pairs[0])
        for x, grad in pairs[1:]:
            total.index_add_(0, x, grad)
        return total

    def make(count: int) -> tuple[Tensor, Tensor]:
        numbers = torch.randint(vocab, (count,), device=to.get("device"))  # type: ignore[call-overload]
        return numbers, torch.randn(count, width, **to)  # type: ignore[call-overload]

    ways = {"separate": _separate(one), "index_add_": in_place, "concatenated": _together(one)}
    ways["concatenated by 8 MiB"] = _together(one, 8 * 2**20)
    return Shape("embedding", f"{vocab} rows of {width}", rows, make, ways)


def grid(tiny: bool, **to: object) -> list[Shape]:
    """The sizes to measure."""
    if tiny:
        return [linear(32, 8, 8, **to), convolution(8, 2, 2, 4, 3, **to), embedding(32, 10, 4, **to)]
    return [
        *(linear(rows, 512, 2048, **to) for rows in (64, 256, 1024)),
        *(linear(rows, 64, 64, **to) for rows in (64, 1024)),
        *(linear(8192, 256, outer, **to) for outer in (256, 768, 1024)),
        linear(2048, 1024, 1024, **to),
        convolution(64, 3, 64, 32, 3, **to),
        convolution(64, 64, 64, 16, 3, **to),
        convolution(64, 128, 128, 8, 3, **to),
        convolution(64, 64, 256, 8, 1, **to),
        embedding(8192, 256, 256, **to),
        embedding(8192, 10000, 256, **to),
    ]


def measure(
    shapes: Sequence[Shape],
    chunks: Sequence[int],
    passes: int,
    prepare: Callable[[], object],
) -> list[Row]:
    """A row for each shape and number of microbatches: microseconds of each way.

    Args:
        shapes: the layers.
        chunks: numbers of microbatches. Those that a shape has too few rows for are left out.
        passes: how often each way is timed.
        prepare: called before each pass, to push the tensors out of the caches.
    """
    rows = []
    for shape in shapes:
        for m in chunks:
            if shape.rows < m:
                continue
            pairs = [shape.make(shape.rows // m) for _ in range(m)]
            things = {name: partial(way, pairs) for name, way in shape.ways.items()}
            found = interleaved(things, passes, prepare=prepare)
            times = {name: timings.median for name, timings in found.items()}
            row: Row = {"layer": shape.kind, "size": shape.name, "rows": shape.rows, "chunks": m}
            row.update({f"{name}, us": seconds * 1e6 for name, seconds in times.items()})
            row["best"] = min(times, key=times.__getitem__)
            rows.append(row)
    return rows
