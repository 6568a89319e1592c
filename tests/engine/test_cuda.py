"""Several stages on one GPU: the host never waits in a step, and the second half is over before autograd goes on."""
from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from splitpipe import SplitPipe, schedule
from tests.helpers.covering import graded
from tests.helpers.scheduled import stages_of

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

AXES: dict[str, list[Any]] = {"name": [None, *schedule.names()], "checkpoint": ["never", "except_last", "always"],
                              "backward": ["split", "autograd"]}


def syncs(mode: str) -> None:
    """Sets what becomes of a wait of the host, "error" or "default"; once a process torch warns: it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def module(stages: int) -> nn.Sequential:
    """A stage has layers with rules and without."""
    return nn.Sequential(*(
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(),
                      nn.Unflatten(1, (4, 16))) for _ in range(stages)
    ))


@graded(AXES, essence=[["checkpoint"]], thorough=[["name"], ["checkpoint", "backward"]])
def test_the_host_waits_for_nothing_in_a_step(name: str | None, checkpoint: str, backward: Any) -> None:
    options: dict[str, Any] = {} if name is None else {"schedule": name, "loss_fn": F.mse_loss}
    stages = 2 if name is None else 2 * stages_of(name)
    devices: list[Any] = ["cuda:0" if name is None else torch.Stream(device="cuda:0") for _ in range(2)]
    model = SplitPipe(module(stages), [1] * stages, devices=devices, chunks=4, checkpoint=checkpoint,
                      backward=backward, **options)
    x, y = torch.randn(2, 10, 4, 16, device="cuda").unbind()
    try:
        for mode in ("default", "error"):  # A first pass compares values, to learn.
            torch.cuda.synchronize()
            syncs(mode)
            (F.mse_loss(model(x), y) if name is None else model(x, target=y)).backward()
    finally:
        syncs("default")


def test_the_second_half_runs_in_the_callers_thread_before_any_gradient_is_handed_over() -> None:
    """While B waits for a device, autograd goes on in this thread with what else is ready."""
    plain = module(3).double()
    model = SplitPipe(copy.deepcopy(plain), [1] * 3, devices=["cuda:0"] * 3, chunks=4, checkpoint="never")
    x = torch.randn(10, 4, 16, dtype=torch.float64, device="cuda")
    plain.cuda()
    for _ in range(10):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            model(x.requires_grad_()).square().sum().backward()
        plain(x).square().sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(found.grad, expected.grad)
