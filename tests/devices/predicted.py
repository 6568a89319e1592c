"""Bytes that a plan predicts for each device, beside those that torch's allocator counts."""
from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.balance.rig import Chain
from splitpipe.balance.survey import survey
from splitpipe.core.stream import Place
from splitpipe.planner.choose import choose
from splitpipe.planner.measure import profile
from tests.gpu.checks import squared

WIDTH = 64
ROWS = 256
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "v-half", "zb-v")


class Block(nn.Module):
    """Two linear layers behind a norm, and past them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def compared(by_cuts: bool = False) -> Iterator[tuple[str, list[float]]]:
    """For each way to run the module on two devices: predicted bytes by counted ones."""
    torch.manual_seed(0)
    kind = Chain if by_cuts else nn.Sequential
    module = kind(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, WIDTH))
    x, y = torch.randn(2, ROWS, WIDTH).unbind()
    measured = profile(survey(module, x), y, squared, [Place(torch.device("cpu"))] * 2, [8], compile=False,
                       memory=[math.inf] * 2, optimizer_state=0.0, seconds=0.0)
    # With times of their own, layers would be cut by luck.
    even = {chunks: tuple(replace(layer, forward=1, backward_input=1, backward_weight=1) for layer in layers)
            for chunks, layers in measured.layers.items()}
    measured = replace(measured, layers=even)
    for choice in choose(measured, schedules=SCHEDULES, tries=0):
        way = choice.candidate
        model = SplitPipe(copy.deepcopy(module), cuts=[measured.names[start] for start in choice.cuts[1:-1]],
                          devices=["cuda:0", "cuda:1"], chunks=way.chunks, checkpoint=way.checkpoint,
                          schedule=way.schedule, loss_fn=squared)
        counted = _counted(lambda x, y, model=model: model(x, target=y), model, x, y)
        yield f"{way}{', by cuts' * by_cuts}", [most / real for most, real in zip(choice.memory, counted)]


def _counted(step: Callable[[Tensor, Tensor], Tensor], model: nn.Module, x: Tensor, y: Tensor) -> list[int]:
    """The most bytes of each device in a step: parameters, gradients, and what microbatches hold."""
    x, y = x.to("cuda:0"), y.to("cuda:1")
    found = [0, 0]
    for _ in range(2):  # The first one makes what stays.
        before = [torch.cuda.memory_allocated(device) for device in range(2)]
        for device in range(2):
            torch.cuda.reset_peak_memory_stats(device)
        step(x, y).backward()
        own = [sum(p.nbytes for p in model.parameters() if p.device.index == device) for device in range(2)]
        found = [own[device] + torch.cuda.max_memory_allocated(device) - before[device] for device in range(2)]
        model.zero_grad(set_to_none=True)
    return found
