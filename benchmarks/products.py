"""The engine's products of matrices, against torch's own, for the shapes of a linear layer's two gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from measure import Row, interleaved, ratio
from torch import Tensor

own = SimpleNamespace(product=torch.mm, _available=lambda: False)  # The engine multiplies as torch does.
SIZES = ((256, 256), (256, 1024), (1024, 256), (512, 2048), (2048, 512), (1024, 1024), (512, 10), (128, 128))


@contextmanager
def without() -> Iterator[None]:
    """Inside, the engine's products are torch's."""
    with mock.patch.object(own, "_available", lambda: False):
        yield


def measure(rows: Sequence[int], passes: int, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Row]:
    """A row for each size of a layer and number of a microbatch's rows.

    Args:
        rows: of a microbatch.
        passes: how often each product is timed.
        sizes: input and output features.
    """
    found = []
    for count in rows:
        for inner, outer in sizes:
            x, grad, weight = torch.randn(count, inner), torch.randn(count, outer), torch.randn(outer, inner)
            row: Row = {"size": f"{inner} to {outer}", "rows": count, "million products": count * inner * outer / 1e6}
            for what, pair in {"weight": (grad.t(), x), "input": (grad, weight)}.items():
                took = interleaved({"own": partial(_quiet, own.product, *pair), "mm": partial(_quiet, torch.mm, *pair)},
                                   passes)
                row[f"{what}'s, mm, us"] = took["mm"].median * 1e6
                row[f"{what}'s, own / mm"] = ratio(took["own"].wall, took["mm"].wall)
            found.append(row)
    return found


@torch.no_grad()
def _quiet(call: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> None:
    call(a, b)
