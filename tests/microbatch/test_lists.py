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

CHUNKS = pytest.mark.parametrize(("rows", "chunks"), [(4, 4), (4, 2), (7, 3)])


def images(rows: int) -> list[Tensor]:
    return [torch.rand(3, 10 + number, 9, requires_grad=True) for number in range(rows)]


def targets(rows: int) -> list[dict[str, Tensor]]:
    return [{"box": torch.rand(2, requires_grad=True)} for _ in range(rows)]


def twice(value: Any) -> Any:
    """A copy of a nesting whose tensors are leaves, too."""
    return torch.utils._pytree.tree_map(lambda x: x.detach().clone().requires_grad_(x.requires_grad), value)


def assert_same_gradients(mine: Any, given: Any) -> None:
    assert_same([x.grad for x in mine[0]], [x.grad for x in given[0]], "gradient of an image")
    assert_same([x["box"].grad for x in mine[1]], [x["box"].grad for x in given[1]], "gradient of a target")


@CHUNKS
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("where", [
    {"balance": [1, 1], "batched": "rows"}, {"cuts": ["1"], "batched": {"input": "rows"}},
], ids=["balance", "cuts"])
def test_targets_are_cut_as_the_input_is(where: Any, schedule: str, rows: int, chunks: int) -> None:
    def criterion(output: Tensor, target: Any) -> Tensor:
        parts = [(y.mean((1, 2)) - t["box"]).square().mean() for y, t in zip(output, target, strict=True)]
        return torch.stack(parts).mean()

    stack = Apply(lambda images: torch.stack([F.interpolate(x[None], (8, 8))[0] for x in images]))
    plain = nn.Sequential(stack, nn.Conv2d(3, 2, 3))
    model = SplitPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=chunks, schedule=schedule, loss_fn=criterion,
                      reduction="mean", **where)
    given = images(rows), targets(rows)
    mine = twice(given)
    expected, found = criterion(plain(given[0]), given[1]), model(mine[0], target=mine[1])
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    assert_same_tensors(model, plain)
    assert_same_gradients(mine, given)


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
