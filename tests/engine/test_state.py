"""What the caller's thread has switched on reaches the segments; transforms and traces are refused."""
from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tests.engine.models import SCHEDULES, Stack, batch, piped
from tests.helpers.twin import assert_same_tensors

CUTS = ["layers.1", "layers.3"]
variable: ContextVar[int] = ContextVar("variable", default=0)


class Counting(TorchFunctionMode):
    """Counts calls of linear."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is nn.functional.linear
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_modes_around_the_call_see_each_microbatch_and_hooks_may_be_forbidden(schedule: str) -> None:
    plain = Stack()
    model, given, counts = piped(plain, CUTS, schedule=schedule, checkpoint="never"), batch(), []
    for each in (model, plain):
        with Counting() as mode, disable_saved_tensors_hooks("not here"):
            loss = each(**given)["loss"]
        loss.backward()
        counts.append(mode.count)
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
