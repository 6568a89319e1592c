"""Every allocation of a step fails once: the caller is told, and nothing is half changed.

In a process of its own: a thread of autograd's may still hold what a failed backward raised, and aborts a process that
ends meanwhile, with a module of torch's alone, too.
"""
from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import subprocess
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.devices.log import failing
from tests.devices.subjects import WIDTH, linear, mean
from tests.tools.covered import ROOT, environment, measured

pytestmark = [pytest.mark.cuda, pytest.mark.devices(2), pytest.mark.fake, pytest.mark.thorough]

WAYS: tuple[dict[str, Any], ...] = ({"checkpoint": "always"}, {"checkpoint": "always", "backward": "autograd"},
                                    {"checkpoint": "never", "schedule": "zb-h1", "loss_fn": mean})


def test_an_allocation_that_fails_anywhere_reaches_the_caller_and_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.devices.test_failing"],
        cwd=ROOT, capture_output=True, text=True, env=environment(), check=False,
    )
    assert done.returncode == 0, done.stderr


def verify(options: dict[str, Any]) -> None:
    """Has each allocation of a step fail in turn; a step without a fault follows each."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh()), linear())
    model = SplitPipe(module, [1, 1], devices=["cuda:0", "cuda:1"], chunks=2, deferred_batch_norm=True, **options)
    x, y = torch.randn(4, WIDTH, device="cuda:0"), torch.randn(4, device="cuda:1")

    def step() -> None:
        loss = model(x, target=y) if "schedule" in options else mean(model(x), y)
        loss.backward()

    before = state(model)
    for _ in range(2):  # What is kept from call to call, as buffers for recomputations, is there after the second.
        reset(model, before)
        step()
    after = state(model)
    bytes_held = reset(model, before)
    for number in itertools.count(1):
        raised = failing(number, step)
        if raised is None:
            break
        assert raised == "no memory", f"allocation {number}: {raised or 'no error'}"
        found = state(model)
        # As of plain autograd: what has a gradient has all of it.
        assert all(torch.allclose(found[name], after[name]) for name in found.keys() - before.keys()), number
        assert any(all(torch.allclose(found[name], its[name]) for name in before) for its in (before, after)), number
        reset(model, before)
        step()
        found = state(model)
        assert found.keys() == after.keys() and all(torch.allclose(found[name], after[name]) for name in after), number
        del found
        assert reset(model, before) == bytes_held, number  # Autograd's threads have let go of the failure by now.
    assert number > 50


def state(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and the gradients that there are."""
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: buffer.clone() for name, buffer in model.named_buffers()}, **gradients}


def reset(model: nn.Module, buffers: dict[str, Tensor]) -> list[int]:
    """Puts a model back to where it was: the bytes that each device then has."""
    model.zero_grad()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    gc.collect()
    return [torch.cuda.memory_allocated(device) for device in range(2)]


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # The collector, which is called all the time, need not look through what was imported.
    code = 1
    try:
        with measured():
            for way in WAYS:
                faulthandler.dump_traceback_later(300, exit=True)
                verify(way)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
