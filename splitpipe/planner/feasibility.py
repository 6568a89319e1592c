"""A model that fits nowhere: how many bytes are missing where, and what would make it fit."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from splitpipe.planner.choose import Choice, choose
from splitpipe.planner.profile import Layer, Profile
from splitpipe.schedule.draw.measures import counted, size
from splitpipe.schedule.op import Schedule

#: More devices than there are that are thought of.
_MORE = 8
#: Passes that may be played for each option.
_WORK = 100_000
#: Schedules that hold least, or fit where others don't: of all names, options are tried with these.
_LEAN = ("gpipe", "1f1b", "zb-h1", "v-half", "v-min")


class DoesNotFitError(ValueError):
    """No plan fits into the devices' memory.

    Attributes:
        missing: bytes that each device lacks, with the way that comes nearest.

    Example:
        >>> import splitpipe, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> try:
        ...     splitpipe.plan(module, torch.randn(8, 64), devices=["cpu", "cpu"], memory=2**16, chunks=2, seconds=0)
        ... except splitpipe.DoesNotFitError as error:
        ...     print(len(error.missing), "would fit" in str(error))
        2 True
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


def lacking(
    profile: Profile, nearest: Choice, schedules: Sequence[str | Schedule] | None, dropin: bool
) -> DoesNotFitError:
    """The error that says so.

    Args:
        profile: of the layers.
        nearest: the choice that lacks least.
        schedules: that were to choose from; None: all that have a name.
        dropin: whether autograd was to go backward.
    """
    lines = [f"no plan fits. The nearest is {nearest.way}, with {_balance(nearest)} layers a stage:"]
    for device, most, missing in zip(nearest.devices, nearest.memory, nearest.missing):
        lack = f", {size(missing)} are missing" if missing else ""
        lines.append(f"  {device.name} needs {size(most)} of {size(device.memory)}{lack}")
    # Devices that are left out are too small.
    options = _options(replace(profile, devices=nearest.devices), nearest, schedules, dropin)
    lines += ["It would fit with one of these:", *(f"  {option}" for option in options)]
    return DoesNotFitError("\n".join(lines), [int(missing) for missing in nearest.missing])


def _balance(choice: Choice) -> list[int]:
    return [end - start for start, end in zip(choice.cut, choice.cut[1:])]


def _options(
    profile: Profile, nearest: Choice, schedules: Sequence[str | Schedule] | None, dropin: bool
) -> Iterator[str]:
    """What would make it fit, each by itself; more memory always would."""
    def fits(other: Profile, named: Sequence[str | Schedule] | None = schedules, drop: bool = dropin) -> bool:
        # The more microbatches, the less each takes.
        names = _LEAN if named is None else named
        found = choose(other, [other.chunks[-1]], names, drop, work=_WORK, fewer=False, soon=True)
        return bool(found) and found[0].fits

    if dropin and fits(profile, None, False):
        yield "loss_fn=criterion and target=..., for a schedule that holds fewer microbatches at once"
    elif schedules is not None and fits(profile, None):
        yield "schedules=None, which chooses from all"
    measured = chunks = profile.chunks[-1]
    while (chunks := 2 * chunks) <= profile.batch:
        if fits(finer(profile, measured, chunks)):
            yield f"chunks={chunks}: smaller microbatches"
            break
    for state, what in (1.0, "one number a parameter, as SGD with momentum"), (0.0, "none, as plain SGD"):
        if state < profile.optimizer_state and fits(replace(profile, optimizer_state=state)):
            yield f"optimizer_state={state:g}: an optimizer that keeps {what}"
            break
    roomy = max(profile.devices, key=lambda device: device.memory)
    def larger(count: int) -> Profile:
        return replace(profile, devices=(*profile.devices, *[roomy] * count), apart=True)

    most = min(_MORE, len(profile.names) - len(profile.devices))  # Each has a layer at least.
    if most > 0 and fits(larger(most)):
        count = bisect_left(range(1, most), True, key=lambda count: fits(larger(count))) + 1
        yield f"{counted(count, 'more device')} such as {roomy.name}, with {size(roomy.memory)}"
    bare = replace(profile, devices=tuple(replace(device, memory=0.0) for device in profile.devices))
    names = _LEAN if schedules is None else schedules
    every = choose(bare, schedules=names, dropin=dropin, work=_WORK, fewer=False)
    least = min(max(choice.memory) for choice in (nearest, *every))
    yield f"memory of {size(least)} on each device"


def finer(profile: Profile, measured: int, chunks: int) -> Profile:
    """The profile for a number of chunks that was not measured: smaller microbatches take less in proportion.

    Args:
        profile: of the layers.
        measured: the number of chunks to go by.
        chunks: more of them.
    """
    part = measured / chunks

    def smaller(layer: Layer) -> Layer:
        times = layer.forward * part, layer.backward_input * part, layer.backward_weight * part
        sizes = layer.saved, layer.kept, layer.input, layer.saved_input, layer.saved_output
        return Layer(*times, *(int(number * part) for number in sizes))

    return replace(profile, kinds=tuple(
        replace(kind, layers={chunks: tuple(map(smaller, kind.layers[measured]))}) for kind in profile.kinds
    ))
