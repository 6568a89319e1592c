"""Counts that Python reads: n.item(), int(n), len(x); in some microbatches, they are 0."""
from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from splitpipe import SplitPipe
from tests.helpers.covering import few
from tests.promise.losses import Loss
from tests.promise.test_losses import CHUNKS, EVEN, UNEVEN, assert_close, backward, batch, made, ways

#: A module's own loss, drop-in: of many losses, some that stand for all.
SOME = "own, some"
in_one_way = pytest.mark.parametrize("way", few(1, [SOME, "own", "own scheduled", "cuts", "sequential"]))
Change = Callable[[Tensor], Any]


def verify(way: str, losses: list[Loss], sizes: tuple[int, ...] = (6, 5), change: Change = lambda target: None) -> None:
    """Compares losses and gradients; by default with two rows in each microbatch, or two, two and one."""
    way, every = ("own", 3) if way == SOME else (way, 1)
    for loss in losses[::every]:
        plain, model, expected, found = made(way, loss)
        for rows in sizes:
            x, y = torch.randn(rows, 3).double(), torch.randn(rows, 5).double()
            change(y)
            assert_close(backward(model, found(x, y)), backward(plain, expected(x, y)))


class Likelihood(nn.Module):
    """A loss with a parameter."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), loss
        self.s = nn.Parameter(torch.randn(5))
        self.double()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        o = self.layers(x)
        return self.loss((o - t).square() * self.s.exp(), self.s, o)


def of_rows(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3).double(), torch.randn(rows, 5).double()


def piped(plain: nn.Module, chunks: int) -> SplitPipe:
    return SplitPipe(copy.deepcopy(plain), cuts=["layers.1"], devices=["cpu"] * 2, chunks=chunks)


def verify_likelihood(loss: Callable[..., Tensor], chunks: int, sizes: tuple[int, ...]) -> None:
    plain = Likelihood(loss)
    model = piped(plain, chunks)
    for rows in sizes:
        given = of_rows(rows)
        assert_close(backward(model, model(*given)), backward(plain, plain(*given)))


def verify_said(loss: Callable[..., Tensor], chunks: int, rows: int, text: str = "could not be traced beyond") -> None:
    with pytest.warns(UserWarning, match=text):
        piped(Likelihood(loss), chunks)(*of_rows(rows))


def positives(t: Tensor) -> Tensor:
    return (t > 0).sum()


def with_a_metric(o: Tensor, t: Tensor) -> Tensor:
    """A count is read that has no part in the loss."""
    found = [(o.argmax(1) == t.argmax(1)).sum().item()]
    return (o - t).square().sum() / len(o) + 0 * len(found)


@in_one_way
def test_a_first_microbatch_in_which_nothing_counts_is_none(way: str) -> None:
    ways: list[Loss] = [
        # All elements over the number of some.
        lambda o, t: (o - t).square().sum() / max(1, int(positives(t))),
        lambda o, t: (o - t).square().sum() / max(1, positives(t).item()),
        lambda o, t: (o - t).square().sum() / (positives(t).item() or 1),
        lambda o, t: (o - t).square().sum() / max(positives(t).item() / 2, 1),
        lambda o, t: (o - t).square().sum() / (positives(t).item() + 1e-6),
        lambda o, t: (o - t).square().sum() * (1 / max(1, positives(t).item())),
        lambda o, t: (o - t).square().sum() / max(1, len(o[t > 0])),
        lambda o, t: (o - t).square().sum() / max(1, (t > 0).nonzero().shape[0]),
        lambda o, t: ((o - t).square() / max(1, positives(t).item())).sum(),
        lambda o, t: ((o - t).square() * (1 / max(1, positives(t).item()))).sum(),
        lambda o, t: ((o - t).square() / 2).sum() / max(1, int(positives(t))),
        lambda o, t: sum(1.0 * ((o - t).square().sum() / max(1, positives(t).item())) for _ in range(2)),
        # A mean over the mean of a mask.
        lambda o, t: ((o - t).square() * (t > 0)).mean() / ((t > 0).double().mean() + 1e-3),
        lambda o, t: ((o - t).square() * (t > 0)).mean() / (t > 0).double().mean().clamp(min=1e-3),
        # Here, 1 isn't a count.
        lambda o, t: torch.stack([1.0 * x.sum() for x in (o - t).abs()]).mean() * (int(positives(t)) >= 0),
        lambda o, t: F.mse_loss(1.0 * o, t / 1) + 0 * int(positives(t)),
        lambda o, t: 1.0 * (o - t).square().sum() / 1 + 0 * int(positives(t)),
        with_a_metric,
        # Selected elements.
        lambda o, t: o[t > 0].square().sum() / max(1, int((t > 0).sum())),
        lambda o, t: o[t > 0].square().mean() if (t > 0).any() else o.sum() * 0,
        lambda o, t: o[t > 0].square().mean() if (t > 0).any() else o.new_zeros(()),
        lambda o, t: (o * (t > 0)).square().sum() / (t > 0).sum().clamp(min=1),
    ]

    def change(y: Tensor) -> None:
        y.abs_()[:3] = -1

    verify(way, ways, (UNEVEN, EVEN), change)


@ways
def test_a_loss_that_is_0_where_nothing_counts_is_so_for_the_batch(way: str) -> None:
    ways: list[Loss] = [
        lambda o, t: o[t > 0].square().mean().nan_to_num(),
        lambda o, t: (o * (t > 0)).sum() / max(1, (t > 0).sum().item()),
        lambda o, t: (o * (t > 0)).mean() / ((t > 0).double().mean() + 1e-3),
        lambda o, t: (o * (t > 0)).mean() / (t > 0).double().mean().clamp(min=1e-3),
    ]

    def change(y: Tensor) -> None:
        y[:] = -1
        y[3, 1] = next(some)

    some = itertools.cycle([1, -1])
    verify(way, ways, (UNEVEN, UNEVEN), change)


@pytest.mark.parametrize("way", few(1, ["sequential", "own", "own scheduled", "cuts"]))
def test_a_count_of_a_row_divides_that_row(way: str) -> None:
    ways: list[Loss] = [
        lambda x, has: x.sum() / max(1, has.sum()),
        lambda x, has: x.sum() / max(1, has.sum().item()),
        lambda x, has: x[has].sum() * (1 / max(1, int(has.sum()))),
        lambda x, has: x[has].sum() / max(1, len(x[has])),
    ]
    ends: list[Callable[..., Any]] = [lambda rows: sum(rows) / len(rows), lambda rows: sum(torch.stack(rows))]
    for row, end in product(ways, ends):
        def loss(o: Tensor, t: Tensor, row: Loss = row, end: Callable[..., Any] = end) -> Any:
            return end([row((a - b).square(), b > 0) for a, b in zip(o, t)])

        plain, model, expected, found = made(way, loss)
        x, y = batch("flat", UNEVEN)
        for k, count in enumerate([4, 1, 5, 2, 0, 4, 2]):  # Not 3, as many as rows: see ``RowNumbers``.
            y[k, :count], y[k, count:] = 1, -1
        assert_close(backward(model, found(x, y)), backward(plain, expected(x, y)))


def halves(o: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """A reconstruction and a divergence, both summed."""
    return (o - t).square().sum(), (1 + o - o.exp()).sum()


@in_one_way
def test_a_half_and_the_number_of_two_rows_are_told_apart(way: str) -> None:
    ways: list[Loss] = [
        lambda o, t: halves(o, t)[0] / len(o) + -0.5 * halves(o, t)[1] / len(o),
        lambda o, t: (halves(o, t)[0] - 0.5 * halves(o, t)[1]) / o.size(0),
        lambda o, t: (lambda n: (halves(o, t)[0] - 0.5 * halves(o, t)[1]) / n)(len(o)),
        lambda o, t: (lambda n: halves(o, t)[0] / n - 0.5 * halves(o, t)[1] / n)(o.shape[0]),
        lambda o, t: (lambda n: halves(o, t)[0] / 2 / n + halves(o, t)[1] / n / 2)(len(o)),
        lambda o, t: (lambda n: halves(o, t)[0] * 0.5 / (t > -9).sum())(len(o)),
        lambda o, t: halves(o, t)[0] * (1 / len(o)),
        lambda o, t: halves(o, t)[0] * (1 / len(o)) + o.abs().sum(),
        lambda o, t: halves(o, t)[0] / len(o) - o.abs().sum(),
        lambda o, t: ((o - t).square() / len(o)).sum() + o.abs().sum(),
        lambda o, t: (lambda n: (halves(o, t)[0] + 3.0) * 0.5 / n)(len(o)),
        lambda o, t: (lambda n: halves(o, t)[0] / n + (0.5 * halves(o, t)[1]).detach() / n)(len(o)),
        lambda o, t: (lambda n: (halves(o, t)[0] / n + halves(o, t)[1] / n) / 2)(len(o)),
        lambda o, t: 0.5 * halves(o, t)[0] * torch.full((), 3.0).exp() / o.size(0),
        lambda o, t: (0.5 * halves(o, t)[0].neg() * torch.full((), 3.0) + o.shape[0] * 3.0) / o.size(0),
        lambda o, t: (lambda x: x.abs().sum() / math.prod(x.shape[1:]) / len(x))(o[:, :, None].expand(-1, -1, 2)),
        lambda o, t: (lambda x: x.abs().sum() / 10 / x.shape[0])(o[:, :, None].expand(-1, -1, 2)),
    ]
    verify(way, ways)


@in_one_way
def test_rows_may_be_divided_by_their_number_before_they_are_added_up(way: str) -> None:
    ways: list[Loss] = [
        lambda o, t: ((o - t).square() / o.shape[0]).sum(),
        lambda o, t: ((o - t).square() / t.size(0)).sum() + o.abs().sum(),
        lambda o, t: ((o - t).square() / o.size(dim=-2)).sum(1).sum(),
        lambda o, t: ((o - t).square() / o.numel()).sum() + o.abs().mean(),
        lambda o, t: (lambda b, c: ((o - t).square() / (c * b)).sum() + (o.abs() / (2 * b) / c).sum())(*o.shape),
        lambda o, t: (lambda x: (x.square() / x.shape[1]).sum())((o - t).T),
        lambda o, t: (lambda x: (x.square() / x.shape[0]).sum())((o - t).flatten()),
        lambda o, t: (lambda x: (x.square() / max(x.shape[0], 1)).sum())((o - t)[t > -9]),
        lambda o, t: ((o - t).square() * (1 / o.shape[0])).sum() + o.abs().sum() * (1 / o.size(0)),
        lambda o, t: (lambda x: (x.square() / x.shape[1]).sum())(o - t),  # Not the rows: a sum.
        lambda o, t: (o - t).square().sum() / (o.shape[0] * o.shape[1]) + 0.5 * o.abs().sum() / o.shape[0],
    ]
    verify(way, ways)


@in_one_way
def test_a_size_and_another_count_are_added_up(way: str) -> None:
    ways: list[Loss] = [
        lambda o, t: o.abs().sum() / (len((t > 0).nonzero()) + o.size(0)),
        lambda o, t: o.abs().sum() / (o.shape[0] + int(positives(t))),
        lambda o, t: o.abs().sum() / (o.size(0) + positives(t).tolist()),
        lambda o, t: o[t <= 0].square().sum() / (len(o.flatten()) - positives(t).item()),
        lambda o, t: o[t <= 0].square().sum() / (t.numel() - int(positives(t))),
        lambda o, t: o.abs().sum() / sum([len(o[t > 0]), o[t <= 0].shape[0]]),
        lambda o, t: o.abs().sum() / (sum((t > 0).sum(1).tolist()) + o.shape[0]),
        lambda o, t: o.abs().sum() / (len((t[:, 2] > 0).nonzero()) + o.shape[0]),  # Once only one.
    ]

    def change(y: Tensor) -> None:
        y[:, 0], y[:, 1], y[:, 2] = 1, -1, torch.tensor([1.0, 1, -1, 1, 1, 1])[: len(y)]

    verify(way, ways, change=change)


def test_a_number_that_is_added_to_a_count_and_differs_between_microbatches_is_said() -> None:
    others = itertools.count(2.5)
    verify_said(lambda e, s, o: e.sum() / (o.shape[0] + next(others)), 2, 6)


@in_one_way
def test_a_tensor_that_is_made_of_a_size_counts(way: str) -> None:
    ways: list[Loss] = [
        lambda o, t: (o.abs().sum() / torch.as_tensor([o.shape[0]], dtype=torch.float64)).sum(),
        lambda o, t: o.abs().sum() / torch.tensor([o.size(0)]).clamp(min=1).squeeze(),
        lambda o, t: o.abs().sum() / torch.full((), o.shape[0]),
        lambda o, t: o.abs().sum() / torch.tensor(o.shape[0] + 2.5),
        lambda o, t: o.abs().sum() * torch.tensor(1 / o.shape[0]),
        lambda o, t: (o - t).square().sum() + torch.tensor(2 * o.shape[0]) * 1.5,
        lambda o, t: o.abs().sum() / torch.tensor([o.shape[0]]).item(),
        lambda o, t: o.abs().sum() / torch.as_tensor([int(positives(t))], dtype=torch.float64).clamp(min=1).item(),
    ]
    verify(way, ways, (6, 5, 3))


def test_a_fraction_of_the_entries_is_said() -> None:
    ways: list[Loss] = [
        lambda o, t: o[t > 0].square().mean() * (positives(t).item() / t.numel()),
        lambda o, t: o.abs().sum() / (positives(t).item() * o.shape[0]),
        lambda o, t: o.abs().sum() * (1 / (positives(t).item() / t.numel() + 1)),
    ]
    for loss in ways:
        layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).double()
        model = SplitPipe(layers, devices=["cpu"] * 2, balance=[1, 1], chunks=3, loss_fn=loss, schedule="1f1b")
        x, t = torch.randn(9, 3).double(), torch.randn(9, 5).double()
        t[:, 0], t[:4, 1:], t[4:, 1:] = 1, 1, -1
        with pytest.warns(UserWarning, match="could not be traced beyond a number that counts rows"):
            model(x, t).backward()


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own.
def test_a_compiled_function_between_blocks_may_read_sizes() -> None:
    mean = torch.compile(lambda x, n: x.sum() / n + x.sum() / x.shape[0], backend="eager")
    # The compiler makes a second graph, for any number of rows.
    verify_likelihood(lambda e, s, o: mean(e, o.shape[0]), 3, (9, 12, 7, 16))


def test_a_part_of_rows_that_are_divided_by_one_is_said() -> None:
    verify_said(lambda e, s, o: (e / o.shape[0])[e > 0].sum(), 3, 3)


@in_one_way
def test_a_size_is_compared_with_tensors_and_arrays(way: str) -> None:
    ways: list[Loss] = [
        lambda o, t: ((o - t).square() * (o.shape[0] > t.argmax(1) - 9)[:, None]).mean(),
        lambda o, t: ((o - t).square() * (t.size(0) <= (t.abs() + 9))).mean(),
        lambda o, t: ((o - t).square() * (o.numel() == t.argmax(1) + o.numel() - 1)[:, None]).mean(),
        lambda o, t: (o - t).square().mean() * float((o.shape[0] < np.arange(100)).all() + 1),
        lambda o, t: (o - t).square().mean() * float((o.shape[0] >= np.arange(1, 2)).all()),
    ]
    verify(way, ways)


GROWING: dict[str, Callable[..., Tensor]] = {
    "the entries": lambda e, s, o: e.sum() - o.numel() / 10 * s.sum(),
    "the rows, as a vector": lambda e, s, o: 0.5 * (e.sum() - (o.shape[0] * s).sum()),
    "divided": lambda e, s, o: (e.sum() - (s * o.size(0)).sum()) / o.shape[0],
    "with numbers": lambda e, s, o: e.sum() + 0.5 * (o.numel() * 1.8 - (s * o.size(0)).sum()),
    "all but one": lambda e, s, o: e.sum() - (o.shape[0] - 1) * s.sum() + 3 * (7 - o.shape[0]),
    "sizes added": lambda e, s, o: e.sum() - (o.shape[0] + e.shape[0] - 2) * s[0],
    "minus": lambda e, s, o: e.sum() + -o.shape[0] * s[0] - o.shape[0] * -2 * s[1],
    "a mean": lambda e, s, o: e.mean() * o.shape[0] - o.shape[0] * s.sum(),
    "means": lambda e, s, o: (e.mean() + 0.3 * o[:, :2].abs().mean() + s[0] * 2) * o.shape[0],
    "a penalty": lambda e, s, o: e.mean() + s.square().sum() / o.shape[0],
    "a penalty less the error": lambda e, s, o: s.square().sum() / o.shape[0] - e.sum() / o.numel(),
    "an unused inverse": lambda e, s, o: e.sum() + 0 * (1 / o.shape[0] + 1),
    "an unused tensor": lambda e, s, o: e.sum() + 0 * torch.full((o.shape[0],), o.shape[0]).dim(),
    "nothing": lambda e, s, o: torch.zeros(()) * o.shape[0] + e.sum(),
    "a power": lambda e, s, o: e.sum() / o.shape[0] + o.shape[0] ** torch.zeros(()) * s.sum(),
    "filled weights": lambda e, s, o: (e.mean(1) * torch.full((o.shape[0],), 1 / o.shape[0])).sum() + s.sum(),
    "a number and an error": lambda e, s, o: 2 * o.shape[0] + e.sum(),
}


@pytest.mark.parametrize("name", ["len(o)", "float(len(o))", "1.0 * o.shape[0]", "int(o.numel())"])
def test_entries_may_be_multiplied_by_the_inverse_of_a_count(name: str) -> None:
    count = eval(f"lambda o: {name}")
    # With two rows, 0.5 is a constant.
    verify_likelihood(lambda e, s, o: (e * (1 / count(o))).sum() - o.abs().mean(), 2, (6, 13))


def test_a_sum_may_be_divided_by_what_a_shape_says_of_its_elements() -> None:
    verify_likelihood(lambda e, s, o: e.sum() / o.shape.numel() + o.abs().sum() / e.size().numel(), 2, (6, 7))


@pytest.mark.parametrize("name", GROWING)
def test_what_is_multiplied_by_a_size_grows_with_the_rows(name: str) -> None:
    verify_likelihood(GROWING[name], 3, (9, 7, 18))  # Not two in a microbatch, of which 0.5 may be the inverse.


def weights_of(x: Tensor) -> Tensor:
    """1 for rows with the largest value of a column."""
    found = torch.zeros(len(x)).double()
    found[x.argmax(0)] = 1
    return found


@pytest.mark.parametrize("name", [
    "2", "1.0 * o.shape[0]", "int(o.shape[0])", "float(o.shape[0])", "math.prod(o.shape[:1])", "o.shape[0] ** 1",
    "1e-9 + o.shape[0]", "max(1, o.shape[0])", "round(o.shape[0])", "abs(o.shape[0])", "divmod(o.shape[0], 1)[0]",
])
def test_a_small_divisor_is_a_constant_unless_python_has_computed_it_from_a_size(name: str) -> None:
    by = eval(f"lambda o: {name}")

    def loss(e: Tensor, s: Tensor, o: Tensor) -> Tensor:
        return o.abs().mean() * (o.shape[0] if name == "2" else 1) + e.sum() / by(o)

    for chunks in (3, 6):
        verify_likelihood(loss, chunks, (6,))


UNFIT: dict[str, Callable[..., Tensor]] = {
    "a sum": lambda e, s, o: e.sum() * o.shape[0],
    "a mean, divided": lambda e, s, o: e.mean() / o.shape[0],
    "rows": lambda e, s, o: (e * o.shape[0]).sum(),
    "a mean of some rows": lambda e, s, o: (e.mean() + o[:3].abs().mean()) * o.shape[0],
    "a mean of some": lambda e, s, o: e[torch.arange(e.numel()).view_as(e) < 9].mean() * o.shape[0],
    "a length": lambda e, s, o: e.sum() + len(o) * s.sum(),
    "over a length": lambda e, s, o: e.mean() + s.sum() / len(o),
    "over a float": lambda e, s, o: e.mean() + s.sum() / float(len(o)),
    "times the inverse of a float": lambda e, s, o: e.mean() + s.sum() * (1.0 / o.shape[0]),
    "times a fraction of a float": lambda e, s, o: e.mean() + 0.1 / (2 * o.shape[0]) * s.sum(),
    "half the rows, twice": lambda e, s, o: e.sum() + 0.5 * (2 * o.shape[0]) * s.sum(),
    "a length, less one": lambda e, s, o: e.sum() / (len(o) - 1),
    "a mean over a length": lambda e, s, o: e.mean() / len(o),
    "a size over a parameter": lambda e, s, o: e.mean() + o.shape[0] / s.exp().sum(),
    "an inverse, added": lambda e, s, o: e.mean() + 1 / o.shape[0],
    "a tensor of a ratio": lambda e, s, o: e.mean() * torch.tensor((e > 1).sum().item() / o.shape[0]),
    "a factor of a sum": lambda e, s, o: torch.add(o.abs().sum(), e.sum(), alpha=1 / o.shape[0]),
    "a mask of found rows": lambda e, s, o: (e.mean(1) * weights_of(o)).sum(),
    "imaginary": lambda e, s, o: (1j * e.sum() / len(o)).abs(),
    "less an imaginary": lambda e, s, o: (1j - e.sum() / 1j).abs(),
    "half of the rows": lambda e, s, o: e[: len(e) // 2].sum() + o[o.shape[0] // 2 :].abs().sum(),
    "half the entries": lambda e, s, o: e.sum() + 0.5 * o.numel() * s.sum(),
}


@pytest.mark.parametrize("loss", [
    lambda e, s, o: e.mean() + s.sum() / len(o), lambda e, s, o: e.mean() + s.sum() / float(o.shape[0]),
])
def test_a_penalty_over_a_length_of_three_is_said(loss: Callable[..., Tensor]) -> None:
    verify_said(loss, 2, 6)


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_not_a_sum_of_microbatches_because_of_a_size_is_said(name: str) -> None:
    verify_said(UNFIT[name], 2, 14)


def test_halves_of_two_rows_are_not_rows() -> None:
    verify_said(lambda e, s, o: e[: o.shape[0] // 2].sum() + o[o.shape[0] // 2 :].abs().sum(), 2, 4, "part of the rows")


class Shaped(nn.Module):
    """A block that is given a number of rows; what type it has is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.types = nn.Linear(3, 3), list[Any]()

    def forward(self, x: Tensor, size: Any) -> Tensor:
        self.types.append(type(size[0]))
        out: Tensor = self.layer(x.view(size))
        return out


@pytest.mark.parametrize("checkpoint", few(1, ["always", "never"]))
def test_an_untraced_block_and_an_output_have_a_plain_size(checkpoint: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Shaped(), Shaped()

        def forward(self, x: Tensor, t: Tensor) -> Any:
            out = self.two(self.one(x, x.shape), (x.shape[0], 3))
            return (out - t).square().sum() / x.shape[0], (x.shape[1], 2 * x.shape[1])

    plain, own = Model().double(), Model().double()
    own.load_state_dict(plain.state_dict())
    model = SplitPipe(own, cuts=["two"], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    for rows in (6, 5):  # The first call traces all blocks.
        x, t = torch.randn(rows, 3).double(), torch.randn(rows, 3).double()
        (found, sizes), (expected, _) = model(x, t), plain(x, t)
        assert (type(sizes[0]), sizes) == (int, (3, 6))
        assert_close(backward(model, found), backward(plain, expected))
    assert [*map(type, sizes)] == [int, int]
    assert own.one.types[-1] is own.two.types[-1] is int


class Sizes(NamedTuple):
    """A number of rows, and others."""

    rows: int
    others: list[Any]


class Nested(Shaped):
    """A block that is given nestings of sizes, and adds one to a list."""

    def forward(self, x: Tensor, sizes: Sizes, named: Any = None) -> Tensor:
        self.types = [type(n) for n in tree_leaves((sizes, named))]
        sizes.others.append(sizes.rows)
        return super().forward(x, [sizes.rows, *named["columns"]])


@pytest.mark.parametrize("way", few(2, [
    {"checkpoint": "never"}, {"checkpoint": "always"}, {"schedule": "1f1b", "checkpoint": "never"},
]))
def test_an_untraced_block_has_plain_sizes_in_nestings(way: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Nested(), Nested()

        def forward(self, x: Tensor, t: Tensor) -> Any:
            sizes = Sizes(x.shape[0], [x.shape[0] / 2, [x.numel()]])
            for block in (self.one, self.two):
                x = block(x, sizes, named={"rows": [x.shape[:1]], "columns": [3]})
            return (x - t).square().sum() / sizes.others[len(sizes.others) - 1] + 0 * len(sizes.others)

    plain, own = Model().double(), Model().double()
    own.load_state_dict(plain.state_dict())
    model = SplitPipe(own, cuts=["two"], devices=["cpu"] * 2, chunks=3, **way)
    for rows in (18, 15):  # The first call traces all blocks.
        x, t = torch.randn(rows, 3).double(), torch.randn(rows, 3).double()
        assert_close(backward(model, model(x, t)), backward(plain, plain(x, t)))
    assert {*own.one.types, *own.two.types} == {int, float}


def test_a_count_from_an_earlier_call_is_a_constant() -> None:
    kept = [3.0]
    plain, model, expected, found = made("sequential", lambda o, t: (o - t).square().sum() / kept[0])
    reader = made("sequential", lambda o, t: (o - t).square().sum() / read(t))[3]

    def read(t: Tensor) -> Any:
        kept[0] = (t > -9).sum().item()
        return kept[0]

    x, y = batch("flat", UNEVEN)
    reader(x, y)
    assert type(kept[0]) not in (int, float)
    assert_close(backward(model, found(x, y)), backward(plain, expected(x, y)))


@pytest.mark.parametrize("of", [lambda t: t > -9, lambda t: t[0].repeat(2) > -9], ids=["batch", "row"])
def test_a_count_that_python_reads_is_a_number_like_others(of: Callable[[Tensor], Tensor]) -> None:
    told: list[Any] = []

    def loss(o: Tensor, t: Tensor) -> Tensor:
        n, half = of(t).sum().item(), (of(t).sum() / 2).item()
        told.append([
            n, pickle.loads(pickle.dumps(n)), copy.deepcopy([half]), json.dumps({"n": n, "half": half}), f"{n:3d} {n}",
            {n: 1}[int(n)], list(range(n)), [1] * n, n + 1, 1 + n, n - 1, 2 * n, n / 2, 60 / n, n // 2, -n, n**2, n + n,
            half - n, n == 10, n != 10, n < 11, n <= 10, n > 10, n >= 10, bool(n), math.sqrt(n),
            np.float64(2) * n, Fraction(1, 2) + n,
            torch.zeros(n).sum(), torch.arange(20)[:n].sum(), (torch.ones(2) * n).sum(), (n - torch.ones(2)).sum(),
        ])
        return F.mse_loss(o, t)

    *_, expected, found = made("sequential", loss)
    x, y = torch.randn(EVEN, 3).double(), torch.randn(EVEN, 5).double()
    found(x, y)
    expected(x[:2], y[:2])
    *traced, plain = told
    assert len(traced) == CHUNKS
    for values in traced:
        assert values == plain
        assert type(values[1]) is int and type(values[2][0]) is float
