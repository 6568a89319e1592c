"""The places in splitpipe that give streams their order, taken away one at a time."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from splitpipe import stream
from splitpipe.deferral import lane

from .cases import Case, grid, run

#: What order is made of: each verb, and what it is without effect.
VERBS: dict[str, Callable[..., Any]] = {
    "wait": lambda *_: None,
    "wait_for": lambda *_: None,
    "hold": lambda *_: None,
    "use": lambda *_: nullcontext(),
}
ROOT = Path(stream.__file__).parent
#: What the side stream may still be reading, held until the compute stream has waited for it.
HELD = "deferral/lane.py: Held.hold"
#: Places without which some case has a hazard.
CAUGHT = (
    "stage.py: Task.__call__: use",
    "stage.py: _Rerun.__call__: use",
    "transfer.py: Leave.forward: wait",
    "transfer.py: Wait.forward: wait_for",
    "transfer.py: Route.carry: wait",
    "transfer.py: depart: use",
    "transfer.py: move: use",
    "transfer.py: move: hold",
    "post.py: Post.take: wait_for",
    "passes.py: Passes._roots: use",
    "passes.py: Passes.weigh: use",
    "deferral/stash.py: Stash._compute: wait_for",
    "setting.py: Setting.begin: wait",
    "transfer.py: move: wait",
    "training.py: _Pass.finish: use",
    "training.py: _Pass._given: use",
    HELD,
)
#: Others: those without which a step takes longer, and those that no case here has shown to be needed.
KNOWN = (
    *CAUGHT,
    "deferral/lane.py: Lane.use: use",
    "border.py: Border._fork: use",
    "border.py: Border._behind.<locals>.through: use",
    "passes.py: Passes.backward: use",
    "setting.py: Setting.end: wait",
    "deferral/stash.py: flush: use",
    "deferral/lane.py: Held.release: wait_for",
    "transfer.py: leave: use",
    "transfer.py: leave: wait",
    "transfer.py: arrive: use",
    "transfer.py: arrive: wait_for",
    "transfer.py: Wait.forward: wait",
    "border.py: Border._join: use",
    "passes.py: Passes.forward: use",
    "passes.py: Passes.close: use",
    "transfer.py: hand_over: hold",
    "transfer.py: _waited: wait",
    "harvest.py: _meet: wait",
)


def _place(verb: str) -> str:
    """Where the verb was called from: file and function, not the line, which every edit moves."""
    frame = sys._getframe(2)
    name = Path(frame.f_code.co_filename).resolve()
    where = name.relative_to(ROOT) if name.is_relative_to(ROOT) else name.name
    return f"{where}: {getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}: {verb}"


@contextmanager
def watched(without: str | None = None) -> Iterator[dict[str, int]]:
    """Counts the calls of each place inside the block; those of one place have no effect.

    Args:
        without: that place, or ``HELD`` for the references that weight gradients hold.
    """
    counts: dict[str, int] = {}
    patches = []
    for verb, nothing in VERBS.items():
        real = getattr(stream, verb)

        def called(*args: Any, verb: str = verb, real: Any = real, nothing: Any = nothing) -> Any:
            place = _place(verb)
            counts[place] = counts.get(place, 0) + 1
            return (nothing if place == without else real)(*args)

        patches.append(mock.patch.object(stream, verb, called))
    if without == HELD:
        patches.append(mock.patch.object(lane.Held, "hold", lambda self, tensors: None))
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in reversed(patches):
            patch.stop()


def few() -> list[Case]:
    """Some cases of every sort."""
    return [case for case in grid(stages=(4,), chunks=(2,)) if case.checkpoint != "except_last"]


def places(case: Case) -> set[str]:
    """The places that a case comes by."""
    with watched() as counts:
        run(case)
    return set(counts)
