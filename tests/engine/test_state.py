"""What the caller's thread has set reaches the segments."""
from __future__ import annotations

from contextvars import ContextVar

import pytest
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from tests.engine.models import SCHEDULES, Stack, batch, piped
from tests.helpers.twin import assert_same_tensors

CUTS = ["layers.1", "layers.3"]
variable: ContextVar[int] = ContextVar("variable", default=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_saved_tensor_hooks_may_be_forbidden_around_the_call(schedule: str) -> None:
    plain = Stack()
    model, given = piped(plain, CUTS, schedule=schedule, checkpoint="never"), batch()
    for each in (model, plain):
        with disable_saved_tensors_hooks("not here"):
            loss = each(**given)["loss"]
        loss.backward()
    assert_same_tensors(model, plain)


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
