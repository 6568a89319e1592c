"""``splitpipe.plan``: measures a module, then chooses how to split and run it."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from torch import nn

from splitpipe import checks
from splitpipe.balance.layers import Layers, layers_of
from splitpipe.balance.survey import Surveyed, surveyed
from splitpipe.compiled.options import verify_compile
from splitpipe.core.stream import Device
from splitpipe.core.worker import ProcessLock
from splitpipe.planner import arguments
from splitpipe.planner.choose import Choice, better, choose
from splitpipe.planner.measure import bar, profile
from splitpipe.planner.plan import Plan, RunnerUp
from splitpipe.planner.profile import Profile
from splitpipe.schedule.draw.measures import size
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.plurals import counted
from splitpipe.skip.pairs import verify_skippables

_OTHERS, _TOO_LARGE = 6, 2  # The number of runners-up that are listed, and of those that don't fit.
# Threads that plan wait for each other, or else they would disturb each other's times and numbers of threads.
_one_at_a_time = ProcessLock()


class DoesNotFitError(ValueError):
    """Raised if no plan fits into the devices' memory.

    Attributes:
        missing: the bytes that each device lacks with the candidate that comes closest.

    Example:
        >>> import splitpipe, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> try:
        ...     splitpipe.plan(module, torch.randn(8, 64), devices=["cpu", "cpu"], memory=2**16, chunks=2, seconds=0)
        ... except splitpipe.DoesNotFitError as error:
        ...     print(len(error.missing), "are missing" in str(error))
        2 True
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


def plan(
    module: nn.Module,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    devices: Iterable[Device] | None = None,
    memory: float | Sequence[float] | None = None,
    chunks: int | Iterable[int] | None = None,
    schedules: Iterable[str | Schedule] | None = None,
    optimizer_state: float = 2.0,
    compile: bool | Mapping[str, Any] = False,
    seconds: float = 30.0,
    progress: bool | None = None,
) -> Plan:
    """Measures a module, and chooses balance or cuts, devices, schedule, chunks and checkpointing.

    Each layer of an nn.Sequential is measured separately, on a copy, on each kind of device: the times of F, B and W
    with the split backward, and the memory that a microbatch takes in each. The times of copies are measured too. The
    module may be too large for any single device. Any other module is measured as a copy, with a cut at each call of a
    repeated block (children of one module, of one class, such as the layers of a transformer), on one device, or, if
    that has too little memory, on all of its kind. Then combinations of cuts, schedules, numbers of microbatches and
    checkpointing are simulated, and the one with the shortest step that fits into the memory of every device is chosen.
    The module, its gradients and buffers, the batch and the random state stay as they are.

    Args:
        module: the model.
        sample: a whole batch, as for ``model(sample)``: a tensor of shape (rows, ...), or a nesting of tensors. For a
            module that isn't an nn.Sequential, the arguments of a call: keyword arguments in a dict, positional ones in
            a tuple.
        target: the batch's target for ``loss_fn``, with as many rows.
        loss_fn: as for ``SplitPipe``. Without it, the plan is without a schedule (drop-in: backward runs after all
            forwards), unless a module that isn't an nn.Sequential returns a ``loss`` for the sample.
        devices: as for ``SplitPipe``, each once. The CPU may be repeated: once for each stage that runs at the same
            time. Default: all accelerators that torch finds, or else two stages on the CPU, which the plan mentions.
            Devices that are too slow to help are left out. A ``torch.Stream`` isn't accepted, since the plan is for
            whole devices.
        memory: the number of bytes that the plan may use, on each device, or one number per device. Default: nine
            tenths of what ``torch.accelerator`` reports as free; unlimited on the CPU.
        chunks: the number of microbatches, or several to choose from. Default: 1, 2, 4 and 8 per device, up to the
            batch size.
        schedules: names from ``splitpipe.schedule.names()``, or Schedules, to choose from. Default: all named ones.
        optimizer_state: bytes that the optimizer keeps per byte of parameters: 2 for Adam, 1 for SGD with momentum, 0
            for plain SGD.
        compile: as for ``SplitPipe``. If layers may be compiled, they are measured both ways, and the plan uses the
            faster way. They are compiled again for each number of chunks, so pass few of these.
        seconds: roughly how long to measure. Slow layers take longer, and compilation takes additional time.
        progress: whether to show what is being measured as a bar on standard error. Default: if that is a terminal.

    Returns:
        The plan: see ``print(plan)``, ``plan.apply(module)`` and ``SplitPipe(module, **plan.arguments())``.

    Raises:
        DoesNotFitError: no plan fits into the memory. The message lists how many bytes are missing on which device. It
            is a ValueError.
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value.
        BaseException: whatever a layer raises, with a note that names the layer.

    Example:
        >>> import splitpipe
        >>> module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> found = splitpipe.plan(module, torch.randn(8, 8), target=torch.randn(8, 2), devices=["cpu", "cpu"],
        ...                        loss_fn=nn.functional.mse_loss, chunks=4, schedules=["1f1b"], seconds=0.1)
        >>> found.schedule.name, found.chunks, sum(found.balance), len(found.balance)
        ('1f1b', 4, 3, 2)
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        ...     def forward(self, x, y):
        ...         for block in self.blocks:
        ...             x = block(x)
        ...         return {"loss": nn.functional.mse_loss(x, y)}
        >>> found = splitpipe.plan(Net(), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}, devices=["cpu", "cpu"],
        ...                        chunks=4, schedules=["1f1b"], seconds=0.1)
        >>> len(found.cuts), found.layers
        (1, ('(start)', 'blocks.1', 'blocks.2'))
    """
    if (loss_fn is None) != (target is None):
        missing, there = ("target", "loss_fn") if target is None else ("loss_fn", "target")
        raise ValueError(f"found a {there} but no {missing}: expected both, or neither.")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn is {loss_fn!r}: expected a function of output and target.")
    optimizer_state = checks.number_of("optimizer_state", optimizer_state, "bytes for each byte of parameters")
    seconds = checks.number_of("seconds", seconds, "a time")
    ways: list[bool | Mapping[str, Any]] = [False] if verify_compile(compile) is None else [False, compile]
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress is {progress!r}: expected True, False or None.")
    with _one_at_a_time.lock:
        of = _layers(module, sample) if checks.is_layered(module) else surveyed(module, sample, "the sample")
        own_loss = loss_fn is None and isinstance(of, Surveyed) and of.has_loss
        layers = len(of.names)
        places, note = arguments.places_of(devices, layers)
        caps = arguments.memory_of(memory, len(places))
        places, caps = places[:layers], caps and caps[:layers]  # There can't be more devices than layers.
        if target is not None:
            arguments.verify_target(target, of.rows)
        named = arguments.schedules_of(schedules, dropin=loss_fn is None and not own_loss)
        numbers = arguments.chunks_of(chunks, of.rows, len(places), named)
        with bar(progress) as told:
            measured = [
                profile(
                    module, of, target, loss_fn, places=places, chunks=numbers, compile=way, memory=caps,
                    optimizer_state=optimizer_state, seconds=seconds / len(ways), progress=told,
                )
                for way in ways
            ]
    return chosen(measured, named, loss_fn, note, own_loss)


def _layers(module: nn.Sequential, sample: Any) -> Layers:
    """The layers of an nn.Sequential, to be run on a batch."""
    verify_skippables(module)
    if not len(module):
        raise ValueError("the module has no layers: expected at least one.")
    found = layers_of(module, sample, "the sample")
    if not found.rows:
        raise ValueError("the sample has no rows: expected a whole batch.")
    return found


def chosen(
    profiles: Sequence[Profile],
    schedules: Sequence[str | Schedule] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    note: str = "",
    own_loss: bool = False,
) -> Plan:
    """The best plan for what was measured, in one or several ways."""
    dropin, measured = loss_fn is None and not own_loss, profiles[0]
    found = reduce(better, [choose(each, schedules=schedules, dropin=dropin) for each in profiles])
    if not found:
        raise ValueError(
            f"none of the schedules supports {counted(len(measured.names), 'layer')}, "
            f"{counted(len(measured.devices), 'device')} and {', '.join(map(str, measured.chunks))} chunks: "
            "expected other chunks, or schedules=None for all schedules."
        )
    best = found[0]
    if not best.fits:
        raise _does_not_fit(best)
    of = best.candidate
    cuts = tuple(measured.names[start] for start in best.cut[1:-1]) if measured.blockwise else None
    return Plan(
        balance=best.balance,
        devices=tuple(device.name for device in best.devices),
        chunks=of.chunks,
        checkpoint=of.checkpoint,
        schedule=of.schedule,
        way=best.way,
        dropin=dropin,
        step_time=best.time,
        costs=best.costs,
        peak_bytes=tuple(map(int, best.memory)),
        memory=tuple(device.memory for device in best.devices),
        layers=measured.names,
        runners_up=tuple(_runners_up(found)),
        cuts=cuts,
        own_loss=own_loss,
        loss_fn=loss_fn,
        note=note,
        compile=best.compile,
    )


def _does_not_fit(nearest: Choice) -> DoesNotFitError:
    """The error, with the bytes that each device needs for the choice that lacks the least."""
    lines = [f"no plan fits. The closest is {nearest.way}, with {list(nearest.balance)} layers per stage:"]
    for device, most, missing in zip(nearest.devices, nearest.memory, nearest.missing):
        lack = f", {size(missing)} are missing" if missing else ""
        lines.append(f"  {device.name} needs {size(most)} of {size(device.memory)}{lack}")
    lines.append(
        "Expected more memory, or a smaller need: more chunks, more devices, other schedules (with a loss_fn, if "
        "the plan is for drop-in), or an optimizer that keeps less (optimizer_state)."
    )
    return DoesNotFitError("\n".join(lines), [int(missing) for missing in nearest.missing])


def _runners_up(found: Sequence[Choice]) -> Iterator[RunnerUp]:
    """The best choices of other kinds, and faster ones that don't fit."""
    best = found[0]
    larger = sorted((each for each in found if not each.fits and each.time < best.time), key=lambda each: each.time)
    for choice in larger[:_TOO_LARGE]:
        lacks = ", ".join(
            f"{size(missing)} on {device.name}" for device, missing in zip(choice.devices, choice.missing) if missing
        )
        yield _runner_up(choice, f"{1 - choice.time / best.time:.1%} faster, but lacks {lacks}")
    own = best.candidate.schedule.name, bool(best.compile)
    unlike = next((each for each in found if each.fits and bool(each.compile) != own[1]), None)
    seen = {own}
    again = {(best.candidate.chunks, best.candidate.checkpoint)}
    others = 0
    # First the best compiled one if this one isn't compiled, or vice versa.
    for choice in sorted(found[1:], key=lambda each: each is not unlike):
        of = choice.candidate
        name = of.schedule.name, bool(choice.compile)
        new = name not in seen
        # The best candidate's schedule may appear again, with other chunks or checkpointing.
        differs = name == own and (of.chunks, of.checkpoint) not in again
        if others < _OTHERS and choice.fits and (new or differs):
            seen.add(name)
            again.add((of.chunks, of.checkpoint))
            others += 1
            slower = choice.time > best.time
            yield _runner_up(
                choice, f"{choice.time / best.time - 1:.1%} slower" if slower else "under 1% faster, and not simpler"
            )


def _runner_up(choice: Choice, why: str) -> RunnerUp:
    return RunnerUp(choice.way, choice.balance, choice.time, tuple(map(int, choice.memory)), why)
