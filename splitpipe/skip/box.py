"""The box: where a skip lies between the layer that stashes it and the one that pops it.

Whoever runs layers apart from one another opens a box for each run, and so decides what they find and learns
what they leave. Layers that nobody opened a box for share one that belongs to their context.
"""
from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import get_ident
from uuid import UUID, uuid4

from splitpipe.core.thread_state import Bound


@dataclass(frozen=True, repr=False)
class Namespace:
    """Tells skips of one name apart, in ``layer.isolate(namespace)``.

    Each namespace differs from every other and equals its copies, pickled ones too: a copied model has the
    connections of the original.

    Example:
        >>> import copy
        >>> namespace = Namespace()
        >>> copy.deepcopy(namespace) == namespace, Namespace() == namespace
        (True, False)
    """

    id: UUID = field(default_factory=uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {self.id.hex[:8]}>"


Key = tuple[Namespace | None, str]
Box = dict[Key, object]

_opened: ContextVar[Box | None] = ContextVar("splitpipe.skip.opened", default=None)
_unopened: ContextVar[tuple[int, Box] | None] = ContextVar("splitpipe.skip.unopened", default=None)


def opened(box: Box) -> Bound[Box | None]:
    """Makes ``box`` the current one inside the block, for this context alone."""
    return Bound(_opened, box)


def current() -> Box:
    """The box of this moment. Ask again for each access: an empty one that nobody opened is not kept."""
    box = _opened.get()
    if box is not None:
        return box
    # A copied context shares its box with the original and may run beside it, in another thread or in turns,
    # as asyncio's tasks do. So it takes over no empty box, and none that another thread filled.
    thread, box = _unopened.get() or (None, {})
    if thread != get_ident() or not box:
        box = {}
        _unopened.set((get_ident(), box))
    return box
