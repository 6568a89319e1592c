"""How much the values of two runs differ, in which sums have another order."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: By how much values and gradients may differ: a part of their largest element, by the lowest dtype that occurs.
#: Gradients are sums over more elements, which may cancel.
TOLERANCES = {
    torch.float64: (1e-9, 1e-8), torch.float32: (1e-4, 1e-3), torch.float16: (2e-2, 5e-2), torch.bfloat16: (5e-2, 1e-1),
}
#: A gradient whose largest element is below this part of the largest of all consists of rounding.
_NOISE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """The values of one kind in both runs.

    Attributes:
        kind: "outputs", "loss", "gradients", or "state": buffers, counters, and parameters that were written to.
        errors: by how much each value differs, by name: a part of its largest element; infinite for another shape, or
            where only one of them is there or is a number.
        different: the names of those that differ by more than the tolerance, the worst one first.
    """

    kind: str
    errors: Mapping[str, float]
    different: tuple[str, ...]

    def __str__(self) -> str:
        worst, count = max(self.errors, key=lambda name: self.errors[name]), len(self.different)
        by = {name: f" by {error:.2g}" if error < math.inf else "" for name, error in self.errors.items()}
        shown = ", ".join([name + by[name] for name in self.different[:4]])
        more = f" and {count - 4} others" if count > 4 else ""
        text = f"different: {shown}{more}" if count else f"worst {self.errors[worst]:.1g} at {worst}"
        return f"{self.kind + ':':11}{len(self.errors) - count} of {len(self.errors)} equal, {text}"


def compare(
    kind: str, first: Mapping[str, Any], second: Mapping[str, Any], dtypes: set[torch.dtype], tolerance: float | None
) -> Comparison:
    """Compares the values of two runs by name; without a tolerance, with that of these dtypes."""
    floor, gradients = 0.0, kind == "gradients"
    if tolerance is None:
        tolerance = max([TOLERANCES.get(dtype, (1e-4, 1e-3))[gradients] for dtype in dtypes], default=0.0)
    if gradients:
        tensors = [x for x in (*first.values(), *second.values()) if x is not None and x.numel()]
        floor = _NOISE * max([x.abs().nan_to_num(0.0, 0.0).max().item() for x in tensors], default=0.0)
    errors = {name: error_of(first.get(name), second.get(name), floor) for name in {**first, **second}}
    different = sorted([name for name, error in errors.items() if error > tolerance], key=lambda name: -errors[name])
    return Comparison(kind, errors, tuple(different))


def error_of(x: Any, y: Any, floor: float = 0.0) -> float:
    """The largest difference of two values, as a part of the largest element among those that differ."""
    if type(x) is float and type(y) is float:
        x, y = torch.tensor([x, y], dtype=torch.float64)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return 0.0 if type(x) is type(y) and x == y else math.inf
    if x.is_complex() and y.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    if x.shape != y.shape or x.is_complex() or y.is_complex():
        return math.inf
    if not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else math.inf
    x, y = x.to(torch.float64).flatten(), y.to(torch.float64).flatten()
    finite = x.isfinite() & y.isfinite()
    odd = (x != y) & ~(x.isnan() & y.isnan()) & ~finite
    if odd.any() or x.numel() and not finite.any():
        return math.inf  # Where nothing is finite, nothing can be compared.
    x, y = x[finite], y[finite]
    differences, magnitudes = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    if not differences.any():
        return 0.0
    # Not of all: a fill such as -1e9 would hide the rest. Nor of those that differ alone: they may be next to zero.
    present = magnitudes[magnitudes > 0]
    typical = present.kthvalue(1 + len(present) // 10).values
    return float(differences.max()) / max(float(magnitudes[differences > 0].max()), float(typical), floor)
