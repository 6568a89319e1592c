"""Inputs that are no parts of the batch go whole into every microbatch, where batched= says so."""
from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe
from splitpipe.batch.flags import verify_batched
from splitpipe.batch.tree import Node
from tests.helpers import scheduled, twin
from tests.helpers.deferring import double as double
from tests.promise.layers import Apply

ROWS = 4
Pair = namedtuple("Pair", ["x", "mask"])


class Attend(nn.Module):
    """Attention in which a mask, and a table of what is added, are the same for all samples; gives its input's kind."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 3)

    def forward(self, value: Any) -> Any:
        x, mask, table = tree_leaves(value)
        y = self.project(x)
        scores = (y @ x.transpose(1, 2)).masked_fill(mask, -1e9) * table
        y = scores.softmax(-1) @ y + torch.tanh(table) @ x
        leaves = iter([y, mask, table])
        return tree_map(lambda _: next(leaves), value)


def first_leaf(value: Any) -> Any:
    return tree_leaves(value)[0]


def attention() -> nn.Sequential:
    return nn.Sequential(Attend(), Attend(), Attend(), Apply(first_leaf))


def given(kind: str) -> tuple[Any, Any]:
    """An input, of as many rows as the mask has, and what is said of it."""
    x, table = torch.randn(ROWS, ROWS, 3), torch.randn(ROWS, ROWS)
    mask = torch.ones(ROWS, ROWS).triu(1).bool()
    if kind == "dict":
        return {"x": x, "more": {"mask": mask, "table": table}}, {"more": {"mask": False, "table": False}}
    return (x, [mask, table]), (True, False)


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("kind", "chunks"), [("tuple", 4), ("dict", 3)])
def test_a_pipeline_is_its_module(kind: str, chunks: int, checkpoint: str, backward: str) -> None:
    value, batched = given(kind)
    options = {"chunks": chunks, "checkpoint": checkpoint, "backward": backward, "batched": batched}
    twin.assert_transparent(attention(), value, **options)


@pytest.mark.parametrize(("backward", "checkpoint"), [("split", "never"), ("split", "always"), ("autograd", "always")])
@pytest.mark.parametrize(("name", "devices", "chunks"), [("1f1b", 2, 4), ("zb-v", 1, 3)])
def test_a_schedule_is_its_module(name: str, devices: int, chunks: int, checkpoint: str, backward: str) -> None:
    value, batched = given("tuple")
    options = {"chunks": chunks, "checkpoint": checkpoint, "backward": backward, "batched": batched}
    scheduled.assert_transparent(attention(), value, name, devices, **options)


@pytest.mark.parametrize("shape", [(6,), ()])
def test_what_one_microbatch_gives_two_inputs_is_scaled_once_for_each(shape: tuple[int, ...]) -> None:
    x, one, other = torch.rand(4, 6), torch.rand(shape).requires_grad_(), torch.rand(shape).requires_grad_()
    shift = Apply(lambda value: value[0] * (value[1] + value[2]))  # Its two tables have one gradient, the same tensor.
    model = SplitPipe(nn.Sequential(shift, nn.Identity()), [1, 1], devices=["cpu"] * 2, schedule="zb-h1",
                      batched=(True, False, False), loss_fn=lambda output, target: (output - target).square().mean())
    expected = torch.autograd.grad(3 * (x * (one + other)).square().mean(), (one, other))
    (3 * model((x, one, other), target=torch.zeros(4, 6))).backward()
    torch.testing.assert_close((one.grad, other.grad), expected)


def test_without_grad_and_in_inference_mode() -> None:
    value, batched = given("tuple")
    plain, model = twin.twins(attention(), chunks=4, batched=batched)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(tree_map(torch.clone, value)), plain(value))


def test_what_is_whole_need_be_no_dense_tensor() -> None:
    product = Apply(lambda value: ((value[1] @ value[0].t()).t(), value[1]))
    value = torch.randn(5, 3), torch.eye(3).to_sparse()
    model = SplitPipe(nn.Sequential(product, product, Apply(first_leaf)), [1, 2], devices=["cpu"] * 2, chunks=2,
                      batched=(True, False))
    torch.testing.assert_close(model(value), value[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_says_the_same(copied: Any) -> None:
    value, batched = given("tuple")
    plain, model = twin.twins(attention(), chunks=4, batched=batched)
    torch.testing.assert_close(copied(model)(value), plain(value))


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


def test_writing_to_it_before_it_is_recomputed_is_an_error() -> None:
    value, batched = given("tuple")
    _, model = twin.twins(attention(), chunks=2, checkpoint="always", batched=batched)
    output = model(value)
    value[1][1].mul_(2)
    with pytest.raises(RuntimeError, match="the batch was modified in place"):
        output.sum().backward()


@pytest.mark.parametrize(("batched", "value", "flags"), [
    ((True, False), (1, [2, 3]), [True, False, False]),
    ([False, True], [1, 2], [False, True]),
    ({"b": False}, {"a": 1, "b": 2, "c": 3}, [True, False, True]),
    ({"b": False}, OrderedDict(b=(2, 3), a=1), [False, False, True]),
    ({"mask": False}, Pair(1, 2), [True, False]),
    (Pair(True, False), Pair(1, 2), [True, False]),
    ((True, {"a": False}), deque([1, {"a": 2}]), [True, False]),
    (True, {"a": (1, 2)}, [True, True]),
    ((True, False), (None, None), [True, False]),
    ((True, (1, {"a": False})), (1, None), [True, None]),
    ((True, ()), (1, []), [True]),
])
def test_flags_go_by_the_nesting(batched: Any, value: Any, flags: list[bool]) -> None:
    root = Node(value, verify_batched(batched)[0], "the input", 0)
    assert [leaf.flag for leaf in root.leaves()] == flags
    assert len(tree_leaves(value)) == len(flags)


@pytest.mark.parametrize(("batched", "value", "says"), [
    ((True, False), torch.ones(4), "the input is a Tensor, but batched has 2 values there"),
    ((True, False), (1, 2, 3), "the input is a tuple of 3, but batched has 2 values there"),
    ({"mask": False}, (1, 2), "the input is a tuple of 2, but batched names what is in it"),
    ({"mask": False, "x": True}, {"x": 1}, "the input is a dict of 'x', but batched names 'mask' there"),
    ((True, {"m": False}), (1, {}), "the input[1] is a dict of nothing, but batched names 'm' there"),
])
def test_another_nesting_than_the_inputs_is_an_error(batched: Any, value: Any, says: str) -> None:
    model = SplitPipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"], batched=batched)
    with pytest.raises(ValueError) as caught:
        model(value)
    assert says in str(caught.value)


@pytest.mark.parametrize("value", [(torch.ones(4), torch.ones(4)), (torch.ones(()), torch.ones(3))])
def test_an_input_of_which_nothing_is_cut_is_an_error(value: Any) -> None:
    model = SplitPipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"], batched=(False, False))
    with pytest.raises(ValueError, match="no tensor to split according to batched="):
        model(value)
