"""What the caller's thread has switched on reaches the segments, and what they switch stays where it is."""
from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tests.engine.models import SCHEDULES, Stack, assert_same_step, batch, piped
from tests.helpers.twin import assert_same_tensors

CUTS = ["layers.1", "layers.3"]
variable: ContextVar[int] = ContextVar("variable", default=0)


class Counting(TorchFunctionMode):
    """Counts calls of linear."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("around", [
    lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x), lambda: disable_saved_tensors_hooks("not here"),
    Counting,
], ids=["hooks", "no hooks", "mode"])
def test_hooks_and_modes_around_the_call(schedule: str, around: Any) -> None:
    plain = Stack()
    model, given = piped(plain, CUTS, schedule=schedule, checkpoint="never"), batch()
    counts = []
    for each in (model, plain):
        manager: AbstractContextManager[Any] = around()
        with manager:
            loss = each(**given)["loss"]
        loss.backward()
        counts.append(getattr(manager, "count", 0))
    assert_same_tensors(model, plain)
    assert counts[0] == 3 * counts[1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_context_variables_go_along_with_a_microbatch(schedule: str) -> None:
    class Model(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            assert variable.get() == 7
            variable.set(int(x.detach().sum() > 0) + 10)
            before = variable.get()
            for layer in self.layers:
                x = layer(x).tanh()
                assert variable.get() == before
            return {"loss": (x - labels).square().mean()}

    token = variable.set(7)
    try:
        piped(Model(), CUTS, schedule=schedule)(**batch())["loss"].backward()
        assert variable.get() == 7
    finally:
        variable.reset(token)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_regions_around_borders_end_where_they_end(schedule: str) -> None:
    class Model(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            x = self.layers[0](x)
            with torch.no_grad():
                y = self.layers[1](self.layers[2](x))
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled()
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layers[3](x) + y
                assert torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled("cpu")
            return {"loss": (x - labels).square().mean()}

    assert_same_step(Model(), batch(), cuts=["layers.2", "layers.3"], schedule=schedule)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_and_traces_are_refused() -> None:
    model, given = piped(Stack(), CUTS), batch()
    with pytest.raises(RuntimeError, match=r"inside a torch.func transform"):
        torch.func.grad(lambda x: model(x, given["labels"])["loss"])(given["x"])
    parameters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (), given)["loss"])(parameters)
    deprecated = pytest.warns((DeprecationWarning, FutureWarning))
    with pytest.raises(RuntimeError, match=r"called by torch.jit.trace"), deprecated:
        torch.jit.trace(model, (given["x"], given["labels"]), strict=False)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="inside forward-mode AD"):
        model(**given)
