"""Several stages or rows on one GPU, drop-in and with a schedule: streams change nothing, and the host never waits."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, schedule
from tests.gpu.syncs import syncs
from tests.helpers.covering import graded
from tests.helpers.scheduled import stages_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

AXES: dict[str, list[Any]] = {
    "name": [None, *schedule.names()], "own_streams": [False, True], "backward": ["split", "autograd"],
    "checkpoint": ["never", "except_last", "always"], "stash_limit": [None, 0, 5000],
}


def pair(
    name: str | None, own_streams: bool = False, rows: int = 2, **options: Any
) -> tuple[nn.Sequential, SplitPipe]:
    """A module on the GPU, and its copy whose rows are the same device, or with a schedule streams of it."""
    stages = rows * (1 if name is None else stages_of(name))
    layers = [nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(),
                            nn.Unflatten(1, (4, 16))) for _ in range(stages)]
    module = nn.Sequential(*layers).double()
    plain = copy.deepcopy(module).cuda()
    streams = own_streams and name is not None
    devices: list[Any] = [torch.Stream(device="cuda:0") if streams else "cuda:0" for _ in range(rows)]
    if name is not None:
        options |= {"schedule": name, "loss_fn": nn.MSELoss()}
    return plain, SplitPipe(module, [1] * stages, devices=devices, chunks=4, **options)


def batch(size: int = 10) -> tuple[Tensor, Tensor]:
    return (torch.randn(size, 4, 16, dtype=torch.float64, device="cuda") for _ in range(2))  # type: ignore[return-value]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, inside: bool) -> Tensor:
    loss: Tensor = model(x, target=y) if inside and isinstance(model, SplitPipe) else F.mse_loss(model(x), y)
    return loss


@pytest.fixture
def sync_is_an_error() -> Iterator[Any]:
    yield lambda: syncs("error")
    syncs("default")


@graded({axis: AXES[axis] for axis in ("name", "checkpoint", "backward")}, essence=[["checkpoint"]],
        thorough=[["name"], ["checkpoint", "backward"]])
def test_the_host_waits_for_nothing_in_a_step(
    name: str | None, checkpoint: str, backward: str, sync_is_an_error: Any
) -> None:
    _, model = pair(name, own_streams=True, checkpoint=checkpoint, backward=backward)
    x, y = batch()
    loss_of(model, x, y, name is not None).backward()  # A first pass compares values, to learn.
    torch.cuda.synchronize()
    sync_is_an_error()
    loss_of(model, x, y, name is not None).backward()


def test_the_second_half_runs_in_the_callers_thread_before_any_gradient_is_handed_over() -> None:
    """While B waits for a device, autograd goes on in this thread with what else is ready."""
    plain, model = pair(None, rows=3, checkpoint="never")
    x, _ = batch()
    for _ in range(10):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            model(x.requires_grad_()).square().sum().backward()
        plain(x).square().sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(found.grad, expected.grad)
