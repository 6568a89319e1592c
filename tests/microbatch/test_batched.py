"""``batched=`` names what goes whole, and the dimension of the batch; outputs are joined along theirs."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe
from tests.helpers import scheduled, twin
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.promise.layers import Apply

LENGTH, WIDTH = 5, 8
SIZES = pytest.mark.parametrize(("rows", "chunks"), [(7, 3), (8, 8)])


def attending(self: Any, value: Any) -> Any:
    """Attention in which a mask, and a table of what is added, are the same for all samples; gives its input's kind."""
    x, mask, table = tree_leaves(value)
    y = self.project(x)
    scores = (y @ x.transpose(1, 2)).masked_fill(mask, -1e9) * table
    y = scores.softmax(-1) @ y + torch.tanh(table) @ x
    leaves = iter([y, mask, table])
    return tree_map(lambda _: next(leaves), value)


def first_leaf(value: Any) -> Any:
    return tree_leaves(value)[0]


def attention() -> nn.Sequential:
    return nn.Sequential(*[module_of(attending, project=nn.Linear(3, 3)) for _ in range(3)], Apply(first_leaf))


def given() -> tuple[Any, Any]:
    """An input, of as many rows as the mask has, and what is said of it."""
    x, table, mask = torch.randn(4, 4, 3), torch.randn(4, 4), torch.ones(4, 4).triu(1).bool()
    return {"x": x, "more": {"mask": mask, "table": table}}, {"more": {"mask": False, "table": False}}


@pytest.mark.parametrize(("name", "devices", "chunks", "how"), [("1f1b", 2, 4, "never"), ("zb-v", 1, 3, "always")])
def test_a_schedule_is_its_module(name: str, devices: int, chunks: int, how: str) -> None:
    value, batched = given()
    scheduled.assert_transparent(attention(), value, name, devices, chunks=chunks, checkpoint=how, batched=batched)


def overwrite(value: Any) -> Any:
    x, mask = value
    mask.mul_(2)
    return x * mask, mask


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b", "loss_fn": nn.functional.mse_loss}])
def test_a_layer_that_writes_to_what_others_have_as_well_is_an_error(options: dict[str, Any], at: int) -> None:
    layers: list[nn.Module] = [nn.Identity(), Apply(first_leaf)]
    layers.insert(at, Apply(overwrite))
    model = SplitPipe(nn.Sequential(*layers), [1, 2], devices=["cpu"] * 2, chunks=2, batched=[True, False], **options)
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="wrote in place to an input that batched= leaves whole"):
        model((x, torch.ones(3)), target=torch.zeros(4, 3) if options else None)


def test_in_inference_mode_where_nobody_would_find_out_each_microbatch_has_its_own() -> None:
    layers = nn.Sequential(Apply(overwrite), Apply(first_leaf))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, batched=(True, False))
    with torch.inference_mode():
        torch.testing.assert_close(model((torch.ones(4, 3), torch.ones(3))), torch.full((4, 3), 2.0))


@pytest.mark.parametrize(("batched", "value", "error", "says"), [
    ((True, False), torch.ones(4), ValueError, "the input is a Tensor, but batched says (True, False) there"),
    ((True, False), (1, 2, 3), ValueError, "the input is a tuple of 3, but batched says (True, False) there"),
    ({"mask": False, "x": True}, {"x": 1}, ValueError, "the input is a dict of ['x'], but batched says"),
    ((True, {"m": False}), (1, {}), ValueError, "the input[1] is a dict of [], but batched says {'m': False} there"),
    ((False, False), (torch.ones(()), torch.ones(3)), TypeError, "that batched= doesn't mark False; or split="),
])
def test_flags_that_do_not_match_are_an_error(batched: Any, value: Any, error: type[Exception], says: str) -> None:
    model = SplitPipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"], batched=batched)
    with pytest.raises(error) as caught:
        model(value)
    assert says in str(caught.value)


def transformer() -> nn.Sequential:
    return nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0) for _ in range(2)])


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("length", "batched"), [(5, 1), (4, 1), (4, {"input": -2, "target": -1})])
@pytest.mark.filterwarnings("ignore:the loss, .* beyond a batch along dimension 1:UserWarning")
def test_targets_are_cut_along_theirs(batched: Any, length: int, name: str) -> None:
    target = torch.randint(0, WIDTH, (length, 4))
    scheduled.assert_transparent(transformer(), torch.randn(length, 4, WIDTH), name, target=target, loss_fn=of_tokens,
                                 batched=batched, chunks=4)


def turning(self: Any, x: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
    """Positions of [3, batch, length] beside an input of [batch, length, width], and an output of all orders."""
    y = self.two(self.one(x) * position_ids.sum(0)[..., None])
    return {"y": y, "turned": y.transpose(0, 1), "positions": position_ids * 2}


@SIZES
@pytest.mark.parametrize("training", [True, False])
def test_arguments_are_cut_along_what_is_said_of_their_names(training: bool, rows: int, chunks: int) -> None:
    plain = module_of(turning, **linears("one", "two")).train(training)
    model = SplitPipe(copy.deepcopy(plain), cuts=["two"], devices=["cpu"] * 2, chunks=chunks,
                      batched={"position_ids": 1}).train(training)
    x, positions = torch.randn(rows, LENGTH, 4), torch.randn(3, rows, LENGTH, requires_grad=True)
    mine = positions.detach().clone().requires_grad_()
    found, expected = model(x, mine), plain(x, positions)
    twin.assert_same(found, expected, "output")
    for output in (found, expected):
        (output["y"].square().mean() + output["positions"].mean()).backward()
    twin.assert_same_tensors(model, plain)
    torch.testing.assert_close(mine.grad, positions.grad)


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
    with pytest.raises(TypeError, match=f"tensors in a {type(given).__name__}, which can't be split .*write False for"):
        SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)((x, given))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, batched=(True, False))
    torch.testing.assert_close(model((x, given)), x * 2)
