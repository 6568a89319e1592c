"""Steps that fail: hooks after an interrupt, and gradients that stages would lose."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe.training.capture import ParkedHooks
from splitpipe.training.step import Trainer
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import twins
from tests.helpers.twin import assert_same_tensors
from tests.promise.layers import Apply


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


def test_a_hook_parked_by_two_calls_is_restored_after_both() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), list[Tensor]()
    weight.register_hook(seen.append)
    handle = weight.register_hook(lambda grad: grad * 2)
    one, other = ParkedHooks(), ParkedHooks()
    for parked in (one, other):
        parked.park(weight)
    one.put_back()
    weight.sum().backward()
    assert not seen
    handle.remove()
    other.put_back()
    weight.sum().backward()
    assert len(seen) == 1 and weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]


class Box:
    """An object that pytree knows nothing of."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_gradient_through_an_object_between_stages_is_an_error(checkpoint: Any) -> None:
    class Boxes(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x * 1, Box(super().forward(x))

    module = nn.Sequential(nn.Linear(4, 4), Boxes(4, 4), Apply(lambda given: given[0] + given[1].x))
    plain, model = twins(module, "1f1b", 3, loss_fn=F.mse_loss, chunks=2, checkpoint=checkpoint)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="earlier stages would lose it.*not inside other objects"):
        model(x, target=y)
    for either in plain, model:
        F.mse_loss(either(x), y).backward()
    assert_same_tensors(model, plain)
