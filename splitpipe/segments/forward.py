"""Drop-in: microbatches walk through the stages in clock cycles, and one autograd graph is laid down behind them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from splitpipe.core import stream
from splitpipe.core.mailbox import Mailbox
from splitpipe.core.transfer import Route, Routes, depart, leave
from splitpipe.core.worker import Pool
from splitpipe.dropin.border import AHEAD, LOST
from splitpipe.segments import outputs
from splitpipe.segments.homes import Homes
from splitpipe.segments.stages import Run
from splitpipe.segments.walk import Walk


class DropinWork:
    """The work of any module's stages: microbatches that go on to their next border."""

    def __init__(self, run: Run, walks: Sequence[Walk], threads: Pool) -> None:
        self._run = run
        self._walks = walks
        self._threads = threads

    def inputs(self) -> list[bool]:
        """A word for each microbatch: it may start."""
        return [True] * len(self._walks)

    def borders(self, mail: Sequence[Mailbox]) -> list[SegmentBorder]:
        """The border of each stage."""
        return [SegmentBorder(self._run, mail, stage) for stage in range(len(self._run.stages))]

    def task(self, i: int, j: int, given: bool, inside: bool = False) -> Any:
        """Microbatch i goes on to its border, or to its end."""

        def go() -> Any:
            self._walks[i].coroutine.resume(self._threads)
            return self._walks[i].taken()

        return go


class SegmentBorder:
    """Tells the next stage that a microbatch is at its border; what crosses is fetched by whoever uses it."""

    def __init__(self, run: Run, mail: Sequence[Mailbox], stage: int) -> None:
        self._mail = mail
        self._index = stage
        self._last = stage + 1 == len(mail)
        self._grad = run.call.state.grad
        self.outputs: dict[int, Any] = {}

    def take(self, i: int) -> bool | None:
        """True when the microbatch is at the border; None if it is lost."""
        j, own = self._index, self._mail[self._index]
        message = own.take((j, i))
        if not self._grad:
            if j:
                self._mail[j - 1].put(("credit", j - 1, i), None)
            if not self._last and i >= AHEAD:
                own.take(("credit", j, i - AHEAD))
        return None if message is LOST else True

    def give(self, i: int, result: Any) -> None:
        """The microbatch has come to the next border."""
        if self._last:
            self.outputs[i] = result
        else:
            self._mail[self._index + 1].put((self._index + 1, i), True)

    def lose(self, i: int) -> None:
        """The microbatch will come to none."""
        if not self._last:
            self._mail[self._index + 1].put((self._index + 1, i), LOST)


class Events:
    """The ends of a microbatch's segments on their streams: a copy of what one has made waits for that alone."""

    def __init__(self) -> None:
        self._ends: dict[int, torch.Event | None] = {}

    def mark(self, walk: Walk) -> None:
        """A segment has ended."""
        self._ends[walk.stage] = stream.mark(walk.run.stages[walk.stage].compute)

    def of(self, stage: int) -> torch.Event | None:
        """The end of a segment; None if it has not ended, or none is known."""
        return self._ends.get(stage)

    def spent(self) -> None:
        """Gives the events back: no copy will wait for them any more."""
        for event in self._ends.values():
            stream.spent(event)
        self._ends = {}


class Laying:
    """Copies values to the devices of later stages, as nodes of the one graph."""

    def __init__(self, walk: Walk, homes: Homes, routes: Routes | None, events: Events) -> None:
        self._walk = walk
        self._homes = homes
        self._routes = routes
        self._events = events

    #: All stages have one graph: a backward of the module's own goes through all of it.
    differentiates: Callable[..., None] | None = None

    def foreign(self, x: Tensor) -> bool:
        """True for a tensor on the device of another stage."""
        return self._homes.elsewhere(x, self._walk.stage)

    def maker(self, x: Tensor) -> int:
        """The last stage before this one on the tensor's device."""
        return self._homes.stage_on(x.device, self._walk.stage)

    def state(self, x: Tensor) -> Tensor | None:
        """A parameter's copy, whose gradient goes home once, or a buffer's."""
        if not isinstance(x, Parameter) and not self._walk.run.is_buffer(x):
            return None
        if self._walk.run.adopted(x, self._walk.stage):
            return x
        source = self._homes.stage_on(x.device, self._walk.stage)
        return self._walk.run.copied(x, self._walk.stage, lambda x: self.carry(x, source))

    def carry(self, x: Tensor, source: int) -> Tensor:
        """The value on the present stage's device, after the end of the segment that it was last used in."""
        route: Route | None = None if self._routes is None else self._routes.of(source, self._walk.stage)
        if route is None or x.device != route.source.device:
            return x
        with torch.set_grad_enabled(self._walk.run.call.state.grad):
            y = leave(x, route.source, route.target, self._events.of(source))
            y = depart(y, route.source, route.target)
            event = stream.mark(route.target.copy)
            arrived: Tensor = route.arrive([y], event)[0]
            return arrived


def flat(walk: Walk, output: Any) -> tuple[list[Any], Any]:
    """A microbatch's output, taken apart, with its tensors where they were last."""
    leaves, nesting = outputs.flatten(output)
    leaves = [walk.values.latest(x) if isinstance(x, Tensor) else x for x in leaves]
    if walk.run.ranked:
        walk.rank(leaves, len(walk.run.stages) - 1)
    return leaves, nesting
