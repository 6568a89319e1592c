"""Allocations that fail, each one of a step in turn, whichever thread and node it is in, as a line of JSON.

In a process of its own: a thread of autograd's may still hold what a failed backward raised, and aborts a process that
ends meanwhile, with a module of torch's alone, too.
"""
from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.covering import covering, pairs
from tests.tools.covered import measured

from .log import failing
from .subjects import WIDTH, linear, mean

#: Seconds that one way may take: one that hangs says where.
LIMIT = 300


def ways() -> dict[str, dict[str, Any]]:
    """Options of a SplitPipe, by name."""
    axes = {"schedule": (None, "1f1b", "zb-h1"), "backward": ("split", "autograd"), "checkpoint": ("never", "always")}
    found = {}
    for schedule, backward, checkpoint in covering(axes, pairs([*axes])):
        more = {} if schedule is None else {"schedule": schedule, "loss_fn": mean}
        found[f"{schedule}, {backward}, {checkpoint}"] = {"backward": backward, "checkpoint": checkpoint, **more}
    return found


def tried(options: dict[str, Any]) -> dict[str, Any]:
    """How many allocations a step has, and what was wrong when one of them failed, and how often."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh()), linear())
    model = SplitPipe(module, [1, 1], devices=["cuda:0", "cuda:1"], chunks=2, deferred_batch_norm=True, **options)
    x, y = torch.randn(4, WIDTH, device="cuda:0"), torch.randn(4, device="cuda:1")

    def step() -> None:
        loss = model(x, target=y) if "schedule" in options else mean(model(x), y)
        loss.backward()

    before = _state(model)
    for _ in range(2):  # What is kept from call to call, as buffers for recomputations, is there after the second.
        _held(model, before)
        step()
    after = _state(model)
    held, faults = _held(model, before), Counter[str]()
    for number in itertools.count(1):
        raised = failing(number, step)
        if raised is None:
            break
        faults[raised or "no error"] += raised != "no memory"
        found = _state(model)
        # As of plain autograd: what has a gradient has all of it.
        faults.update(name for name in found.keys() - before.keys() if not torch.allclose(found[name], after[name]))
        if not any(all(torch.allclose(found[name], its[name]) for name in before) for its in (before, after)):
            faults["buffers"] += 1
        _held(model, before)
        step()
        found = _state(model)
        faults.update(
            f"{name}, next" for name, x in after.items() if name not in found or not torch.allclose(found[name], x)
        )
        del found
        faults["memory"] += _held(model, before) != held  # Autograd's threads have let go of the failure by now.
    return {"failures": number - 1, "faults": +faults}


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and the gradients that there are."""
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: buffer.clone() for name, buffer in model.named_buffers()}, **gradients}


def _held(model: nn.Module, buffers: dict[str, Tensor]) -> list[int]:
    """Bytes of each device, of a model that is put back to where it was."""
    model.zero_grad()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    gc.collect()
    return [torch.cuda.memory_allocated(device) for device in range(2)]


def main() -> None:
    """Tries each way."""
    found = {}
    for way, options in ways().items():
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        found[way] = tried(options)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # The collector, which is called all the time, need not look through what was imported.
    with measured():
        main()
    os._exit(0)
