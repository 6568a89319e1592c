"""Makespans of training steps, in virtual time: a microbatch takes a unit on each stage for each of F, B and W."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from splitpipe import SplitPipe, schedule

from .log import Launch, launches, softcuda
from .replay import replay
from .subjects import WIDTH, chain, mean

ROWS = 2
#: Multiplications of a linear layer, for one microbatch.
UNIT = ROWS * WIDTH * WIDTH
#: Of the steps after the first, which has to find things out.
STEPS = 2


def _parts(op: schedule.Op) -> list[schedule.Op]:
    return [op._replace(kind="B"), op._replace(kind="W")] if op.kind == "BW" else [op]


@dataclass(frozen=True)
class Way:
    """A way to take a step."""

    devices: int
    chunks: int
    copy: float = 0.0  # How long a copy takes, in units.
    schedule: str | None = None  # None: the drop-in.
    backward: Any = "split"
    own: bool = False  # Whether the devices are streams of their own.
    limit: int | None = None  # Of the stash, in bytes; 0: weight gradients are computed at once.
    checkpoint: Any = "never"

    def planned(self) -> float:
        """What the simulator says. A gradient leaves for the stage before when B ends, also where W follows at once."""
        options = {"split": self.backward == "split"} if self.schedule is None else {}
        order = schedule.build(self.schedule or "gpipe", self.devices, self.chunks, **options)
        share = order.stages // self.devices
        if self.backward == "split":
            rows = [[each for op in row for each in _parts(op)] for row in order.rows]
            order = schedule.Schedule(rows, order.placement)
        costs = schedule.Costs(forward=share, backward_input=share, backward_weight=share, copy=self.copy)
        return schedule.simulate(order, costs).makespan

    def cost(self, launch: Launch) -> float:
        """How long a launch takes, in units."""
        return self.copy if launch.kind == "copy" and launch.bytes > 8 else launch.multiplications / UNIT

    def taken(self, steps: int = STEPS) -> list[float]:
        """How long the devices compute in each of some steps."""
        stages = self.devices * (schedule.build(self.schedule, 1, 1).stages if self.schedule else 1)
        options: dict[str, Any] = {} if self.schedule is None else {"schedule": self.schedule, "loss_fn": mean}
        devices: list[Any] = [f"cuda:{number}" for number in range(self.devices)]
        if self.own:
            devices = [torch.Stream(device=name, priority=-1) for name in devices]
        model = SplitPipe(chain(stages), [1] * stages, devices=devices, chunks=self.chunks, checkpoint=self.checkpoint,
                          backward=self.backward, stash_limit=self.limit, **options)
        x, y = torch.randn(ROWS * self.chunks, WIDTH), torch.randn(ROWS * self.chunks)
        given, target = x.to(model.devices[0]).requires_grad_(), y.to(model.devices[-1])
        found = []
        for number in range(steps + 1):
            softcuda.log()
            loss = mean(model(given), target) if self.schedule is None else model(given, target=target)
            loss.backward()
            model.zero_grad()
            if number:
                # The last scalars on their way to whoever asked for the loss keep no device waiting.
                spans = replay(launches(), self.cost)
                found.append(max(span.end for span in spans if span.engine == "compute"))
        return found


#: One of each kind, whose makespans are those that ``simulate`` finds.
WAYS = (*(Way(4, 8, copy, None, backward, own)
          for backward in ("autograd", "split") for copy, own in ((0.0, False), (0.5, True))),
        *(Way(4, 8, 0.25, name, own=True) for name in ("gpipe", "1f1b", "zb-h1", "v-half", "zb-v")),
        Way(4, 8, 0.0, "zb-h1"))
