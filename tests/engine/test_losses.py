"""How a schedule with cuts finds its loss: a field of the output, or a function of output and target."""
from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.models import SCHEDULES, Stack, batch, piped
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same_tensors

CUTS = ["layers.1", "layers.3"]
scheduled = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


@dataclass(frozen=True)
class Output:
    loss: Tensor
    y: Tensor


class Typed(Stack):
    """A stack whose output is of a class."""

    kind: Any

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        found = super().forward(x, labels)
        return self.kind(found["loss"], found["y"])


@scheduled
@pytest.mark.parametrize("kind", [Output, namedtuple("Named", ["loss", "y"]), lambda loss, y: loss])
def test_the_loss_is_a_field_of_the_output_or_the_output(kind: Any, schedule: str) -> None:
    plain = Typed()
    plain.kind = kind
    model, given = piped(plain, CUTS, schedule=schedule), batch()
    for _ in range(2):
        outputs = model(**given), plain(**given)
        assert type(outputs[0]) is type(outputs[1])
        losses = [output if isinstance(output, Tensor) else output.loss for output in outputs]
        torch.testing.assert_close(*losses)
        if not isinstance(outputs[0], Tensor):
            assert not outputs[0].y.requires_grad
            torch.testing.assert_close(outputs[0].y, outputs[1].y)
        for loss in losses:
            (loss * 3).backward()
    assert_same_tensors(model, plain)
    assert type(model.eval()(**given)) is type(outputs[1])


@scheduled
def test_an_output_without_a_loss_is_an_error(schedule: str) -> None:
    model = piped(Stack(), CUTS, schedule=schedule)
    with pytest.raises((TypeError, ValueError), match="loss") as error:
        model(x=torch.randn(6, 4))
    assert "labels" in str(error.value) and "loss_fn" in str(error.value)
    with pytest.raises((TypeError, ValueError), match="target"):
        model(torch.randn(6, 4), target=torch.randn(6, 4))
    with torch.no_grad():
        assert model(x=torch.randn(6, 4))["loss"] is None
    assert model.eval()(x=torch.randn(6, 4))["y"].shape == (6, 4)
    model.train()(**batch())["loss"].backward()


@pytest.mark.parametrize("rows", [3, 6])
@scheduled
def test_a_loss_for_each_row_is_an_error_or_if_each_is_alone_a_warning(schedule: str, rows: int) -> None:
    module = module_of(lambda self, x: {"loss": self.b(self.a(x)).mean(1)}, **linears("a", "b"))
    pipe = piped(module, ["b"], schedule=schedule, chunks=3)
    expected: Any = pytest.raises(TypeError, match="has a Tensor as its loss") if rows == 6 else pytest.warns(
        UserWarning, match="a loss with a dimension"
    )
    with expected:
        pipe(torch.rand(rows, 4))


def spoken(self: Any, x: Tensor, labels: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Divides the sum of its losses by that of the rows' lengths, a list of Python's numbers."""
    return {"loss": (self.two(self.one(x)) - labels).square().sum() / max(1, sum(lengths))}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lengths", [[3, 8, 5, 6, 4, 7], [3, 8, 5, 6, 4, 7, 9]])
def test_the_sum_of_a_list_of_lengths_may_be_a_count_which_is_said(lengths: list[int], schedule: str) -> None:
    model = piped(module_of(spoken, **linears("one", "two")), ["two"], schedule=schedule)
    with pytest.warns(UserWarning, match="a list with one number per row"):
        model(**batch(len(lengths)), lengths=lengths)
