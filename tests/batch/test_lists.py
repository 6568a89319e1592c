"""Lists with one entry per row, as inputs, targets and outputs, of any module and by any schedule."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same, assert_same_tensors
from tests.promise.layers import Apply

CHUNKS = pytest.mark.parametrize(("rows", "chunks"), [(4, 4), (4, 2), (5, 2), (6, 3), (7, 3)])


class Stacked(nn.Module):
    """Images of several sizes, as one tensor of a size."""

    def forward(self, images: Any) -> Tensor:
        return torch.stack([F.interpolate(x[None], (8, 8))[0] for x in images])


class Found(nn.Module):
    """One dict for each row."""

    def forward(self, y: Tensor) -> list[dict[str, Any]]:
        return [{"box": own.mean((1, 2)), "name": "a", "more": (own.sum(0), [own.shape[0]])} for own in y]


class Detector(nn.Module):
    """A detector as those of torchvision: a loss in training, a list of what was found in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked, self.found = Stacked(), Found()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, images: Any, targets: Any = None) -> Any:
        found = self.found(self.head(self.body(self.stacked(images)).relu()))
        if not self.training:
            return found
        return {"losses": torch.stack([F.mse_loss(y["box"], t["box"]) for y, t in zip(found, targets, strict=True)]),
                "found": found}


def images(rows: int) -> list[Tensor]:
    return [torch.rand(3, 10 + number, 9, requires_grad=True) for number in range(rows)]


def targets(rows: int) -> list[dict[str, Tensor]]:
    return [{"box": torch.rand(2, requires_grad=True)} for _ in range(rows)]


def twice(value: Any) -> Any:
    """A copy of a nesting whose tensors are leaves, too."""
    return torch.utils._pytree.tree_map(lambda x: x.detach().clone().requires_grad_(x.requires_grad), value)


@CHUNKS
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_detector_is_cut_by_rows(kind: Any, checkpoint: str, rows: int, chunks: int) -> None:
    plain = Detector()
    model = SplitPipe(copy.deepcopy(plain), cuts=["head"], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint)
    given = kind(images(rows)), kind(targets(rows))
    mine = twice(given)
    expected, found = plain(*given), model(*mine)
    assert_same(found, expected, "output")
    for output in (expected, found):
        output["losses"].mean().backward()
    assert_same_tensors(model, plain)
    assert_same([x.grad for x in mine[0]], [x.grad for x in given[0]], "gradient of an image")
    assert_same([x["box"].grad for x in mine[1]], [x["box"].grad for x in given[1]], "gradient of a target")
    for _ in range(2):
        assert_same(model.eval()(mine[0]), plain.eval()(given[0]), "what is found")


@CHUNKS
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_targets_are_cut_as_the_input_is(by: str, schedule: str, rows: int, chunks: int) -> None:
    def criterion(output: Tensor, target: Any) -> Tensor:
        parts = [(y.mean((1, 2)) - t["box"]).square().mean() for y, t in zip(output, target, strict=True)]
        return torch.stack(parts).mean()

    plain = nn.Sequential(Stacked(), nn.Conv2d(3, 2, 3))
    where: dict[str, Any] = {"balance": [1, 1]}
    if by == "cuts":
        where = {"cuts": ["1"], "batched": {"input": "rows"}}
    model = SplitPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=chunks, schedule=schedule, loss_fn=criterion,
                      **{"batched": "rows", **where})
    given = images(rows), targets(rows)
    mine = twice(given)
    expected, found = criterion(plain(given[0]), given[1]), model(mine[0], target=mine[1])
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    assert_same_tensors(model, plain)
    assert_same([x.grad for x in mine[0]], [x.grad for x in given[0]], "gradient of an image")
    assert_same([x["box"].grad for x in mine[1]], [x["box"].grad for x in given[1]], "gradient of a target")


OUTPUTS = {
    "one per row": lambda y: [{"row": own, "three": [1, 2, 3], "pair": (own * 2, None)} for own in y],
    "rows of rows": lambda y: {"a": [[own, [own.sum(), 2]] for own in y]},
    "strings": lambda y: (y, ["text" for _ in y]),
    "numbers": lambda y: (y, [float(4) for _ in y]),
    "layers": lambda y: (y, [y * 2, y * 3]),
    "both": lambda y: {"layers": (y, y * 2, y * 3), "rows": [own for own in y], "tuple": tuple(own.sum() for own in y)},
    "one layer": lambda y: [y],
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("by", ["balance", "cuts"])
@pytest.mark.parametrize(("rows", "chunks"), [(2, 2), (3, 3), (6, 3), (5, 2), (4, 1)])
def test_lists_with_one_entry_per_row_are_concatenated_and_others_joined(
    name: str, by: str, rows: int, chunks: int
) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), Apply(OUTPUTS[name]))
    where: Any = {"balance": [1, 1]} if by == "balance" else {"cuts": ["1"], "batched": {}}
    model = SplitPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=chunks, **where)
    x = torch.randn(rows, 4)
    for _ in range(2):
        assert_same(model(x), plain(x), "output")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_list_that_could_be_either_where_no_other_run_can_tell_is_an_error() -> None:
    def pairs(y: Tensor) -> Any:
        if len(y) != 2:
            raise RuntimeError("expected two rows")
        return [own[:3] for own in y]

    for where in ({"balance": [1, 1]}, {"cuts": ["1"], "batched": {}}):
        model = SplitPipe(nn.Sequential(nn.Linear(4, 4), Apply(pairs)), devices=["cpu"] * 2, chunks=2, **where)
        with pytest.raises(ValueError, match="a list of 2 at its top, and each microbatch has 2 rows: it could"):
            model(torch.randn(4, 4))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_tuple_as_the_input_of_a_sequential_is_several_inputs(rows: int) -> None:
    module = nn.Sequential(Apply(lambda pair: pair[0] * pair[1]), nn.Linear(4, 4))
    model = SplitPipe(copy.deepcopy(module), [1, 1], devices=["cpu"] * 2, chunks=2)
    value = torch.randn(rows, 4), torch.randn(rows, 4)
    assert_same(model(value), module(value), "output")


def test_an_object_of_a_row_goes_with_its_row() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.seen: list[int] = []

        def forward(self, x: Tensor, boxes: list[Box]) -> Tensor:
            self.seen.append(len(boxes))
            return self.two(self.one(x) + torch.stack([box.value for box in boxes]))

    plain = Boxes()
    model = SplitPipe(copy.deepcopy(plain), cuts=["two"], devices=["cpu"] * 2, chunks=3)
    x, boxes = torch.randn(6, 4), [Box(torch.randn(4)) for _ in range(6)]
    assert_same(model(x, boxes), plain(x, boxes), "output")
    assert model.seen[:3] == [2, 2, 2]


@pytest.mark.parametrize("by", ["slots", "attributes", "block mask"])
def test_an_object_with_tensors_is_refused_by_a_sequential_unless_it_goes_whole(by: str) -> None:
    class Slots:
        __slots__ = ("x",)

    class Plain:
        x: Tensor

    given: Any = Slots() if by == "slots" else Plain()
    given.x = torch.ones(3)
    if by == "block mask":
        attention = pytest.importorskip("torch.nn.attention.flex_attention")
        given = attention.create_block_mask(lambda b, h, q, k: q >= k, 4, None, 16, 16, device="cpu")
    layers = nn.Sequential(Apply(lambda value: (value[0] * 2, value[1])), Apply(lambda value: value[0]))
    x = torch.randn(4, 3)
    with pytest.raises(TypeError, match=f"tensors in a {type(given).__name__}, which can't be split .*use False for"):
        SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)((x, given))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, batched=(True, False))
    torch.testing.assert_close(model((x, given)), x * 2)
