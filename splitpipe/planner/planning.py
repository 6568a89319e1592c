"""``splitpipe.plan``: measures a module, then chooses how to cut and run them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from torch import nn

from splitpipe import checks
from splitpipe.balance.survey import has_loss, surveyed
from splitpipe.compiled.options import verify_compile
from splitpipe.core.microbatch import batch_size, flatten, verify_filled
from splitpipe.core.stream import Device
from splitpipe.core.worker import ProcessLock
from splitpipe.planner import arguments
from splitpipe.planner.choose import Choice, better, choose
from splitpipe.planner.measure import bar, profile
from splitpipe.planner.plan import Plan, RunnerUp
from splitpipe.planner.profile import Profile
from splitpipe.planner.work import Cuttable
from splitpipe.schedule.draw.measures import size
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.plurals import counted
from splitpipe.skip.pairs import verify_skippables

_OTHERS, _TOO_LARGE = 6, 2  # Runners-up that are named.
# Threads that plan wait for each other: else they would measure each other, and take each other's numbers of threads.
_one_at_a_time = ProcessLock()


class DoesNotFitError(ValueError):
    """No plan fits into the devices' memory.

    Attributes:
        missing: bytes that each device lacks, with the candidate that comes nearest.

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
    """Measures a module, and chooses how to cut and run it: balance or cuts, devices, schedule, chunks, checkpoint.

    Each layer of an nn.Sequential is measured by itself, on a copy, on each kind of device: the times of F, B and W as
    the split engine computes them, the memory that a microbatch takes in each, and how long copies take. A module that
    no device could hold is measured as well. Any other module is measured as a copy, with a cut at each call of a block
    that repeats (children of one module, of one class, such as the layers of a transformer), on one device, or on all
    of a kind where one has too little memory. Then cuts, schedules, numbers of microbatches and checkpointing are
    simulated together, and the shortest step that fits into every device's memory is chosen. The module, its gradients
    and buffers, the batch and the random state are left as they are.

    Args:
        module: the model.
        sample: a whole batch, as ``model(sample)`` takes it: a tensor of shape (rows, ...), or a nesting of them. Of a
            module that is no nn.Sequential, the arguments of a call: keywords in a dict, positional ones in a tuple.
        target: of the batch, with as many rows, for ``loss_fn``.
        loss_fn: as of ``SplitPipe``. Without, the plan is for the drop-in, where autograd goes backward after all of
            forward; but by a schedule for a module that is no nn.Sequential and gives a ``loss`` for the sample.
        devices: as of ``SplitPipe``, each once; on the CPU, how often it is named is the number of stages at work.
            None: all accelerators that torch sees, else two stages on the CPU, which the plan says. A device that is
            too slow to help is left out. No ``torch.Stream``: a device is planned as a whole.
        memory: bytes that the plan may use, on each device, or one number a device. None: nine tenths of what
            ``torch.accelerator`` reports free; without a limit on the CPU.
        chunks: number of microbatches, or several to choose from. None: 1, 2, 4 and 8 for each device, up to the batch.
        schedules: names of ``splitpipe.schedule.names()``, or Schedules, to choose from. None: all that have a name.
        optimizer_state: bytes that the optimizer keeps for each byte of parameters: 2 for Adam, 1 for SGD with
            momentum, 0 for plain SGD.
        compile: as of ``SplitPipe``. If layers may be compiled, they are measured so, too, and the plan is for what is
            faster. They are compiled once more for each number of chunks: give few.
        seconds: for how long to measure, more or less; what is slow takes longer, and to compile comes on top.
        progress: whether a bar on the standard error says what is measured. None: if that is a terminal.

    Returns:
        The plan: ``print(plan)``, ``plan.apply(module)``, ``SplitPipe(module, **plan.arguments())``.

    Raises:
        DoesNotFitError: no plan fits into the memory. The message says how many bytes are missing on which device;
            it is a ValueError.
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a wrong value.
        BaseException: what a layer raises, with a note that says which one.

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
        raise ValueError(f"found a {there} and no {missing}: expected both, or neither.")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn is {loss_fn!r}: expected a function of output and target.")
    optimizer_state = checks.number_of("optimizer_state", optimizer_state, "bytes for each byte of parameters")
    seconds = checks.number_of("seconds", seconds, "a time")
    ways: list[bool | Mapping[str, Any]] = [False] if verify_compile(compile) is None else [False, compile]
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress is {progress!r}: expected True, False or None.")
    with _one_at_a_time.lock:
        cuttable, own_loss = None, False
        if checks.is_layered(module):
            assert isinstance(module, nn.Sequential)
            rows, layers = _rows(module, sample), len(module)
        else:
            cuttable, own_loss = _cuttable(module, sample, loss_fn)
            rows, layers = cuttable.batch.rows, len(cuttable.blocks) + 1
        places, note = arguments.places_of(devices, layers)
        caps = arguments.memory_of(memory, len(places))
        places, caps = places[:layers], caps and caps[:layers]  # A device without a layer has nothing to do.
        if target is not None:
            arguments.verify_target(target, rows)
        named = arguments.schedules_of(schedules, dropin=loss_fn is None and not own_loss)
        numbers = arguments.chunks_of(chunks, rows, len(places), named)
        with bar(progress) as told:
            measured = [
                profile(
                    module, sample, target, loss_fn, places=places, chunks=numbers, cuttable=cuttable, compile=way,
                    memory=caps, optimizer_state=optimizer_state, seconds=seconds / len(ways), progress=told,
                )
                for way in ways
            ]
    return chosen(measured, named, loss_fn, note, own_loss)


def _rows(module: nn.Sequential, sample: Any) -> int:
    """The rows of a batch for an nn.Sequential."""
    checks.verify_ungathered(module)
    verify_skippables(module)
    if not len(module):
        raise ValueError("the module has no layers: expected one at least.")
    leaves, _ = flatten(sample, "the sample", batch=True)
    rows = batch_size(leaves, "the sample")
    verify_filled(leaves, "the sample")
    if not rows:
        raise ValueError("the sample has no rows: expected a whole batch.")
    return rows


def _cuttable(module: nn.Module, sample: Any, loss_fn: Callable[..., Any] | None) -> tuple[Cuttable, bool]:
    """A copy of any other module, and whether a loss is among what it gives."""
    copied, batch, found = surveyed(module, sample, "the sample")
    own_loss = loss_fn is None and has_loss(found.output)
    return Cuttable(copied, batch, found.cuts, loss_fn is None and not own_loss), own_loss


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
            f"none of the schedules goes with {counted(len(measured.names), 'layer')}, "
            f"{counted(len(measured.devices), 'device')} and {', '.join(map(str, measured.chunks))} as chunks: "
            "expected other chunks, or schedules=None for all."
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
    """The error, with the bytes that the choice which lacks least needs on each device."""
    lines = [f"no plan fits. The nearest is {nearest.way}, with {list(nearest.balance)} layers a stage:"]
    for device, most, missing in zip(nearest.devices, nearest.memory, nearest.missing):
        lack = f", {size(missing)} are missing" if missing else ""
        lines.append(f"  {device.name} needs {size(most)} of {size(device.memory)}{lack}")
    lines.append(
        "Expected as much memory, or less to hold: more chunks, more devices, other schedules (a loss_fn, for the "
        "drop-in), or an optimizer that keeps less (optimizer_state)."
    )
    return DoesNotFitError("\n".join(lines), [int(missing) for missing in nearest.missing])


def _runners_up(found: Sequence[Choice]) -> Iterator[RunnerUp]:
    """The best choices of other kinds; and faster ones, which do not fit."""
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
    # First the best that is compiled, if this one is not, or the other way round.
    for choice in sorted(found[1:], key=lambda each: each is not unlike):
        of = choice.candidate
        name = of.schedule.name, bool(choice.compile)
        new = name not in seen
        # The best candidate's schedule may come again, with other chunks or checkpointing.
        differs = name == own and (of.chunks, of.checkpoint) not in again
        if others < _OTHERS and choice.fits and (new or differs):
            seen.add(name)
            again.add((of.chunks, of.checkpoint))
            others += 1
            slower = choice.time > best.time
            yield _runner_up(
                choice, f"{choice.time / best.time - 1:.1%} slower" if slower else "no faster than 1%, and not simpler"
            )


def _runner_up(choice: Choice, why: str) -> RunnerUp:
    return RunnerUp(choice.way, choice.balance, choice.time, tuple(map(int, choice.memory)), why)
