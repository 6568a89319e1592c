"""Outputs of any kind, made one of those of the microbatches."""
from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import piped
from tests.helpers.twin import assert_same

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    loss: Tensor | None
    y: Any
    name: str = "output"


@dataclass(frozen=True)
class Frozen:
    loss: Tensor | None
    y: Any


class Giving(nn.Module):
    """Gives what a function makes of its last tensor."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.two(self.one(x)))


def given(function: Callable[[Tensor], Any], rows: int = 7, **options: Any) -> tuple[Any, Any]:
    """What the pipeline gives, and what the module does."""
    module, x = Giving(function), torch.randn(rows, 4)
    return piped(module, ["two"], **options)(x), module(x)


@pytest.mark.parametrize("function", [
    lambda y: torch.cat([y, -y]), lambda y: {"z": y.T.reshape(-1)},
    lambda y: torch.stack([y, 2 * y, 3 * y]).flatten(0, 1), lambda y: 5 + 1e-3 * torch.cat([y, -y]),
], ids=["cat", "transposed", "length first", "all nearly equal"])
@pytest.mark.parametrize("rows", [6, 7])
def test_entries_of_a_row_that_are_apart_are_refused(function: Callable[[Tensor], Any], rows: int) -> None:
    with pytest.raises(ValueError, match=r"as after torch.cat.*another order.*Expected a row's entries side by side"):
        given(function, rows)


@pytest.mark.parametrize("function", [
    # Any nesting.
    lambda y: y, lambda y: (y, [y * 2, None], {"a": y.sum(1)}), lambda y: Pair(y, "text"), lambda y: y.argmax(1),
    lambda y: y.mean(), lambda y: [y.square().mean(), 3, 2.5, "text", None, torch.float32], lambda y: y > 0,
    lambda y: y[:, None, :].expand(-1, 3, -1),
    # Several entries of a row, side by side.
    lambda y: torch.stack([y, -y], 1).flatten(0, 1), lambda y: y.flatten(), lambda y: torch.zeros(2 * len(y), 4),
    lambda y: y.repeat_interleave(3, 0), lambda y: (y.T.flatten() * 0).detach(),
    lambda y: 5 + 1e-3 * torch.stack([y, -y], 1).flatten(0, 1), lambda y: 5 + 1e-30 * torch.cat([y, -y]),
])
def test_outputs_of_rows_are_joined(function: Callable[[Tensor], Any]) -> None:
    assert_same(*given(function), "output")


def test_a_look_at_the_batchs_dimension_that_finds_no_memory_is_an_error_and_is_made_again() -> None:
    full = True

    def turned(y: Tensor) -> Tensor:
        if full and len(y) == 1:
            raise torch.OutOfMemoryError("no memory")
        return y.t()

    module = Giving(turned)
    pipe = piped(module, ["two"])
    x = torch.randn(6, 4)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        pipe(x)
    full = False
    assert_same(pipe(x), turned(module.two(module.one(x))), "output")


@pytest.mark.parametrize("kind", [Output, Frozen])
def test_dataclasses_are_joined_by_their_fields(kind: Any) -> None:
    found, expected = given(lambda y: kind(y.mean(), {"y": y, "more": (kind(None, y * 2),)}))
    assert type(found) is kind
    assert_same([found.loss, found.y["y"], found.y["more"][0].y], [expected.loss, expected.y["y"],
                                                                  expected.y["more"][0].y], "output")


@pytest.mark.thorough
def test_a_class_of_outputs_that_is_a_dict_with_attributes_stays_one() -> None:
    generic = pytest.importorskip("transformers.modeling_outputs")
    found, expected = given(lambda y: generic.CausalLMOutput(loss=y.mean(), logits=y, hidden_states=(y, y * 2)))
    assert type(found) is type(expected) and [*found.keys()] == [*expected.keys()]
    assert_same([found.loss, found["logits"], found.hidden_states], [expected.loss, expected.logits,
                                                                     expected.hidden_states], "output")


def test_numbers_without_dimensions_are_means_by_rows_or_sums_or_what_a_function_makes_of_them() -> None:
    sizes: list[Any] = []

    def largest(values: list[Tensor], rows: list[int]) -> Tensor:
        sizes.append(rows)
        return torch.stack(values).max()

    assert_same(*given(lambda y: y.mean()), "mean")
    assert_same(*given(lambda y: y.sum(), reduction="sum"), "sum")
    assert_same(*given(lambda y: y.max(), reduction=largest), "a function's")
    assert sizes == [[3, 3, 1]]


@pytest.mark.parametrize(("function", "options", "error", "words"), [
    (lambda y: y.argmax(), {}, ValueError, "a number of type torch.int64, which is different for every microbatch"),
    (lambda y: (y > 0).sum() * 2, {}, ValueError, "a number of type torch.int64, which is different for every"),
    (lambda y: y.shape.numel, {}, TypeError, "the output is a builtin_function.*, and every microbatch returns a"),
    (lambda y: y.mean(), {"reduction": lambda values, rows: 3}, TypeError, "reduction returned int: expected a tensor"),
    (lambda y: y @ y.t(), {}, ValueError, r"has the shape \[3, 3\].*each row is compared with all others"),
    (lambda y: (y, torch.tensor([len(y)])), {"chunks": 7}, ValueError, r"shape \[1\] has no dimension of the batch"),
    (lambda y: (y, y.shape), {"chunks": 7}, ValueError, r"has the size \[1, 4\] for 1 rows and \[2, 4\] for 2"),
    (lambda y: {"a" if len(y) == 3 else "b": y}, {}, ValueError, "microbatches 0 and 2 return outputs with different"),
    (lambda y: [y, None if len(y) == 3 else y.mean()], {}, ValueError, "0 and 2 return the outputs None and .a tensor"),
    (lambda y: [y, y.mean() if len(y) == 3 else 0.0], {}, ValueError, "0 and 2 return the outputs .a tensor. and 0.0"),
])
def test_what_cannot_be_joined_is_refused(
    function: Callable[[Tensor], Any], options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        given(function, **options)


@pytest.mark.parametrize("reduction", ["average", 3])
def test_a_reduction_is_a_name_or_a_function(reduction: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="'mean' .weighted by rows., 'sum', or a function"):
        piped(Giving(torch.sum), ["two"], reduction=reduction)


def test_an_object_in_the_output_is_dropped_with_a_warning() -> None:
    class Cache:
        def __init__(self, y: Tensor) -> None:
            self.y = y

    with pytest.warns(UserWarning, match="the output holds a Cache, and every microbatch .*: None takes"):
        found, _ = given(lambda y: {"y": y, "cache": Cache(y)})
    assert found["cache"] is None and found["y"].shape == (7, 4)
    found, _ = given(lambda y: {"y": y, "cache": Cache(y)}, chunks=1)
    assert isinstance(found["cache"], Cache)


class Choosing(nn.Module):
    """Gives those rows that a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x))[keep]
        return y


def test_as_many_rows_as_the_data_say_are_joined() -> None:
    """None of the first call's: then no row of one microbatch and none of two look alike."""
    plain, x = Choosing(), torch.randn(6, 4)
    model = piped(plain, ["two"])
    for kept in ([], [3], [0, 1, 4], [0, 2, 4], [], range(6)):
        keep = torch.zeros(6, dtype=torch.bool)
        keep[list(kept)] = True
        if kept == [0, 2, 4]:  # A row each: it could be a value without rows, as well.
            continue
        assert_same(model(x, keep), plain(x, keep), "output")


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("rows", [6, 7])
def test_a_plain_number_that_depends_on_the_rows_is_refused(rows: int, reduced: bool) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.layers(x)
            return {"y": y.mean() if reduced else y, "count": len(x), "layers": len(self.layers)}

    model = piped(Counting(), ["layers.1"])
    for _ in range(2):
        with pytest.raises(ValueError, match="the number . for . rows and 1 for 1"):
            model(torch.randn(rows, 4))
