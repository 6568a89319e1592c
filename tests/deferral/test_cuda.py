"""The split engine on a GPU, several stages on one: its streams change nothing, and the host never waits."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from tests.gpu.syncs import syncs

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHECKPOINT = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 4)
    )


def pair(**options: Any) -> tuple[nn.Sequential, SplitPipe]:
    module = layers().double()
    plain = copy.deepcopy(module).cuda()
    return plain, SplitPipe(module, [2, 2, 2], devices=["cuda:0"] * 3, chunks=4, **options)


@pytest.fixture
def sync_is_an_error() -> Iterator[Any]:
    yield lambda: syncs("error")
    syncs("default")


@CHECKPOINT
@pytest.mark.parametrize("stash_limit", [None, 0, 5000])
@pytest.mark.parametrize("own_stream", [False, True])
def test_gradients_equal_those_of_the_module(checkpoint: str, stash_limit: int | None, own_stream: bool) -> None:
    plain, model = pair(checkpoint=checkpoint, stash_limit=stash_limit)
    caller = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    caller.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(caller):
        for _ in range(3):
            x = torch.randn(10, 4, 16, dtype=torch.float64, device="cuda")
            for module in (plain, model):
                module(x).square().sum().backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(found.grad, expected.grad, msg=lambda text: f"{name}: {text}")  # noqa: B023


@CHECKPOINT
@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_the_host_waits_for_nothing_in_a_step(checkpoint: str, backward: str, sync_is_an_error: Any) -> None:
    _, model = pair(checkpoint=checkpoint, backward=backward)
    x = torch.randn(10, 4, 16, dtype=torch.float64, device="cuda")
    model(x).square().sum().backward()  # A first pass compares values, to learn.
    torch.cuda.synchronize()
    sync_is_an_error()
    model(x).square().sum().backward()
