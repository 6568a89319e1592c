"""The check: two runs, and by how much what they compute differs.

    some rows ──┬── in one microbatch, or through another module ── outputs, loss, gradients, state ──┐
                └── in ``chunks`` microbatches ──────────────────── outputs, loss, gradients, state ──┴─ compared

No rule can tell whether the rows of a batch meet in a forward or in a loss; two runs show it.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from splitpipe.checking.run import CheckedCall, Run, fresh, run
from splitpipe.microbatch.division import Division, describe
from splitpipe.partition.resident import is_pipeline
from splitpipe.piped import runtime_of
from splitpipe.runtime.module import ModuleRuntime
from splitpipe.runtime.runtime import Runtime

_ADVICE = {
    "outputs": (
        "Rows meet in the forward (statistics or attention over the batch, a counter of calls), or an argument was not "
        "split as it should be: look at batched= and split=."
    ),
    "loss": (
        "The loss isn't a sum or mean over rows: look at reduction=, let loss_fn return (total, count), or leave out "
        "the schedule and compute the loss from model(x)."
    ),
    "gradients": "A backward depends on the whole batch: try backward='autograd' and checkpoint='never'.",
    "state": (
        "The forward writes to a buffer, a parameter or a counter once for each microbatch: count outside, average "
        "outside, or look at deferred_batch_norm=True."
    ),
}
_DRAWING = "The forward draws random numbers there, too, so that nothing can be concluded."
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


@dataclass(frozen=True)
class Check:
    """What ``splitpipe.check`` has found: true if nothing differs. ``print`` shows a line for each comparison.

    Attributes:
        comparisons: of outputs, loss, gradients and state, as far as there are any.
        how: the rows, microbatches and modes of the two runs.
        arguments: how each argument was treated: split along which dimension, or whole.
        advice: where to look for the reason.
    """

    comparisons: tuple[Comparison, ...]
    how: str
    arguments: str
    advice: str

    def __bool__(self) -> bool:
        return not any([each.different for each in self.comparisons])

    def raise_if_different(self) -> None:
        """Raises RuntimeError, with the text that ``print`` shows, if anything differs."""
        if not self:
            raise RuntimeError(str(self))

    def __str__(self) -> str:
        same = "The same." if self else "Not the same."
        lines = [self.how, *self.comparisons, f"{same} (Numbers are parts of the largest element of each.)"]
        return "\n".join(map(str, lines if self else filter(None, [*lines, self.arguments, self.advice])))


def check(
    model: nn.Module, *args: Any, target: Any = None, loss: Callable[[Any], Tensor] | None = None,
    against: nn.Module | None = None, rows: int | None = None, tolerance: float | None = None, **kwargs: Any,
) -> Check:
    """Compares a pipeline in several microbatches with itself in one, or with another module, on a batch.

    It finds what no rule can: rows that meet in the forward or in the loss, an argument that was split but should be
    whole, a counter of calls. It runs where the model is, without a copy of it, and restores what runs may change
    (docs/reference.md says what). No other thread may use the model meanwhile. Dropout is off, and BatchNorm layers use
    their running statistics. If the forward draws random numbers all the same, it is compared in eval mode.

    Args:
        model: a SplitPipe, or a module that ``attach`` was called with.
        args: the positional arguments of a call.
        target: for a model with a schedule and ``loss_fn``.
        loss: a function of the output that returns the loss, if it is computed outside. Default: the loss in the
            model's output, or else a fixed function of all outputs.
        against: a module with the same weights to compare with, such as an unwrapped copy.
        rows: how many rows of the batch are used, from the first. Default: four for each microbatch, all with ``loss``.
        tolerance: by how much values may differ: a part of the largest element of each. Default: what their dtypes
            need, such as 1e-4 for outputs and 1e-3 for gradients in float32.
        kwargs: the arguments of a call that have names.

    Returns:
        A Check: true if nothing differs. ``print`` shows what does, by how much, and where to look.

    Raises:
        TypeError: ``model`` is not a pipeline, or an argument has a wrong type.
        ValueError: an argument has a wrong value, or the batch is one microbatch.
        BaseException: whatever the model or the loss raises.

    Example:
        >>> import splitpipe
        >>> layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        >>> model = SplitPipe(torch.nn.Sequential(*layers), balance=[1, 1], devices=["cpu", "cpu"], chunks=2)
        >>> bool(splitpipe.check(model, torch.randn(8, 4), loss=lambda y: y.square().mean()))
        True
    """
    runtime: Runtime = runtime_of(model)
    if not isinstance(runtime, ModuleRuntime):
        if len(args) == 2:
            target, args = args[1], args[:1]  # As in model(x, y).
        if len(args) != 1 or kwargs:
            raise TypeError(f"found {len(args)} arguments and {sorted(kwargs)}: expected an input, or it and a target.")
    against = against.module if isinstance(against, DistributedDataParallel) else against
    _verify(model, target, loss, against)
    if tolerance is not None and not (isinstance(tolerance, Real) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance!r}: expected a part of the largest element, such as 1e-3.")
    several = fresh(runtime, runtime.options.chunks)
    division, call = _chosen(several, model, CheckedCall(args, kwargs, target, loss, runtime.options.loss_fn), rows)
    pieces = len(division.rows)
    if pieces == 1 and against is None:
        raise ValueError(
            "the batch is one microbatch: expected more rows, arguments that can be split, or a module, against=plain."
        )
    other, alone = (model, fresh(runtime, 1)) if against is None else (against, None)
    runs = run(other, alone, call), run(model, several, call)
    mode = "train mode without dropout and batch statistics." if model.training else "eval mode."
    if model.training and (runs[0].drew or runs[1].drew):
        runs = run(other, alone, call, quiet=True), run(model, several, call, quiet=True)
        mode = "eval mode, since the forward draws random numbers in train mode."
    compared = _compared(*runs, pieces, tolerance)
    whom = "in one microbatch" if against is None else f"through {type(against).__name__}"
    how = f"{sum([count for _, count in division.rows])} rows {whom}, and in {pieces}, in {mode}"
    advice = next((f"{_ADVICE[each.kind]} See docs/limits.md." for each in compared if each.different), "")
    advice = _DRAWING if runs[0].drew or runs[1].drew else advice
    return Check(compared, how, "\n".join(describe(division)), advice)


def _verify(model: nn.Module, target: Any, loss: Any, against: Any) -> None:
    """Raises for wrong arguments."""
    if against is not None and (not isinstance(against, nn.Module) or is_pipeline(against)):
        raise TypeError(f"against is a {type(against).__name__}: expected an nn.Module that isn't a pipeline.")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is a {type(loss).__name__}: expected a function of the output.")
    if loss is not None and target is not None:
        raise ValueError("both loss and target are given: expected a target for loss_fn, or a function of the output.")
    trained = [[name for name, x in each.named_parameters() if x.requires_grad] for each in (model, against or model)]
    unlike = {*trained[0]} ^ {*trained[1]}
    if unlike:
        raise ValueError(f"{min(unlike)!r} requires grad in model or against alone: expected the same in both.")
    lazy = [name for name, x in (*model.named_parameters(), *model.named_buffers()) if is_lazy(x)]
    if lazy:
        raise ValueError(f"{lazy[0]!r} has no values yet: expected a model that was called, or loaded, before.")


def _chosen(runtime: Runtime, model: nn.Module, call: CheckedCall, rows: int | None) -> tuple[Division, CheckedCall]:
    """The division of the rows that are used, and the call with them."""
    division, targets, _ = runtime.prepare(runtime.batch(model, *call[:3]))
    total, split = sum([count for _, count in division.rows]), runtime.options.split
    if rows is not None and (not isinstance(rows, Integral) or rows < 1 or split is not None):
        raise ValueError(f"rows is {rows!r}: expected a positive number, and none with split=, which takes all rows.")
    least = (4 * runtime.options.chunks if call.loss is None else total) if rows is None else rows
    if split is not None or total <= least:
        return division, call
    input, target = division.some(least), None if targets is None else targets.some(least)
    args, kwargs = input if isinstance(runtime, ModuleRuntime) else ((input,), {})
    smaller = call._replace(args=args, kwargs=kwargs, target=target)
    # With fewer rows, another argument may happen to have as many, or a part of them.
    with suppress(ValueError):
        part, *_ = runtime.prepare(runtime.batch(model, *smaller[:3]))
        if part.dims == division.dims:
            return part, smaller
    return division, call


def _compared(one: Run, several: Run, pieces: int, tolerance: float | None) -> tuple[Comparison, ...]:
    """What the runs have computed, by kind."""
    dtypes = one.dtypes | several.dtypes
    *others, state = [compare(kind, one.values[kind], several.values[kind], dtypes, tolerance) for kind in _ADVICE]
    # What grows with each call has grown by as much more; with "except_last", the last one isn't recomputed.
    counted = {
        name: math.inf for name, x in one.counts.items()
        if x and pieces > 1 and several.counts.get(name) in (pieces * x, pieces * x - x / 2)
    }
    state = Comparison("state", {**state.errors, **counted}, (*counted, *state.different))
    return tuple([each for each in (*others, state) if each.errors])


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
