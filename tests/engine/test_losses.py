"""How a schedule with cuts finds its loss: a field of the output, or a function of output and target."""
from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.models import SCHEDULES, Stack, batch, piped
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same_tensors

CUTS = ["layers.1", "layers.3"]
scheduled = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


@dataclass
class Output:
    loss: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    y: Tensor


Named = namedtuple("Named", ["loss", "y"])


class Typed(Stack):
    """A stack whose output is of a class."""

    kind: Any = Output

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        found = super().forward(x, labels)
        return self.kind(found["loss"], found["y"])


@scheduled
@pytest.mark.parametrize("kind", [Output, Frozen, Named])
def test_the_loss_is_a_field_of_the_output(kind: Any, schedule: str) -> None:
    plain = Typed()
    plain.kind = kind
    model, given = piped(plain, CUTS, schedule=schedule), batch()
    found, expected = model(**given), plain(**given)
    assert type(found) is kind and found.loss.requires_grad and not found.y.requires_grad
    torch.testing.assert_close([found.loss, found.y], [expected.loss, expected.y])
    for output in (found, expected):
        (output.loss * 3).backward()
    assert_same_tensors(model, plain)


@scheduled
def test_an_output_that_is_a_number_is_the_loss(schedule: str) -> None:
    plain = Typed()
    plain.kind = lambda loss, y: loss
    model, given = piped(plain, CUTS, schedule=schedule), batch()
    for _ in range(2):
        (2 * model(**given)).backward()
        (2 * plain(**given)).backward()
    assert_same_tensors(model, plain)
    model.eval()
    torch.testing.assert_close(model(**given), plain(**given))


@scheduled
def test_an_output_without_a_loss_is_an_error(schedule: str) -> None:
    model = piped(Stack(), CUTS, schedule=schedule)
    with pytest.raises((TypeError, ValueError), match="loss") as error:
        model(x=torch.randn(6, 4))
    assert "labels" in str(error.value) and "loss_fn" in str(error.value)
    with torch.no_grad():
        assert model(x=torch.randn(6, 4))["loss"] is None
    model.eval()
    assert model(x=torch.randn(6, 4))["y"].shape == (6, 4)
    model.train()
    model(**batch())["loss"].backward()


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


def test_a_target_without_a_function_to_take_it_is_an_error() -> None:
    with pytest.raises((TypeError, ValueError), match="target"):
        piped(Stack(), CUTS, schedule="1f1b")(torch.randn(6, 4), target=torch.randn(6, 4))


def test_a_modules_own_argument_named_target_is_its_own() -> None:
    def forward(self: Any, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.two(self.one(x)), target)}

    plain, x, y = module_of(forward, **linears("one", "two")), torch.randn(6, 4), torch.randn(6, 4)
    for schedule in ("gpipe", "1f1b"):
        torch.testing.assert_close(piped(plain, ["two"], schedule=schedule)(x, target=y)["loss"], plain(x, y)["loss"])


def spoken(self: Any, x: Tensor, labels: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Divides the sum of its losses by that of the rows' lengths, a list of Python's numbers."""
    return {"loss": (self.two(self.one(x)) - labels).square().sum() / max(1, sum(lengths))}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lengths", [[3, 8, 5, 6, 4, 7], [3, 8, 5, 6, 4, 7, 9]])
def test_the_sum_of_a_list_of_lengths_is_a_count(lengths: list[int], schedule: str) -> None:
    plain = module_of(spoken, **linears("one", "two"))
    model, given = piped(plain, ["two"], schedule=schedule), batch(len(lengths))
    for _ in range(2):
        found, expected = (net(**given, lengths=lengths)["loss"] for net in (model, plain))
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
    assert_same_tensors(model, plain)
