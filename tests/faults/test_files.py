"""Copies and checkpoints made at any moment of training: they train as the original, and share nothing with it."""
from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.twin import assert_same, assert_same_tensors

BATCH = torch.linspace(-1, 1, 21).reshape(7, 3)
SCHEDULED: dict[str, Any] = {"schedule": "zb-h1", "loss_fn": F.mse_loss}
KINDS = pytest.mark.parametrize("options", [{}, SCHEDULED], ids=["drop-in", "scheduled"])


def layers() -> nn.Sequential:
    """With buffers, a frozen parameter, and one that two stages have."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[4].weight = module[0].weight
    module[2].bias.requires_grad_(False)
    return module


def piped(module: nn.Sequential, **options: Any) -> SplitPipe:
    return SplitPipe(module, **{"balance": [2, 3], "devices": ["cpu"] * 2, "chunks": 2, **options})


def loss_of(model: nn.Module) -> Tensor:
    return scheduled.loss_of(model, BATCH, BATCH, F.mse_loss)


def trained(model: nn.Module, steps: int = 2) -> dict[str, Any]:
    """The state after some steps, and the last gradients."""
    # Not Adam: behind BatchNorm, the gradient of a bias is rounding alone.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    grads = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {**copy.deepcopy(model.state_dict()), **copy.deepcopy(grads)}


def saved(value: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


HOWS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda model: saved(model, weights_only=False),
    **{
        f"pickle {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in (2, pickle.HIGHEST_PROTOCOL)
    },
}
COPIED = pytest.mark.parametrize("how", HOWS)


def storages(model: nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def assert_apart(model: nn.Module, copied: nn.Module, start: nn.Module) -> None:
    """The copy is the model as it was, and training one does nothing to the other."""
    assert not storages(model) & storages(copied)
    assert copied[4].weight is copied[0].weight  # type: ignore[index]
    assert not copied[2].bias.requires_grad  # type: ignore[index]
    expected = trained(copy.deepcopy(start))
    before = copy.deepcopy(model.state_dict())
    assert_same(trained(copied), expected, "the copy, trained")
    assert_same(dict(model.state_dict()), dict(before), "the model")
    assert_same(trained(model), expected, "the model, trained")


def twins(**options: Any) -> tuple[SplitPipe, SplitPipe]:
    """Equal ones; neither was used."""
    torch.manual_seed(1)
    module = layers()
    return piped(module, **options), piped(copy.deepcopy(module), **options)


@COPIED
@KINDS
def test_a_copy_made_with_the_graph_alive_and_gradients_set(options: dict[str, Any], how: str) -> None:
    model, start = twins(deferred_batch_norm=True, **options)
    loss_of(model).backward()
    loss = loss_of(model)
    start.load_state_dict(model.state_dict())
    copied = HOWS[how](model)
    assert all(parameter.grad is None for parameter in copied.parameters()), "as of any module's copy"
    kept = copy.deepcopy(model.state_dict())
    loss.backward()
    assert_same(dict(copied.state_dict()), dict(kept), "the copy")
    model.zero_grad()
    assert_apart(model, copied, start)


# Checkpoints


OTHERS: dict[str, dict[str, Any]] = {
    "other balance": {"balance": [4, 1]},
    "one stage": {"balance": [5], "devices": ["cpu"], "chunks": 1},
    "more microbatches": {"chunks": 3},
    "a schedule": {"balance": [1, 2, 1, 1], "schedule": "zb-v", "loss_fn": F.mse_loss},
}


@pytest.mark.thorough
@pytest.mark.parametrize("other", OTHERS)
@KINDS
def test_a_checkpoint_of_weights_and_optimizer_goes_on_in_another_pipeline(
    options: dict[str, Any], other: str
) -> None:
    torch.manual_seed(1)
    module = layers()
    model = piped(module, deferred_batch_norm=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
    resumed = piped(layers(), deferred_batch_norm=True, **OTHERS[other])
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    resumed.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    assert_same(dict(resumed.eval().state_dict()), dict(model.eval().state_dict()), "state")
    for _ in range(2):
        for each, its in (model, optimizer), (resumed, resumed_optimizer):
            its.zero_grad()
            loss_of(each).backward()  # In eval mode BatchNorm does not depend on the microbatches.
            its.step()
    assert_same_tensors(resumed, model)
    assert_same(resumed_optimizer.state_dict(), optimizer.state_dict(), "optimizer")


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@KINDS
def test_assigned_weights_are_the_models_own_and_train(options: dict[str, Any], mmap: bool, tmp_path: Path) -> None:
    torch.save(layers().state_dict(), tmp_path / "checkpoint")
    plain, model = layers(), piped(layers(), deferred_batch_norm=True, **options)
    loss_of(model).backward()  # So that workers, aliases and plans are there.
    for each in plain, model:
        state = torch.load(tmp_path / "checkpoint", weights_only=True, mmap=mmap)
        each.load_state_dict(state, assign=True)
        assert each[2].weight.data_ptr() == state["2.weight"].data_ptr()
        # As torch has it: one name after the other is assigned, so a shared parameter is two in the same memory.
        assert each[0].weight is not each[4].weight
        trained(each.eval())
    assert_same_tensors(model, plain)
