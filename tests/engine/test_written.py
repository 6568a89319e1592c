"""A buffer that code between blocks of several stages writes to has one worker for all of them."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe


class Counting(nn.Module):
    """Counts in a buffer of its own before each layer, in training."""

    count: Tensor

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.counts = counts
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            if self.counts and self.training:
                self.count += 1
            x = layer(x)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("evaluated", [False, True], ids=["train", "eval first"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_that_write_to_one_buffer_share_a_worker(schedule: str, evaluated: bool) -> None:
    workers = {}
    for counts in (False, True):
        model = SplitPipe(
            Counting(counts), cuts=["layers.1", "layers.2"], devices=["cpu"] * 3, chunks=2, schedule=schedule
        )
        for _ in range(2 * evaluated):
            with torch.no_grad():
                model.eval()(torch.randn(4, 4))
            model.train()
        for _ in range(2):
            model(torch.randn(4, 4))["loss"].backward()
        workers[counts] = model._runtime._resources.workers
        assert model.count.tolist() == [3.0 * 2 * 2 * counts] * 4
    assert workers == {False: [0, 1, 2], True: [0, 0, 0]}
