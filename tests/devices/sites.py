"""The places in splitpipe that give streams their order, which can be taken away one at a time."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import splitpipe
from splitpipe.core import stream
from splitpipe.deferral import streams
from tests.helpers.covering import pairs

from .cases import DEVICES, WAYS, Case, some

#: What order is made of: each verb, and what it is without effect.
VERBS: dict[str, Callable[..., Any]] = {
    "wait": lambda *_: None,
    "wait_for": lambda *_: None,
    "hold": lambda *_: None,
    "use": lambda *_: nullcontext(),
}
ROOT = Path(splitpipe.__file__).parent
#: What the side stream may still be reading, kept until the compute stream has waited for it.
READS = "deferral/streams.py: Reads.add"
#: Places without which some case has a hazard: the subjects whose cases show it.
CAUGHT: dict[str, str] = {
    "stage/run.py: StageRun.again: use": "chain",
    "engine/dropin.py: Beside.enter: wait": "module: carried",
    "engine/dropin.py: Beside.enter: wait_for": "module: carried",
    "core/transfer.py: Wait.forward: wait_for": "chain",
    "core/transfer.py: _await: wait": "chain",
    "core/transfer.py: _await: wait_for": "module: carried",
    "core/transfer.py: Crossing.again: use": "module: carried",
    "core/transfer.py: depart: use": "chain",
    "core/transfer.py: move: use": "chain",
    "core/transfer.py: move: hold": "skips",
    "core/transfer.py: move: wait": "chain",
    "core/transfer.py: arrive: wait_for": "detached",
    "training/exchange.py: Exchange.receive: wait_for": "chain",
    "engine/detaching.py: DetachedTransfer.take: wait_for": "chain",
    "engine/scheduled.py: StepWork.other: use": "module: carried",
    "engine/detaching.py: CodeDetachedTransfer.carry: wait_for": "module: carried",
    "deferral/streams.py: Reads.release: wait_for": "residuals",
    "deferral/streams.py: BackwardStreams.allocate: wait": "chain",
    "stage/call.py: begin: wait": "chain",
    "stage/call.py: Call.rejoin: wait": "statistics",
    "stage/call.py: Call.end: wait": "statistics",
    "training/step.py: _Step.finish: use": "chain",
    "training/step.py: _Step._given: use": "chain",
    READS: "residuals",
    "deferral/stash.py: Stash.leave: wait": "chain",
}
#: Places without which some step takes longer, though nothing goes wrong: of ``makespans.CHECKED``.
SLOWER: tuple[str, ...] = (
    "deferral/stash.py: Stash._compute_early: use",
    "engine/dropin.py: GraphTransfer._left: use",
)
_OTHERS = "The stage's stream, whichever the thread has: on the default one others' work would be waited for."
_TWICE = "A call has the streams wait as well, and autograd those of its nodes; hand_over is right by itself."
#: Places that no case misses, and why they are there.
EXPLAINED: dict[str, str] = {
    "engine/chain.py: ChainForward._step: use": _OTHERS,
    "core/transfer.py: leave: use": _OTHERS,
    "core/transfer.py: arrive: use": _OTHERS,
    "engine/code.py: CodeForward._forward: use": _OTHERS,
    "engine/code.py: CodeForward._enter: use": _OTHERS,
    "partition/homes.py: Homes.brought.<locals>.bring: hold": (
        "Where nobody takes a block's call: torch.utils.checkpoint runs it again, in backward, on streams of its own."
    ),
    "deferral/streams.py: BackwardStreams.allocate: use": "Whose memory it is: more is reserved without: memory.py.",
    "core/transfer.py: Wait.forward: wait": _TWICE,
    "core/transfer.py: hand_over: wait": _TWICE,
    "core/transfer.py: hand_over: hold": _TWICE,
    "deferral/stash.py: Stashes.flushing: use": "What Flush itself computes: little, and compute waits for it.",
    "engine/ops.py: StageOps.close: use": _OTHERS,
    "training/release.py: _order_streams: wait": "Autograd has them wait where their sums go through a transpose.",
    "training/ledger.py: Ledger.leave: hold": "What a layer on a stream of its own has saved: in its pool.",
    "deferral/stash.py: Stash.leave: hold": "The same, drop-in.",
    "deferral/stash.py: Stash.gradients: wait": "For a weight whose gradient is B's in another place.",
    "engine/ops.py: StageOps.phony: use": _OTHERS,
    "engine/parts.py: _Cut.join: use": _OTHERS,
    "engine/dropin.py: Beside.hold: hold": "A value that no node saves, freed while a later stage's stream reads it.",
    "training/release.py: _sum: use": "A weight of several stages, which _order_streams has made ready.",
    "training/release.py: _sum: hold": "The same: its sum is let go of by whoever takes it.",
}


def _place(verb: str) -> str:
    """Where the verb was called from: file and function, not the line, which every edit moves; "" outside of splitpipe.
    """
    function = _function(sys._getframe(2).f_code)
    return function and f"{function}: {verb}"


@lru_cache(None)
def _function(code: CodeType) -> str:
    name = Path(code.co_filename).resolve()
    if not name.is_relative_to(ROOT):
        return ""
    return f"{name.relative_to(ROOT)}: {getattr(code, 'co_qualname', code.co_name)}"


@contextmanager
def watched(without: str | None = None) -> Iterator[dict[str, int]]:
    """Counts the calls of each place inside the block; those of one place have no effect, or ``READS`` has none."""
    counts: dict[str, int] = {}
    with ExitStack() as patches:
        for verb, nothing in VERBS.items():
            real = getattr(stream, verb)

            def called(*args: Any, verb: str = verb, real: Any = real, nothing: Any = nothing) -> Any:
                place = _place(verb)
                counts[place] = counts.get(place, 0) + 1
                return (nothing if place == without else real)(*args)

            patches.enter_context(mock.patch.object(stream, verb, called))
        if without == READS:
            patches.enter_context(mock.patch.object(streams.Reads, "add", lambda self, tensors: None))
        yield counts


def few(*subjects: str) -> Iterator[Case]:
    """Some cases of every sort, with more rows than weights, so that weight gradients are not all left to the end."""
    groups = [["checkpoint", "backward", "schedule"], *pairs([*WAYS])]
    for case in some(subjects, *groups, chunks=2, checkpoint=("never", "always")):
        yield replace(case, rows=64)
    # No copy of the input is waited for, and no checkpoint: what W writes to was just let go of by B.
    more = [Case(subject, DEVICES, 2, "never", "split", None, own=False, rows=64) for subject in subjects]
    yield from [case for case in more if case.possible]
