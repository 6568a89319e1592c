"""A function of the user's divides the arguments of a call into microbatches."""
from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, attach
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same, assert_same_tensors
from tests.promise.layers import Apply

COUNTS = torch.tensor([6, 1, 8, 4, 3, 4])


def of_patches(self: Any, patches: Tensor, counts: Tensor, labels: Tensor | None = None) -> Any:
    """The patches of all images are in one tensor, beside their numbers."""
    y = self.middle(self.embed(patches).tanh())
    y = self.head(torch.stack([own.mean(0) for own in y.split(counts.tolist())]))
    return y if labels is None else {"loss": F.cross_entropy(y, labels), "y": y}


def split(args: Any, kwargs: Any, chunks: int) -> Any:
    patches, counts = args
    own, rows = patches.split(counts.tolist()), -(-len(counts) // chunks)
    return [
        ((torch.cat(own[at : at + rows]), counts[at : at + rows]), {k: x[at : at + rows] for k, x in kwargs.items()})
        for at in range(0, len(counts), rows)
    ]


OPTIONS: dict[str, Any] = {"devices": ["cpu"] * 3, "cuts": ["middle", "head"], "chunks": 3, "split": split,
                           "batched": {"patches": False}}


@pytest.mark.parametrize(("schedule", "checkpoint", "backward", "rows"), [
    ("gpipe", "always", "split", 6), ("gpipe", "never", "autograd", 5), ("zb-h1", "always", "split", 5),
])
def test_a_module_whose_arguments_no_rule_can_cut(schedule: str, checkpoint: str, backward: str, rows: int) -> None:
    plain = module_of(of_patches, **linears("embed", "middle", "head"))
    model = SplitPipe(copy.deepcopy(plain), schedule=schedule, checkpoint=checkpoint, backward=backward, **OPTIONS)
    counts, labels = COUNTS[:rows], torch.arange(rows) % 3
    leaves = [torch.randn(int(counts.sum()), 4, requires_grad=True)]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    for training in (True, False):
        results = [module.train(training)(x * 2, counts, labels=labels) for module, x in zip((plain, model), leaves)]
        for output in results:
            output["loss"].backward()
        assert_same(results[1], results[0], "output")
        torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
        assert_same_tensors(model, plain)


def rooted(output: Tensor, target: Tensor) -> Tensor:
    """It is not recognised: a mean over rows."""
    return (output - target).square().mean(1).sqrt().mean()


@pytest.mark.parametrize("where", [{"balance": [1, 1], "batched": (False, True)},
                                   {"cuts": ["1"], "batched": {"input": (False, True)}}], ids=["balance", "cuts"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, rooted])
def test_the_target_is_among_the_keywords_and_its_rows_weigh_the_loss(where: Any, schedule: str, loss_fn: Any) -> None:
    plain = nn.Sequential(Apply(lambda value: torch.stack([own.mean(0) for own in value[0].split(value[1].tolist())])),
                          nn.Linear(5, 3))
    model = SplitPipe(
        copy.deepcopy(plain), devices=["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=loss_fn, reduction="mean",
        **where,
        split=lambda args, kwargs, chunks: [((own,), named) for own, named in split(*args, kwargs, chunks)],
    )
    counts = COUNTS[:5]  # Microbatches of two, two and one.
    x, target = torch.randn(int(counts.sum()), 5), torch.randn(5, 3) if loss_fn is rooted else torch.arange(5) % 3
    found, expected = model((x, counts), target=target), loss_fn(plain((x, counts)), target)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert_same_tensors(model, plain)
    assert_same(model((x, counts)), plain((x, counts)), "output")


def of_parts(layer: Any, checkpoint: str = "never") -> SplitPipe:
    """A model that is given its microbatches."""
    return SplitPipe(nn.Sequential(Apply(layer), nn.Linear(4, 3)), [1, 1], devices=["cpu"] * 2, chunks=2,
                     checkpoint=checkpoint, split=lambda args, kwargs, chunks: [((own,), {}) for own in args[0]])


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_microbatches_that_the_user_has_cut_share_a_tensor_and_may_be_written_to(checkpoint: str) -> None:
    model = of_parts(lambda value: value[0].mul_(2) * value[1], checkpoint)
    plain = copy.deepcopy(nn.Sequential(*model))
    x, scales, gradients = torch.randn(6, 4, requires_grad=True), [torch.ones(4, requires_grad=True) for _ in "ab"], []
    results = [model([((x * 1)[at], scales[0]) for at in (slice(0, 3), slice(3, 5), slice(5, 6))]),
               plain((x * 1, scales[1]))]
    assert_same(results[0], results[1], "output")
    for y, scale in zip(results, scales):
        gradients.append(torch.autograd.grad(y.sum(), (x, scale)))
    assert_same(gradients[0], gradients[1], "gradients")


@pytest.mark.parametrize(("given", "error", "says"), [
    (lambda args, kwargs, chunks: 3, TypeError, "must be an iterable"),
    (lambda args, kwargs, chunks: [], TypeError, r"split returned \[\]: expected a list of pairs"),
    (lambda args, kwargs, chunks: [args], ValueError, "not enough values to unpack"),
    (lambda args, kwargs, chunks: [(args[0], kwargs)], TypeError, "(?s)split returned .*: expected a list of pairs"),
    (lambda args, kwargs, chunks: [(args, kwargs)] * 4, ValueError, "split returned 4 parts for a schedule of 3"),
    (lambda args, kwargs, chunks: [(args, {})], KeyError, "target"),
    (lambda args, kwargs, chunks: [((), kwargs)], TypeError, "missing 1 required positional argument"),
])
def test_what_the_function_gives_is_verified(given: Any, error: type[Exception], says: str) -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=["cpu"], chunks=3, schedule="1f1b",
                      loss_fn=nn.MSELoss(), split=given)
    with pytest.raises(error, match=says):
        model(torch.randn(6, 4), target=torch.randn(6, 4))


@dataclass
class Sample:
    """An object whose tensors no pytree shows."""

    x: Tensor
    target: Tensor


def test_an_attached_module_is_placed_by_a_part_of_its_sample() -> None:
    plain = module_of(of_patches, **linears("embed", "middle", "head"))
    x = torch.randn(int(COUNTS.sum()), 4)
    model = attach(copy.deepcopy(plain), sample=(x, COUNTS), **OPTIONS)
    assert_same(model(x, COUNTS), plain(x, COUNTS), "output")


def of_samples(self: Any, sample: Sample) -> Tensor:
    return F.cross_entropy(self.last(self.first(sample.x)), sample.target)


@pytest.mark.parametrize("options", [{}, {"reduction": "mean"}])
def test_objects_of_unequal_numbers_of_rows_have_the_loss_of_the_batch(options: dict[str, Any]) -> None:
    def by_samples(args: Any, kwargs: Any, chunks: int) -> Any:
        return [((Sample(*own),), kwargs) for own in zip(args[0].x.chunk(chunks), args[0].target.chunk(chunks))]

    plain = module_of(of_samples, **linears("first", "last"))
    model = SplitPipe(copy.deepcopy(plain), cuts=["last"], devices=["cpu"] * 2, chunks=3, split=by_samples, **options)
    sample = Sample(torch.randn(7, 4), torch.randint(3, (7,)))
    found, expected = model(sample), plain(sample)
    for each in (found, expected):
        each.backward()
    torch.testing.assert_close(found, expected)
    assert_same_tensors(model, plain)
