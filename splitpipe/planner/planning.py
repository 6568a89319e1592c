"""``splitpipe.plan``: checks its arguments, measures a module, then chooses how to split and run it."""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from splitpipe import checks
from splitpipe.balance.survey import survey
from splitpipe.compiled.backend import verify_compile
from splitpipe.core.stream import Device, Place
from splitpipe.microbatch.division import chunk_rows
from splitpipe.partition.by_bytes import memory_of
from splitpipe.planner.choose import Choice, choose
from splitpipe.planner.measure import Profile, profile
from splitpipe.planner.plan import Plan, RunnerUp
from splitpipe.schedule.construct.library import SCHEDULES
from splitpipe.schedule.draw.measures import size
from splitpipe.schedule.op import Schedule, counted, listed

_CHUNKS = (1, 2, 4, 8)  # Microbatches per device to choose from, by default.
_USABLE = 0.9  # The fraction of an accelerator's free memory that a plan uses; the rest is for fragmentation.
_OTHERS, _TOO_LARGE = 6, 2  # The number of runners-up that are listed, and of those that don't fit.


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
    module: nn.Module, sample: Any, *, target: Any = None, loss_fn: Callable[..., Any] | None = None,
    devices: Iterable[Device] | None = None, memory: float | Sequence[float] | None = None,
    chunks: int | Iterable[int] | None = None, schedules: Iterable[str | Schedule] | None = None,
    optimizer_state: float = 2.0, compile: bool | Mapping[str, Any] = False, seconds: float = 30.0,
) -> Plan:
    """Measures a module, and chooses balance or cuts, devices, schedule, chunks and checkpointing.

    A copy of the module is trained as a pipeline, cut as by ``balance_by_time`` wherever it may be, on one device, or,
    if that has too little memory, on all. This gives the times of F, B and W, and the memory that a microbatch takes in
    each. The times of copies are measured too. Then combinations of cuts, schedules, numbers of microbatches and
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
            time. Default: all accelerators that torch finds, or else two stages on the CPU.
            Devices that don't help are left out. A ``torch.Stream`` isn't accepted, since the plan is for
            whole devices, and they have to be of one kind.
        memory: the number of bytes that the plan may use, on each device, or one number per device. Default: nine
            tenths of what ``torch.accelerator`` reports as free; unlimited on the CPU.
        chunks: the number of microbatches, or several to choose from. Default: 1, 2, 4 and 8 per device, up to the
            batch size.
        schedules: names from ``splitpipe.schedule.names()``, or Schedules, to choose from. Default: all named ones.
        optimizer_state: bytes that the optimizer keeps per byte of parameters: 2 for Adam, 1 for SGD with momentum, 0
            for plain SGD.
        compile: as for ``SplitPipe``. Layers are compiled again for each number of chunks, so pass few of these.
        seconds: roughly how long to measure. Slow layers take longer, and compilation takes additional time.

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
    """
    if (loss_fn is None) != (target is None):
        missing, there = ("target", "loss_fn") if target is None else ("loss_fn", "target")
        raise ValueError(f"found a {there} but no {missing}: expected both, or neither.")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn is {loss_fn!r}: expected a function of output and target.")
    optimizer_state = checks.number_of("optimizer_state", optimizer_state, "bytes for each byte of parameters")
    seconds = checks.number_of("seconds", seconds, "a time")
    verify_compile(compile)
    places = places_of(devices)
    room = room_of(memory, places, module)  # Before a copy of the module takes some.
    subject = survey(module, sample, "the sample")
    own_loss = loss_fn is None and subject.has_loss
    places = places[:len(subject.names)]  # There can't be more devices than layers.
    named = schedules_of(schedules, dropin=loss_fn is None and not own_loss)
    numbers = chunks_of(chunks, subject.rows, len(places), named)
    measured = profile(
        subject, target, loss_fn, places, numbers, compile=compile, memory=room, optimizer_state=optimizer_state,
        seconds=seconds,
    )
    return chosen(measured, named, loss_fn, own_loss, compile=compile)


def places_of(devices: Iterable[Device] | None) -> list[Place]:
    """Each device's place; by default, all accelerators, or two stages on the CPU."""
    places = checks.resolve_devices(checks.accelerators() or ["cpu", "cpu"] if devices is None else devices)
    if not places:
        raise ValueError("devices is empty: expected at least one, or None for all accelerators.")
    for number, place in enumerate(places):
        if place.stream is not None or place.device.type != "cpu" and place in places[:number]:
            raise ValueError(f"devices[{number}] is {place}: expected whole devices, each once, and no streams.")
    kinds = {
        "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        for device in [place.device for place in places]
    }
    if len(kinds) > 1:
        raise ValueError(f"devices are of several kinds ({', '.join(sorted(kinds))}): expected devices of one.")
    return places


def chunks_of(
    chunks: int | Iterable[int] | None, rows: int, devices: int, schedules: Iterable[str | Schedule] | None = None
) -> list[int]:
    """The numbers of chunks to choose from, for a batch of ``rows`` rows on some devices."""
    own = {schedule.microbatches for schedule in schedules or () if isinstance(schedule, Schedule)}
    if chunks is None:
        chunks = [number * devices for number in _CHUNKS if number * devices <= rows] or [rows]
    found: list[Any] | None = [chunks] if checks.is_integer(chunks) else listed(chunks)
    if found is None or not all(map(checks.is_integer, found)):
        raise TypeError(f"chunks is {chunks!r}: expected a number of microbatches, a list of numbers, or None.")
    numbers = [operator.index(number) for number in found]
    if not numbers or min(numbers) < 1 or max(numbers) > rows:
        raise ValueError(f"chunks is {chunks!r}: expected numbers from 1 to the batch's {counted(rows, 'row')}.")
    return sorted({number if number in own else len(chunk_rows(rows, number)) for number in numbers})


def schedules_of(schedules: Iterable[str | Schedule] | None, dropin: bool) -> list[str | Schedule] | None:
    if schedules is None:
        return None
    found = listed(schedules)
    if found is None:
        raise TypeError(f"schedules is {schedules!r}: expected a list of names or Schedules, or None for all names.")
    for each in found:
        if not isinstance(each, Schedule) and (not isinstance(each, str) or each not in SCHEDULES):
            raise ValueError(f"schedules has {each!r}: expected a Schedule, or one of {', '.join(SCHEDULES)}.")
    if dropin:
        raise ValueError("schedules were given, but no loss_fn: expected both, since a schedule runs backward itself.")
    return found


def room_of(memory: float | Sequence[float] | None, places: Sequence[Place], module: Any) -> list[float]:
    """The bytes that the plan may use on each device: the given ones, or its share of the free ones."""
    if memory is None:
        free = [memory_of(place.device, module) for place in places]
        return [float("inf") if size is None else size * _USABLE for size in free]
    several = listed(memory)
    given: list[Any] = [memory] * len(places) if several is None else several
    if any(isinstance(each, bool) or not isinstance(each, Real) for each in given):
        raise TypeError(f"memory is {memory!r}: expected a number of bytes, or one per device.")
    if len(given) != len(places) or any(not each > 0 for each in given):
        raise ValueError(f"memory is {memory!r}: expected positive bytes, or {counted(len(places), 'number')} of them.")
    return [float(each) for each in given]


def chosen(
    profile: Profile, schedules: Sequence[str | Schedule] | None = None, loss_fn: Callable[..., Any] | None = None,
    own_loss: bool = False, compile: bool | Mapping[str, Any] = False,
) -> Plan:
    dropin = loss_fn is None and not own_loss
    found = choose(profile, schedules, dropin)
    if not found:
        raise ValueError(
            f"none of the schedules supports {counted(len(profile.names), 'layer')}, "
            f"{counted(len(profile.devices), 'device')} and {', '.join(map(str, profile.layers))} chunks: expected "
            "others."
        )
    best, of = found[0], found[0].candidate
    if not best.fits:  # It lacks the least.
        lines = [f"no plan fits. The closest is {of}, with {list(best.balance)} layers per stage:"]
        for device, most, missing in zip(best.devices, best.memory, best.missing):
            lack = f", {size(missing)} are missing" if missing else ""
            lines.append(f"  {device.name} needs {size(most)} of {size(device.memory)}{lack}")
        lines.append("Expected more memory, more chunks, other schedules, or an optimizer that keeps less.")
        raise DoesNotFitError("\n".join(lines), [*map(int, best.missing)])
    return Plan(
        balance=best.balance, devices=tuple(device.name for device in best.devices), chunks=of.chunks,
        checkpoint=of.checkpoint, schedule=of.schedule, way=str(of), dropin=dropin, step_time=best.time,
        costs=best.costs, peak_bytes=tuple(map(int, best.memory)), runners_up=tuple(_runners_up(found)),
        memory=tuple(device.memory for device in best.devices), layers=profile.names,
        cuts=None if profile.layered else tuple(profile.names[start] for start in best.cuts[1:-1]),
        own_loss=own_loss, loss_fn=loss_fn, compile=compile,
    )


def _runners_up(found: Sequence[Choice]) -> Iterator[RunnerUp]:
    """Faster choices that don't fit, and the best ones of other schedules, with and without checkpointing."""
    best = found[0]
    larger = [each for each in found if not each.fits and each.time < best.time]
    others: dict[tuple[str, str], Choice] = {}
    for choice in found:
        if choice.fits:
            others.setdefault((choice.candidate.schedule.name, choice.candidate.checkpoint), choice)
    for choice in [*larger[:_TOO_LARGE], *[each for each in others.values() if each is not best][:_OTHERS]]:
        why = f"{choice.time / best.time - 1:+.1%}"
        if not choice.fits:
            lacks = [f"{size(x)} on {device.name}" for device, x in zip(choice.devices, choice.missing) if x]
            why += f", but lacks {', '.join(lacks)}"
        yield RunnerUp(str(choice.candidate), choice.balance, choice.time, tuple(map(int, choice.memory)), why)
