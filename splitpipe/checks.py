"""The arguments that need no other to be checked: those of SplitPipe, and numbers anywhere."""
from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, Literal

import torch

from splitpipe.schedule.op import Schedule
from splitpipe.stage.cut import is_integer

Checkpoint = Literal["always", "except_last", "never"]
#: How many of the last microbatches are not checkpointed; None spares all.
SPARED: dict[str, int | None] = {"always": 0, "except_last": 1, "never": None}
_ONE_OF = f"one of {', '.join(map(repr, SPARED))}"


def number_of(name: str, value: object, what: str) -> float:
    """Refuses what is no such number, or negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}: expected a number, {what}.")
    if not 0 <= finite(value) < math.inf:
        raise ValueError(f"{name} is {value!r}: expected {what}, not negative and finite.")
    return finite(value)


def finite(value: Real) -> float:
    """The number; one that is too large for a float is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def verify_options(
    chunks: Any,
    checkpoint: object,
    deferred_batch_norm: object,
    backward: object,
    schedule: object,
    loss_fn: object,
    grad_scaler: object,
    stash_limit: Any,
) -> None:
    """Refuses values that SplitPipe's arguments can't have; all that is wrong is said at once."""
    if not is_integer(chunks):
        raise TypeError(f"chunks is {chunks!r}: expected an int, the number of microbatches.")
    if stash_limit is not None and not is_integer(stash_limit):
        raise TypeError(f"stash_limit is {stash_limit!r}: expected an int, in bytes, or None.")
    if not isinstance(deferred_batch_norm, bool):
        raise TypeError(f"deferred_batch_norm is {deferred_batch_norm!r}: expected True or False.")
    if checkpoint is not None and not isinstance(checkpoint, str):
        raise TypeError(f"checkpoint is {checkpoint!r}: expected {_ONE_OF}, or None.")
    if not isinstance(backward, str):
        raise TypeError(f"backward is {backward!r}: expected 'split' or 'autograd'.")
    if not isinstance(schedule, (str, Schedule)):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}: expected a name, one of splitpipe.schedule.names(), or a "
            "splitpipe.schedule.Schedule."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}: expected a function of output and target.")
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler is a {type(grad_scaler).__name__}: expected the loop's torch.amp.GradScaler.")
    faults = []
    if stash_limit is not None and operator.index(stash_limit) < 0:
        faults.append(f"stash_limit is {stash_limit}: expected at least 0 bytes, which defer nothing.")
    if operator.index(chunks) < 1:
        faults.append(f"chunks is {chunks}: expected at least 1 microbatch.")
    if checkpoint is not None and checkpoint not in tuple(SPARED):
        faults.append(f"checkpoint is {checkpoint!r}: expected {_ONE_OF}, or None.")
    if backward not in ("split", "autograd"):
        faults.append(f"backward is {backward!r}: expected 'split' or 'autograd'.")
    if schedule != "gpipe" and loss_fn is None:
        name = getattr(schedule, "name", schedule) or "of your own"
        faults.append(
            f"schedule {name!r} goes backward inside the forward, and needs the loss there: expected loss_fn, as in "
            "SplitPipe(..., schedule=..., loss_fn=criterion) and loss = model(x, target=y)."
        )
    if grad_scaler is not None and loss_fn is None:
        faults.append("grad_scaler is given without loss_fn: expected None, since scaler.scale(loss) works as usual.")
    if faults:
        raise ValueError("\n".join(faults))
