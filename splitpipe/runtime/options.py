"""How a module is run, as SplitPipe and attach resolve their arguments."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from splitpipe.batch.custom_split import Split
from splitpipe.checks import Checkpoint
from splitpipe.compiled.options import CompileOptions
from splitpipe.core.stream import Place
from splitpipe.schedule.op import Schedule


class Options(NamedTuple):
    """How a module is run."""

    cuts: tuple[str, ...]
    places: tuple[Place, ...]
    chunks: int
    checkpoint: Checkpoint
    uncheckpointed: int | None
    split: bool
    stash_limit: int | None
    schedule: Schedule | None
    batched: Any
    reduction: Any
    loss_fn: Callable[..., Any] | None
    grad_scaler: Any
    compiling: CompileOptions | None
    splitting: Split | None
