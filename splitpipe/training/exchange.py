"""The gradients on their way between the stages of a step.

An op begins when those that send it something have ended (see ``engine.executor``), so nothing waits here.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.stream import Stream
from splitpipe.core.transfer import Routes

Grads = list[Tensor | None]


class Exchange:
    """The gradients of one step.

    Args:
        computes: the stream on which each stage computes.
        routes: those between the stages; None if all are on the CPU.
        side_by_side: whether several ops run at the same time.
    """

    def __init__(self, computes: Sequence[Stream], routes: Routes | None, side_by_side: bool) -> None:
        self.side_by_side = side_by_side
        self._computes = computes
        self._routes = routes
        self._sent: dict[Hashable, tuple[Grads, torch.Event | None]] = {}

    def send(
        self, source: int, target: int, key: Hashable, grads: Grads,
        timed: Callable[[Stream, bool], None] | None = None,
    ) -> None:
        """Sends gradients from one stage to another, each key once; ``timed``: see ``Route.carry``."""
        route = None if self._routes is None else self._routes.of(source, target)
        event = None
        if route is not None:
            grads, event = route.carry(grads, timed)
        self._sent[key] = grads, event  # One atomic step.

    def receive(self, target: int, key: Hashable) -> Grads:
        """Receives gradients that were sent to a stage, whose stream waits for them."""
        grads, event = self._sent.pop(key)
        if event is not None:
            stream.wait_for(self._computes[target], event)
            stream.spent(event)
        return grads
