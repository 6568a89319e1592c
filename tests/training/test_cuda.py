"""Schedules on a GPU, several rows on one: streams change nothing, and the host never waits."""
from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, schedule
from tests.gpu.syncs import syncs
from tests.helpers.covering import graded, pairs
from tests.helpers.scheduled import NAMES, stages_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

AXES = {
    "name": schedule.names(), "own_streams": [False, True], "backward": ["split", "autograd"],
    "checkpoint": ["never", "except_last", "always"],
}


def pair(name: str, rows: int = 2, own_streams: bool = False, **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    """A module on the GPU, and its copy with a schedule whose rows are the same device, or streams of it."""
    stages = rows * stages_of(name)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()) for _ in range(stages)])
    module = module.double()
    plain = copy.deepcopy(module).cuda()
    devices: list[Any] = [torch.Stream(device="cuda:0") if own_streams else "cuda:0" for _ in range(rows)]
    return plain, SplitPipe(
        module, [1] * stages, devices=devices, chunks=4, schedule=name, loss_fn=nn.MSELoss(), **options
    )


def batch(size: int = 10) -> tuple[Tensor, Tensor]:
    return (torch.randn(size, 64, dtype=torch.float64, device="cuda") for _ in range(2))  # type: ignore[return-value]


@pytest.fixture
def sync_is_an_error() -> Iterator[Any]:
    yield lambda: syncs("error")
    syncs("default")


@graded(AXES, essence=[["checkpoint"]], thorough=[*pairs([*AXES]), ["own_streams", "backward", "checkpoint"]])
def test_losses_and_gradients_equal_those_of_the_module(
    name: str, own_streams: bool, backward: str, checkpoint: str
) -> None:
    plain, model = pair(name, own_streams=own_streams, backward=backward, checkpoint=checkpoint)
    for _ in range(3):
        x, y = batch()
        x.requires_grad_()
        loss, expected = model(x, target=y), nn.functional.mse_loss(plain(x), y)
        torch.testing.assert_close(loss, expected)
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, x, retain_graph=True)
        torch.testing.assert_close(found, wanted)
        (loss * 2).backward()
        (expected * 2).backward()
    for (key, parameter), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text: f"{key}: {text}")  # noqa: B023


@NAMES
def test_the_host_waits_for_nothing_in_a_step(name: str, sync_is_an_error: Any) -> None:
    _, model = pair(name, own_streams=True)
    x, y = batch()
    model(x, target=y).backward()
    torch.cuda.synchronize()
    sync_is_an_error()
    model(x, target=y).backward()


def test_float16_under_autocast_with_a_scaler() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    plain = copy.deepcopy(module).cuda()
    scaler = torch.amp.GradScaler("cuda")
    model = SplitPipe(module, [2, 1], devices=["cuda:0"] * 2, chunks=4, schedule="zb-h1", loss_fn=nn.MSELoss(),
                      grad_scaler=scaler)
    x, y = torch.randn(16, 64, device="cuda"), torch.randn(16, 64, device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(x, target=y)
    scaler.scale(loss).backward()
    nn.functional.mse_loss(plain(x), y).backward()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.grad / scaler.get_scale(), other.grad, rtol=2e-2, atol=1e-4)


def test_a_recording_has_the_devices_times_and_memory() -> None:
    _, model = pair("zb-h1", own_streams=True)
    x, y = batch(64)
    model(x, target=y).backward()
    with model.record() as timeline:
        for _ in range(3):
            model(x, target=y).backward()
    assert timeline.steps == 3 and timeline.makespan > 0
    assert all(memory is not None and memory > 0 for memory in timeline.memory)
    assert all(end >= start for row in timeline.spans for _, start, end in row)


@pytest.fixture
def green_contexts() -> Iterator[list[Any]]:
    """Four contexts, which outlive all that was on their streams: they take these along when they are dropped."""
    contexts = pytest.importorskip("torch.cuda.green_contexts")
    if not contexts.SUPPORTED:
        pytest.skip("this build of torch has no green contexts")
    # All with the same multiprocessors, as torch gives them.
    created = [contexts.GreenContext.create(num_sms=16, device_id=0) for _ in range(4)]
    yield created
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # Memory that one of their streams has used waits for an event there.


def test_the_stream_of_a_green_context_is_a_device(green_contexts: list[Any]) -> None:
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).double()
    plain = copy.deepcopy(module).cuda()
    streams = [context.Stream() for context in green_contexts]
    model = SplitPipe(module, [1] * 4, devices=streams, chunks=8, schedule="zb-h1", loss_fn=nn.MSELoss())
    x, y = batch(16)
    model(x, target=y).backward()
    nn.functional.mse_loss(plain(x), y).backward()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad)
