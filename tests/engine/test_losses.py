"""How a schedule with cuts finds its loss: a field of the output, or a function of output and target."""
from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.models import SCHEDULES, Stack, batch, piped
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same_tensors

CUTS = ["layers.1", "layers.3"]
scheduled = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


Named = namedtuple("Named", ["loss", "y"])


@scheduled
@pytest.mark.parametrize("kind", [Named, lambda loss, y: loss])
def test_the_loss_is_a_field_of_the_output_or_the_output(kind: Any, schedule: str) -> None:
    def typed(self: Any, x: Tensor, labels: Tensor) -> Any:
        y = self.b(self.a(x))
        return kind((y - labels).square().mean(), y)

    plain = module_of(typed, **linears("a", "b"))
    model, given = piped(plain, ["b"], schedule=schedule), batch()
    found, expected = model(**given), plain(**given)
    assert type(found) is type(model.eval()(**given)) is type(expected)
    if kind is Named:
        assert not found.y.requires_grad
        torch.testing.assert_close(found.y, expected.y)
        found, expected = found.loss, expected.loss
    torch.testing.assert_close(found, expected)
    for loss in (found, expected):
        (loss * 3).backward()
    assert_same_tensors(model, plain)


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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lengths", [[3, 8, 5, 6, 4, 7], [3, 8, 5, 6, 4, 7, 9]])
def test_the_sum_of_a_list_of_lengths_may_be_a_count_which_is_said(lengths: list[int], schedule: str) -> None:
    def spoken(self: Any, x: Tensor, labels: Tensor, lengths: list[int]) -> dict[str, Tensor]:
        return {"loss": (self.b(self.a(x)) - labels).square().sum() / max(1, sum(lengths))}

    model = piped(module_of(spoken, **linears("a", "b")), ["b"], schedule=schedule)
    with pytest.warns(UserWarning, match="a list with one number per row"):
        model(**batch(len(lengths)), lengths=lengths)


@scheduled
def test_a_loss_function_may_be_given_a_number_that_an_earlier_stage_has_computed(schedule: str) -> None:
    def penalised(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return output[0] + (output[1] - target).square().mean()

    plain = module_of(lambda self, x: ((y := self.a(x)).square().mean(), self.b(y)), **linears("a", "b"))
    model, given = piped(plain, ["b"], schedule=schedule, loss_fn=penalised), batch(7)
    losses = model(given["x"], target=given["labels"]), penalised(plain(given["x"]), given["labels"])
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_same_tensors(model, plain)
