"""A function of the user's divides the arguments of a call into microbatches."""
from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from splitpipe import SplitPipe, attach
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same, assert_same_tensors
from tests.promise.layers import Apply

COUNTS = torch.tensor([6, 1, 8, 4, 3, 4])


class Patches(nn.Module):
    """The patches of all images in one tensor, beside their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, patches: Tensor, counts: Tensor, labels: Tensor | None = None) -> Any:
        y = self.middle(self.embed(patches).tanh())
        y = self.head(torch.stack([own.mean(0) for own in y.split(counts.tolist())]))
        return y if labels is None else {"loss": F.cross_entropy(y, labels), "y": y}


def split(args: Any, kwargs: Any, chunks: int) -> Any:
    patches, counts = args
    own, rows = patches.split(counts.tolist()), -(-len(counts) // chunks)
    starts = range(0, len(counts), rows)
    return [
        ((torch.cat(own[at : at + rows]), counts[at : at + rows]), {k: x[at : at + rows] for k, x in kwargs.items()})
        for at in starts
    ]


OPTIONS: dict[str, Any] = {"devices": ["cpu"] * 3, "cuts": ["middle", "head"], "chunks": 3, "split": split,
                           "batched": {"patches": False}}


@pytest.mark.parametrize("rows", [6, 5])
@pytest.mark.parametrize(("schedule", "checkpoint", "backward"), [
    ("gpipe", "always", "split"), ("gpipe", "never", "autograd"), ("1f1b", "never", "split"),
    ("zb-h1", "always", "split"),
])
def test_a_module_whose_arguments_no_rule_can_cut(schedule: str, checkpoint: str, backward: str, rows: int) -> None:
    plain = Patches()
    model = SplitPipe(copy.deepcopy(plain), schedule=schedule, checkpoint=checkpoint, backward=backward, **OPTIONS)
    counts, labels = COUNTS[:rows], torch.arange(rows) % 3
    leaves = [torch.randn(int(counts.sum()), 5, requires_grad=True)]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    for training in (True, False):
        results = [
            module.train(training)(x * 2, counts, labels=labels) for module, x in zip((plain, model), leaves)
        ]
        for output in results:
            output["loss"].backward()
        assert_same(results[1]["y"], results[0]["y"], "output")
        torch.testing.assert_close(results[1]["loss"], results[0]["loss"])
        torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
        assert_same_tensors(model, plain)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_the_target_is_among_the_keywords(by: str, schedule: str) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(5, 4)

        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            return torch.stack([own.mean(0) for own in self.embed(value[0]).split(value[1].tolist())])

    def of_input(args: Any, kwargs: Any, chunks: int) -> Any:
        return [((own,), named) for own, named in split(*args, kwargs, chunks)]

    plain = nn.Sequential(Packed(), nn.Linear(4, 3))
    where: dict[str, Any] = {"balance": [1, 1], "batched": (False, True)}
    if by == "cuts":
        where = {"cuts": ["1"], "batched": {"input": (False, True)}}
    model = SplitPipe(copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3, schedule=schedule, split=of_input,
                      loss_fn=F.cross_entropy, **where)
    x, target = torch.randn(int(COUNTS.sum()), 5), torch.arange(6) % 3
    found, expected = model((x, COUNTS), target=target), F.cross_entropy(plain((x, COUNTS)), target)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert_same_tensors(model, plain)
    assert_same(model((x, COUNTS)), plain((x, COUNTS)), "output")


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_microbatches_that_the_user_has_cut_share_a_tensor_and_may_be_written_to(checkpoint: str) -> None:
    scaled = Apply(lambda value: value[0].mul_(2) * value[1])
    model = SplitPipe(nn.Sequential(scaled, nn.Linear(4, 3)), [1, 1], devices=["cpu"] * 2, chunks=2,
                      checkpoint=checkpoint, split=lambda args, kwargs, chunks: [((own,), {}) for own in args[0]])
    plain = copy.deepcopy(nn.Sequential(*model))
    x, scales = torch.randn(6, 4, requires_grad=True), [torch.ones(4, requires_grad=True) for _ in range(2)]
    results = [model([((x * 1)[at], scales[0]) for at in (slice(0, 3), slice(3, 5), slice(5, 6))]),
               plain((x * 1, scales[1]))]
    assert_same(results[0], results[1], "output")
    gradients = []
    for y, scale in zip(results, scales):
        x.grad = None
        y.sum().backward()
        gradients.append((x.grad, scale.grad))
    assert_same(gradients[0], gradients[1], "gradients")


def test_slices_of_one_tensor_are_written_to_apart() -> None:
    scaled = Apply(lambda x: x.mul_(2).sigmoid_())
    model = SplitPipe(nn.Sequential(scaled, nn.Linear(4, 3)), [1, 1], devices=["cpu"] * 2, chunks=2,
                      split=lambda args, kwargs, chunks: [((args[0][:2],), {}), ((args[0][2:],), {})])
    for x in (torch.randn(5, 4), torch.randn(5, 4, requires_grad=True) * 1):
        model.zero_grad()
        expected = nn.functional.linear((x * 2).sigmoid(), model[1].weight, model[1].bias)
        (wanted,) = torch.autograd.grad(expected.sum(), model[1].weight)
        y = model(x)
        y.sum().backward()
        assert_same([y, model[1].weight.grad], [expected, wanted], "output and gradient")


def test_writing_to_a_tensor_that_several_microbatches_have_is_an_error() -> None:
    doubling = Apply(lambda value: value[0] * value[1].mul_(2))
    model = SplitPipe(nn.Sequential(doubling, nn.Linear(4, 3)), [1, 1], devices=["cpu"] * 2, chunks=2,
                      split=lambda args, kwargs, chunks: [((own,), {}) for own in args[0]])
    table = torch.ones(4)
    with pytest.raises(RuntimeError, match="wrote in place to an input that batched= leaves whole"):
        model([(torch.ones(2, 4), table), (torch.ones(3, 4), table)])


@pytest.mark.parametrize(("given", "error", "says"), [
    (lambda args, kwargs, chunks: 3, TypeError, "split returned a int: expected a list of pairs"),
    (lambda args, kwargs, chunks: [], TypeError, "split returned an empty one"),
    (lambda args, kwargs, chunks: [args], TypeError, "split returned a tuple of 1 for microbatch 0"),
    (lambda args, kwargs, chunks: [(args[0], kwargs)], TypeError, r"split returned \(a Tensor, a dict\) for micro"),
    (lambda args, kwargs, chunks: [(args, kwargs)] * 4, ValueError, "split returned 4 microbatches, and the s"),
    (lambda args, kwargs, chunks: [(args, kwargs), (args, {})], ValueError, "split returned different arguments for"),
    (lambda args, kwargs, chunks: [(args, {})], ValueError, "target"),
    (lambda args, kwargs, chunks: [((), kwargs)], ValueError, "split returned 0 positional arguments"),
])
def test_what_the_function_gives_is_verified(given: Any, error: type[Exception], says: str) -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=["cpu"], chunks=3, schedule="1f1b",
                      loss_fn=nn.MSELoss(), split=given)
    with pytest.raises(error, match=says):
        model(torch.randn(6, 4), target=torch.randn(6, 4))


def test_an_attached_module_is_placed_by_a_part_of_its_sample() -> None:
    plain = Patches()
    x = torch.randn(int(COUNTS.sum()), 5)
    model = attach(copy.deepcopy(plain), sample=(x, COUNTS), **OPTIONS)
    assert_same(model(x, COUNTS), plain(x, COUNTS), "output")


def test_in_eval_mode_an_output_that_cannot_be_joined_is_that_of_the_whole_batch() -> None:
    class Counting(Patches):
        def forward(self, patches: Tensor, counts: Tensor, labels: Any = None) -> Any:
            y = super().forward(patches, counts)
            return y, (y > 0).sum(), {"cache": object()}

    plain = Counting().eval()
    model = SplitPipe(copy.deepcopy(plain), **OPTIONS).eval()
    x = torch.randn(int(COUNTS.sum()), 5)
    found, expected = model(x, COUNTS), plain(x, COUNTS)
    assert_same(found[:2], expected[:2], "output")
    assert found[2]["cache"] is not None


@dataclass
class Sample:
    name: str
    x: Tensor
    target: Tensor


class OfSamples(nn.Module):
    """Has a loss of an object, whose tensors no pytree shows."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(4, 4), nn.Linear(4, 3), loss

    def forward(self, sample: Sample) -> Tensor:
        return self.loss(self.last(self.first(sample.x)), sample.target)


def by_samples(args: Any, kwargs: Any, chunks: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    parts = zip(args[0].x.chunk(chunks), args[0].target.chunk(chunks))
    return [((Sample(args[0].name, x, target),), kwargs) for x, target in parts]


@pytest.mark.parametrize("options", [{}, {"reduction": "mean"}])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda y, t: y.square().mean()])
def test_objects_of_unequal_numbers_of_rows_have_the_loss_of_the_batch(loss: Any, options: dict[str, Any]) -> None:
    plain = OfSamples(loss).double()
    model = SplitPipe(copy.deepcopy(plain), cuts=["last"], devices=["cpu"] * 2, chunks=3, split=by_samples, **options)
    sample = Sample("a", torch.randn(7, 4).double(), torch.randint(3, (7,)))
    found, expected = model(sample), plain(sample)
    for each in (found, expected):
        each.backward()
    torch.testing.assert_close(found, expected)
    assert_same_tensors(model, plain)


@dataclass
class Held:
    x: Tensor


class Opening(nn.Linear):
    def forward(self, held: Any) -> Tensor:
        return super().forward(held.data if isinstance(held, PackedSequence) else held["x"])


@pytest.mark.parametrize("held", [
    Held(torch.randn(4, 3)), UserDict(x=torch.randn(4, 3)), pack_sequence([torch.randn(2, 3)] * 2),
], ids=["dataclass", "UserDict", "PackedSequence"])
@pytest.mark.parametrize("given", [{"balance": [1, 1]}, {"cuts": ["1"], "batched": {}}], ids=["balance", "cuts"])
def test_the_error_for_an_object_names_split(given: dict[str, Any], held: object) -> None:
    model = SplitPipe(nn.Sequential(Opening(3, 3), nn.Tanh()), devices=["cpu", "cpu"], chunks=2, **given)
    with pytest.raises(TypeError, match=rf"{type(held).__name__}.* Or pass a function that divides such objects, spl"):
        model(held)
