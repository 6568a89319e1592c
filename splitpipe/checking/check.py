"""The check: two runs, in one microbatch and in several, and by how much what they compute differs."""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.core import thread_state
from splitpipe.core.tensors import dense, map_tensors, version_of
from splitpipe.core.torch_private import _BatchNorm
from splitpipe.microbatch.division import Division
from splitpipe.microbatch.gather import find_loss
from splitpipe.microbatch.tree import PLAIN, open_level
from splitpipe.partition.resident import Resident, is_pipeline
from splitpipe.partition.restore import random_states, restore_after
from splitpipe.piped import runtime_of
from splitpipe.runtime.runtime import Batch, Runtime

#: What is compared, and what to do about a difference.
_ADVICE = {
    "outputs": "Rows meet in the forward (statistics or attention over the batch, a counter of calls), or an argument "
               "was not split as it should be: look at batched= and split=.",
    "loss": "The loss isn't a sum or mean over rows: look at reduction=, let loss_fn return (total, count), or leave "
            "out the schedule and compute the loss from model(x).",
    "gradients": "The loss was averaged over rows, with a warning; a backward depends on the whole batch; or a "
                 "recomputation on an attribute that microbatches overwrite, or a write that torch can't see, "
                 "for which try backward='autograd' and checkpoint='never'.",
    "state": "The forward writes to a buffer, a parameter or a counter once for each microbatch: do so after the step.",
}
#: By how much values and gradients may differ, by the lowest dtype that occurs. Gradients are sums of more elements.
TOLERANCES = {
    torch.float64: (1e-9, 1e-8), torch.float32: (1e-4, 1e-3), torch.float16: (2e-2, 5e-2), torch.bfloat16: (5e-2, 1e-1),
}


@dataclass(frozen=True)
class Check:
    """What ``splitpipe.check`` has found: true if nothing differs. ``print`` shows a line for each kind of values."""

    #: The names of the values that differ, the worst one first, by kind: outputs, loss, gradients, state.
    different: Mapping[str, Sequence[str]]
    text: str

    def __bool__(self) -> bool:
        return not any(self.different.values())

    def __str__(self) -> str:
        return self.text

    def raise_if_different(self) -> None:
        """Raises RuntimeError, with the text that ``print`` shows, if anything differs."""
        if not self:
            raise RuntimeError(self.text)


class Run(NamedTuple):
    """What one run has computed."""

    values: dict[str, dict[str, Any]]  # By kind and name.
    counts: dict[str, float]  # By how much numbers in attributes, and the versions of parameters, have grown.
    drew: bool  # Whether a random number was drawn.


def check(
    model: nn.Module, *args: Any, target: Any = None, loss: Callable[[Any], Tensor] | None = None,
    against: nn.Module | None = None, rows: int | None = None, tolerance: float | None = None, **kwargs: Any,
) -> Check:
    """Compares a pipeline in several microbatches with itself in one, or with another module, on a batch.

    It finds what no rule can: rows that meet in the forward or in the loss, an argument that should be whole, a counter
    of calls. It runs where the model is, and restores what runs may change (docs/reference.md says what). No other
    thread may use the model meanwhile. Dropout is off, and BatchNorm layers use their running statistics. If the
    forward draws random numbers all the same, it is compared in eval mode.

    Args:
        model: a SplitPipe, or a module that ``attach`` was called with.
        args: the arguments of a call, and so are ``kwargs``.
        target: for a model with a schedule and ``loss_fn``.
        loss: a function of the output that returns the loss, if it is computed outside. Default: the loss in the
            model's output, or else a fixed function of all outputs.
        against: a module with the same weights to compare with, such as an unwrapped copy.
        rows: how many rows of the batch are used, from the first. Default: four for each microbatch, all with ``loss``.
        tolerance: by how much values may differ: a part of the largest element of each. Default: what their dtypes
            need, such as 1e-4 for outputs and 1e-3 for gradients in float32.

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
    runtime = runtime_of(model)
    options = runtime.options
    if not runtime.own_forward and len(args) == 2:
        target, args = args[1], args[:1]  # As in model(x, y).
    _verify(target, loss, against, tolerance)
    if target is not None and options.loss_fn is None:
        kwargs, target = {**kwargs, "target": target}, None  # It is the forward's own.
    several = _fresh(runtime, options.chunks)
    several.one_worker = True  # Microbatches then surely overwrite what they share.
    division, batch = _chosen(several, several.batch(model, args, kwargs, target), rows, loss is None)
    pieces = len(division.rows)
    if pieces == 1 and against is None:
        raise ValueError("the batch is one microbatch: expected more rows, values that can be split, or against=plain.")
    whom = "in one microbatch" if against is None else f"through {type(against).__name__}"
    other, alone = (model, _fresh(runtime, 1)) if against is None else (against, None)
    for quiet in range(3):  # No schedule runs if the model itself is in eval mode.
        given = batch, loss if target is None else options.loss_fn, quiet
        one, _ = _run(other, alone, *given), _run(model, several, *given)
        many = _run(model, several, *given)  # Not its first call, in which one microbatch may follow another.
        if not one.drew and not many.drew:
            break
    mode = "train mode without dropout and batch statistics." if model.training else "eval mode."
    if model.training and quiet:
        mode = "eval mode, since the forward draws random numbers in train mode."
    how = f"{sum(division.rows)} rows {whom}, and in {pieces}, in {mode}"
    return _compared(one, many, how, division, tolerance)


def _verify(target: Any, loss: Any, against: Any, tolerance: Any) -> None:
    """Raises for wrong arguments."""
    if against is not None and (not isinstance(against, nn.Module) or is_pipeline(against)):
        raise TypeError(f"against is a {type(against).__name__}: expected an nn.Module that isn't a pipeline.")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is a {type(loss).__name__}: expected a function of the output.")
    if loss is not None and target is not None:
        raise ValueError("both loss and target are given: expected a target for loss_fn, or a function of the output.")
    if tolerance is not None and not (isinstance(tolerance, Real) and float(tolerance) >= 0):
        raise ValueError(f"tolerance is {tolerance!r}: expected a part of the largest element, such as 1e-3.")


def _chosen(runtime: Runtime, batch: Batch, rows: int | None, few: bool) -> tuple[Division, Batch]:
    """The batch with the rows that are used, ``few`` or all by default, and its division."""
    division, targets = runtime.divider.divide(batch.args, batch.kwargs, batch.target, batch.unsplit)
    if rows is not None and (not isinstance(rows, Integral) or rows < 1 or runtime.options.split is not None):
        raise ValueError(f"rows is {rows!r}: expected a positive number, and none with split=, which takes all rows.")
    if runtime.options.split is None and (few or rows is not None):
        count = 4 * runtime.options.chunks if rows is None else rows
        input, target = division.some(count), None if targets is None else targets.some(count)
        args, kwargs = input if runtime.own_forward else ((input,), {})
        smaller = runtime.batch(batch.module, args, kwargs, target)
        with suppress(ValueError):
            part, _ = runtime.divider.divide(smaller.args, smaller.kwargs, smaller.target, smaller.unsplit)
            if part.dims == division.dims:  # Another argument may happen to have as few rows.
                return part, smaller
    return division, batch


def _fresh(runtime: Runtime, chunks: int) -> Runtime:
    """Another runtime of the same model, with this number of microbatches, which knows of no earlier call."""
    kind, (*given, options) = runtime.__reduce__()
    if chunks == 1 and options.checkpoint == "except_last":
        options = options._replace(checkpoint="always")  # The last microbatch has the rows of all.
    return kind(*given, options._replace(chunks=chunks))  # type: ignore[call-arg]


def _run(model: nn.Module, runtime: Runtime | None, batch: Batch, loss_fn: Any, quiet: int) -> Run:
    """A run of a pipeline with this runtime, or of a plain module without one.

    ``loss_fn``: a function of the output, and of a target if there is one. In eval mode: parts (``quiet`` 1), all (2).
    """
    whole = nn.Module()  # The model under its own names, and the loss.
    whole._modules[""] = model.inner if isinstance(model, Resident) else model
    whole._modules["loss_fn"] = loss_fn if isinstance(loss_fn, nn.Module) else None
    parts, parameters = dict(whole.named_modules()), dict(whole.named_parameters())
    trained = {name: x for name, x in parameters.items() if x.requires_grad}
    devices = {x.device for x in parameters.values()} | {x.device for x in (runtime.options.places if runtime else ())}
    hooked = frozenset(["_compiled_call_impl"])  # Without hooks of calls, each run would be a first call.
    with restore_after([*parts.values()], [*devices], hooked), torch.enable_grad():
        for part in parts.values():
            _silence(part, quiet > (part is parts[""]))
        before, numbers = _positions(parts, devices), _numbers(parts, parameters)
        output, loss = _computed(model, runtime, batch, loss_fn)
        outputs = {name: x for name, x in _named(output).items() if x is not loss}
        ends = [x for x in (outputs.values() if loss is None else [loss]) if getattr(x, "requires_grad", False)]
        gradients = dict[str, Tensor | None].fromkeys(trained)
        if ends and trained:
            # Each element has another weight; that of a loss is 1.
            weights = [torch.arange(x.numel(), device=x.device).cos().view_as(x).to(x.dtype) for x in ends]
            gradients.update(zip(trained, torch.autograd.grad(ends, [*trained.values()], weights, allow_unused=True)))
        values = {
            "outputs": outputs, "loss": {} if loss is None else {"the loss": loss}, "gradients": gradients,
            "state": dict(whole.named_buffers()),
        }
        return Run(
            map_tensors(lambda x: dense(x.detach().to("cpu", copy=True)), values),
            {name: x - numbers[name] for name, x in _numbers(parts, parameters).items() if name in numbers},
            before != _positions(parts, devices),
        )


def _computed(model: nn.Module, runtime: Runtime | None, batch: Batch, loss_fn: Any) -> tuple[Any, Any]:
    """The output, empty if it isn't known, and the loss, None if it isn't."""
    # A layer may write to its input.
    batch = map_tensors(lambda x: x.detach().clone().requires_grad_(x.requires_grad), batch)
    output = model(*batch.args, **batch.kwargs) if runtime is None else runtime.run(batch)
    if batch.target is not None:
        loss = output if runtime is not None else loss_fn(output, batch.target)
        return {}, loss[0] / loss[1] if isinstance(loss, tuple) else loss
    if loss_fn is None:
        with suppress(TypeError):
            return output, find_loss(output)[1]
        return output, None
    loss = loss_fn(output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"loss returned a {type(loss).__name__}: expected a tensor without dimensions.")
    return output, loss


def _silence(part: nn.Module, quiet: bool) -> None:
    """Turns off dropout and statistics of the batch; ``quiet``: all that depends on the mode."""
    if quiet or isinstance(part, _BatchNorm):
        vars(part)["training"] = False
    for name, value in [*vars(part).items()]:
        if isinstance(value, float) and ("drop" in name or name == "p" and "Drop" in type(part).__name__):
            vars(part)[name] = 0.0


def _numbers(parts: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """The numbers in attributes, and the versions of parameters."""
    own = [(prefix, name, x) for prefix, part in parts.items() for name, x in vars(part).items()]
    numbers: dict[str, float] = {f"{prefix}.{name}".strip("."): x for prefix, name, x in own if type(x) in (int, float)}
    return numbers | {name: version_of(x) or 0 for name, x in parameters.items()}


def _positions(parts: Mapping[str, nn.Module], devices: Collection[torch.device]) -> list[str]:
    """Where the default generators are, and those in attributes."""
    own = [x.get_state() for part in parts.values() for x in vars(part).values() if isinstance(x, torch.Generator)]
    states = [*[state for _, state in random_states(devices)], *own]
    return [str(state.tolist() if isinstance(state, Tensor) else state) for state in states]


def _named(value: Any, name: str = "") -> dict[str, Any]:
    """What an output holds that can be compared, by name."""
    if (level := open_level(value, fields=True)) is None:
        return {name or "the output": value} if isinstance(value, (Tensor, *PLAIN)) else {}
    inner = [_named(part, f"{name}.{key}".strip(".")) for key, part in zip(level.keys, level.parts)]
    return {name: x for own in inner for name, x in own.items()}


def _compared(one: Run, many: Run, how: str, division: Division, tolerance: float | None) -> Check:
    """What differs between two runs, and what is printed of them."""
    different, worst, lines = dict[str, list[str]](), list[float](), [how]
    dtypes = {getattr(x, "dtype", None) for run in (one, many) for own in run.values.values() for x in own.values()}
    dtypes |= {dtype for _, enabled, dtype in thread_state.capture().autocast if enabled}
    for kind in _ADVICE:
        if errors := _errors(one, many, kind, len(division.rows)):
            known = [pair[kind == "gradients"] for dtype, pair in TOLERANCES.items() if dtype in dtypes]
            most = max(known, default=0.0) if tolerance is None else tolerance
            different[kind] = [name for name, error in errors.items() if error > most]
            worst += [errors[name] for name in different[kind]]
            lines.append(_line(kind, errors, different[kind]))
    first = next((kind for kind, names in different.items() if names), None)
    if first is None and many.drew:
        lines.append("The forward draws random numbers there, too; those of a recomputation may be others.")
    lines.append(f"{'The' if first is None else 'Not the'} same. (Numbers are parts of the largest element of each.)")
    if first is not None:
        lines += division.described()
        tensors = [x for name in different[first] if isinstance(x := one.values[first].get(name), Tensor) and x.numel()]
        advice = f"{_ADVICE[first]} See docs/limits.md."
        if max(worst) < 1e-3 or first == "gradients" and dtypes & {torch.float16, torch.bfloat16}:
            advice = f"In a lower dtype, this may be rounding: use float32 or a larger tolerance=. If not: {advice}"
        if any(not x.isfinite().any() for x in tensors):
            advice = "Some values aren't finite in one microbatch, either, so that nothing can be concluded."
        if one.drew or many.drew:
            advice = "The forward draws random numbers there, too, so that nothing can be concluded."
        lines.append(advice)
    return Check(different, "\n".join(lines))


def _line(kind: str, errors: Mapping[str, float], different: Sequence[str]) -> str:
    worst, count = next(iter(errors)), len(different)
    shown = [name + (f" by {errors[name]:.2g}" if errors[name] < math.inf else "") for name in different[:4]]
    more = f" and {count - 4} others" if count > 4 else ""
    text = f"different: {', '.join(shown)}{more}" if count else f"worst {errors[worst]:.1g} at {worst}"
    return f"{kind + ':':11}{len(errors) - count} of {len(errors)} equal, {text}"


def _errors(one: Run, many: Run, kind: str, pieces: int) -> dict[str, float]:
    """By how much the values of one kind differ, by name, the worst one first: a part of their largest element."""
    first, second, floor = one.values[kind], many.values[kind], 0.0
    if kind == "gradients":
        tensors = [x for x in (*first.values(), *second.values()) if x is not None and x.numel()]
        # A gradient consists of rounding if it is this small next to others.
        floor = 1e-3 * max([x.abs().nan_to_num(0.0, 0.0).max().item() for x in tensors], default=0.0)
    errors = {name: _error(first.get(name), second.get(name), floor) for name in {**first, **second}}
    if kind == "state" and pieces > 1:
        # What grows with each call has grown by as much more; with "except_last", the last one isn't recomputed.
        grown = {name: many.counts.get(name, 0.0) / x for name, x in one.counts.items() if x}
        errors.update({name: math.inf for name, times in grown.items() if times in (pieces, pieces - 0.5)})
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def _error(x: Any, y: Any, floor: float = 0.0) -> float:
    """The largest difference of two values: a part of the largest element among those that differ, or infinite."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return 0.0 if type(x) is type(y) and x == y else math.inf
    x, y = [torch.view_as_real(each) if each.is_complex() else each for each in (x, y)]
    if x.shape != y.shape or not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else math.inf
    x, y = x.to(torch.float64).flatten(), y.to(torch.float64).flatten()
    finite = x.isfinite() & y.isfinite()
    if not torch.allclose(x[~finite], y[~finite], equal_nan=True) or x.numel() and not finite.any():
        return math.inf  # Where nothing is finite, nothing can be compared.
    differences, magnitudes = (x - y)[finite].abs(), torch.maximum(x.abs(), y.abs())[finite]
    if not differences.any():
        return 0.0
    # Not of all: a fill such as -1e9 would hide the rest. Nor of those that differ alone: they may be next to zero.
    present = magnitudes[magnitudes > 0]
    typical = present.kthvalue(1 + len(present) // 10).values
    return float(differences.max()) / max(float(magnitudes[differences > 0].max()), float(typical), floor)
