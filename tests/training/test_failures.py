"""A pass that fails: which of several errors is raised, what is stopped and closed, and who may call a model."""
from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, is_recomputing
from splitpipe.training.step import Trainer
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors


def run(model: SplitPipe) -> Tensor:
    loss: Tensor = model(torch.randn(7, 4), target=torch.randn(7, 4))
    return loss


def test_a_layer_that_writes_to_what_another_needs_is_told_of_it() -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y.data.mul_(1)
            with torch.no_grad():
                y.add_(1)
            return y

    _, model = twins(nn.Sequential(nn.Linear(4, 4), Spoils()), "1f1b", 2, loss_fn=F.mse_loss, chunks=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as info:
        run(model)
    assert re.search(r"in 1BW\d, stage 1", "\n".join(info.value.__notes__))


def test_a_child_of_a_fork_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = twins(mlp(2), "1f1b", 2, loss_fn=F.mse_loss, chunks=4)
    run(model)
    held = model._runtime._lock.lock  # As a thread of the parent's has it.
    threading.Thread(target=held.acquire).start()
    monkeypatch.setattr("os.getpid", lambda: -1)
    run(model).backward()


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_hooks_are_put_back_after_an_interrupt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    _, model = twins(layers, name, loss_fn=F.mse_loss, chunks=4, backward="autograd")  # Which parks each hook.
    x = torch.randn(8, 4)
    seen: list[Tensor] = []
    hooks = [parameter.register_hook(seen.append) for parameter in model.parameters()]
    recover, calls = Trainer.recover, []

    def interrupted(trainer: Trainer) -> None:
        calls.append(trainer)
        if len(calls) == 2:  # At the end of the pass.
            raise KeyboardInterrupt
        recover(trainer)

    monkeypatch.setattr(Trainer, "recover", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x, target=x)
    F.mse_loss(nn.Sequential(*model)(x), x).backward()
    assert len(seen) == len(hooks)
    model(x, target=x).backward()
    assert len(seen) == 2 * len(hooks)


class Box:
    """An object that pytree knows nothing of."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_gradient_through_an_object_between_stages_is_an_error(checkpoint: Any) -> None:
    class Boxes(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x * 1, Box(super().forward(x))

    class Opens(nn.Module):
        def forward(self, given: Any) -> Tensor:
            x: Tensor = given[0] + given[1].x
            return x

    module = nn.Sequential(nn.Linear(4, 4), Boxes(4, 4), Opens())
    plain, model = twins(module, "1f1b", 3, loss_fn=F.mse_loss, chunks=2, checkpoint=checkpoint)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="earlier stages would lose it.*not inside other objects"):
        model(x, target=y)
    for either in plain, model:
        F.mse_loss(either(x), y).backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_tensor_that_a_hook_has_kept_leads_to_no_gradient(name: str) -> None:
    _, model = twins(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), name, 2, loss_fn=F.mse_loss, chunks=2)
    kept: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda _, given: None if is_recomputing() else kept.append(given[0]))
    model(torch.randn(4, 4), target=torch.randn(4, 4))
    for x in kept:
        with pytest.raises(RuntimeError, match="earlier stages would lose it"):
            (x * 2).sum().backward()
    assert len(kept) == 2


def test_a_tensor_that_a_hook_has_kept_of_a_recomputation() -> None:
    _, model = twins(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), "gpipe", 2, loss_fn=None, checkpoint="always")
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda _, given, output: kept.append(output) if is_recomputing() else None)
    model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        kept[0].sum().backward()
