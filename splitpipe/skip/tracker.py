"""The box, which holds a skip from the layer that stashes it to the layer that pops it.

Code that runs layers separately opens a box for each run (``opened``): it puts in the skips that they pop, and takes
out the skips that they stash. Layers without an opened box share one that belongs to their thread.
"""
from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import local
from uuid import UUID, uuid4


@dataclass(frozen=True)
class Namespace:
    """Distinguishes skips with the same name, in ``layer.isolate(namespace)``.

    Each namespace differs from every other, and equals its copies, including pickled ones: a copied model has the
    connections of the original.

    Example:
        >>> import copy
        >>> namespace = Namespace()
        >>> copy.deepcopy(namespace) == namespace, Namespace() == namespace
        (True, False)
    """

    id: UUID = field(default_factory=uuid4, init=False)


Key = tuple[Namespace | None, str]
Box = dict[Key, object]

#: The box that is open in this context, if any.
opened: ContextVar[Box | None] = ContextVar("splitpipe.skip.opened", default=None)
_unopened = local()  # The box of each thread.


def current() -> Box:
    """The current box."""
    box = opened.get()
    return vars(_unopened).setdefault("box", {}) if box is None else box
