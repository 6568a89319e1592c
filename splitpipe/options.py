"""The arguments of SplitPipe that need no other to be checked."""
from __future__ import annotations

import operator
from typing import Literal

import torch

from splitpipe.schedule.op import Schedule

Checkpoint = Literal["always", "except_last", "never"]
#: How many of the last microbatches are not checkpointed; None spares all.
SPARED: dict[str, int | None] = {"always": 0, "except_last": 1, "never": None}


def verify_options(
    chunks: object,
    checkpoint: object,
    backward: object,
    schedule: object,
    loss_fn: object,
    grad_scaler: object,
    stash_limit: object,
) -> None:
    """Refuses values that SplitPipe's arguments can't have; all that is wrong is said at once."""
    if isinstance(chunks, bool) or not hasattr(chunks, "__index__"):
        raise TypeError(f"chunks is {chunks!r}: expected an int, the number of microbatches.")
    if stash_limit is not None and (isinstance(stash_limit, bool) or not hasattr(stash_limit, "__index__")):
        raise TypeError(f"stash_limit is {stash_limit!r}: expected an int, in bytes, or None.")
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
        faults.append(f"checkpoint is {checkpoint!r}: expected one of {', '.join(map(repr, SPARED))}, or None.")
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
