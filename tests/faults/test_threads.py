"""Threads of the user's that meet in one model, and copies made while it has a graph: they train as the original does.
"""
from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.twin import assert_same, assert_same_tensors

BATCH = torch.linspace(-1, 1, 21).reshape(7, 3)


def layers() -> nn.Sequential:
    """With buffers, a frozen parameter, and one that two stages have."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 3), nn.Linear(3, 3))
    module[-1].weight = module[0].weight
    module[-2].bias.requires_grad_(False)
    return module


def piped(module: nn.Sequential, kind: str | None) -> SplitPipe:
    options: dict[str, Any] = {} if kind is None else {"schedule": kind, "loss_fn": F.mse_loss}
    return SplitPipe(module, [1] * 4 if kind == "zb-v" else [2, 2], devices=["cpu"] * 2, chunks=3, **options)


def loss_of(model: nn.Module, x: Tensor = BATCH) -> Tensor:
    return scheduled.loss_of(model, x, x, F.mse_loss)


def gradients(model: nn.Module) -> list[Tensor]:
    """Those of a step, and none are left behind."""
    loss_of(model).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found  # type: ignore[return-value]


def storages(model: nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", [None, "zb-v"])
def test_a_copy_made_with_a_graph_and_gradients_trains_as_the_model_and_shares_nothing_with_it(
    kind: str | None, copied: Any
) -> None:
    module = layers()
    expected, model = gradients(copy.deepcopy(module)), piped(module, kind)
    loss_of(model).backward()
    loss = loss_of(model)
    other = copied(model)
    loss.backward()
    for each in (model, other):
        each.zero_grad()
    assert not storages(model) & storages(other)
    assert other[0].weight is other[3].weight and not other[2].bias.requires_grad
    assert_same(gradients(other), expected, "gradients of the copy")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(gradients(model), expected, "gradients of the model")


def test_one_thread_goes_forward_while_another_goes_backward() -> None:
    plain, model = layers(), piped(layers(), None)
    model.load_state_dict(plain.state_dict())
    inside, done = threading.Event(), threading.Event()
    output = model(BATCH)
    output.register_hook(lambda _: (inside.set(), done.wait(60)) and None)
    thread = threading.Thread(target=F.mse_loss(output, BATCH).backward, daemon=True)
    thread.start()
    assert inside.wait(60)
    loss = loss_of(model, 2 * BATCH)
    done.set()
    thread.join(60)
    assert not thread.is_alive(), "a call hangs"
    loss.backward()
    (loss_of(plain) + loss_of(plain, 2 * BATCH)).backward()
    assert_same_tensors(model, plain)
