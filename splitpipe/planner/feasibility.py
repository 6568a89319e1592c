"""A model that fits nowhere: the error that says how many bytes are missing on which device."""
from __future__ import annotations

from collections.abc import Sequence

from splitpipe.planner.choose import Choice
from splitpipe.schedule.draw.measures import size


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


def does_not_fit(nearest: Choice) -> DoesNotFitError:
    """The error, with what the choice that lacks least needs on each device."""
    lines = [f"no plan fits. The nearest is {nearest.candidate}, with {list(nearest.balance)} layers a stage:"]
    for device, most, missing in zip(nearest.devices, nearest.memory, nearest.missing):
        lack = f", {size(missing)} are missing" if missing else ""
        lines.append(f"  {device.name} needs {size(most)} of {size(device.memory)}{lack}")
    lines.append(
        "Expected as much memory, or less to hold: more chunks, more devices, other schedules (a loss_fn, for the "
        "drop-in), or an optimizer that keeps less (optimizer_state)."
    )
    return DoesNotFitError("\n".join(lines), [int(missing) for missing in nearest.missing])
