"""Batches of which it is hard to see what belongs to a row: each is exact, warned of, refused, or a known limit."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, check
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same, assert_same_tensors

LIMITS = " ".join((Path(__file__).parents[2] / "docs" / "limits.md").read_text().split())
#: Rows and chunks: even and uneven microbatches, and those of a single row.
SIZES = (8, 4), (7, 3), (4, 4)
EXACT, WARNED, REFUSED = "exact", "warned", "refused"


class Net(nn.Module):
    """A function of itself and its arguments; with its loss, as a schedule needs it."""

    def __init__(self, function: Callable[..., Any], scheduled: bool) -> None:
        super().__init__()
        self.first, self.last, self.embed = nn.Linear(6, 5), nn.Linear(5, 3), nn.Embedding(16, 6)
        self.function, self.scheduled = function, scheduled

    def rows(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]

    def forward(self, *args: Any) -> Any:
        y = self.function(self, *args)
        return {"y": y, "loss": loss_of(y)} if self.scheduled else y


def loss_of(output: Any) -> Tensor:
    """That of a schedule, or a mean of squares."""
    if isinstance(output, dict):
        return output["loss"]  # type: ignore[no-any-return]
    return (output[0] if isinstance(output, tuple) else output).square().mean()  # type: ignore[no-any-return]


class Case(NamedTuple):
    """What is computed, the arguments for a number of rows, and what comes of it for ``SIZES``."""

    function: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    outcome: str = EXACT
    batched: Any = None


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, 6)


def counts(rows: int) -> list[int]:
    return [1 + row % 3 for row in range(rows)]


def offsets(rows: int) -> Tensor:
    return F.pad(torch.tensor(counts(rows)).cumsum(0), (1, 0))


def packed(net: Net, tokens: Tensor, ends: Tensor) -> Tensor:
    """Sums of sequences in one tensor."""
    y, ends = net.first(tokens).tanh(), ends.tolist()
    return net.last(torch.stack([y[i:j].sum(0) for i, j in zip(ends[:-1], ends[1:])]))


def scattered(net: Net, ids: Tensor, images: Tensor) -> Tensor:
    """Images in the places of tokens, as in a model of vision and language."""
    given = net.embed(ids)
    return net.rows(given.masked_scatter((ids == 0)[..., None].expand_as(given), images))


def passed(net: Net, nodes: Tensor, edges: Tensor) -> Tensor:
    y = net.first(nodes)
    return net.last(y.index_add(0, edges[0], y[edges[1]]))


CASES: dict[str, Case] = {
    "a mask of positions": Case(lambda net, a, m: net.rows(m @ a), lambda n: (x(n, 5), torch.rand(5, 5))),
    "a row for all": Case(lambda net, a, m: net.rows(a * m), lambda n: (x(n, 5), x(1, 5))),
    "cu_seqlens": Case(packed, lambda n: (x(sum(counts(n))), offsets(n)), REFUSED),
    "cu_seqlens of one row": Case(lambda net, a, c: packed(net, a[0], c), lambda n: (x(1, sum(counts(n))), offsets(n))),
    "images beside tokens": Case(
        scattered, lambda n: ((torch.arange(5) >= torch.tensor(counts(n))[:, None]).long(), x(sum(counts(n)))), WARNED),
    "edges of a graph": Case(passed, lambda n: (x(n), torch.arange(2 * n).view(2, n) % n), REFUSED),
    "a table": Case(lambda net, a, table: net.rows(a + table.mean(0)), lambda n: (x(n), x(11)), WARNED),
    "the batch second": Case(lambda net, a, p: net.rows(a + p.sum(0)), lambda n: (x(n, 5), x(3, n, 5)), REFUSED),
    "the same tensor twice": Case(
        lambda net, a, b: net.rows(a + b) * (2 if a is b else 1), lambda n: (lambda a: (a, a))(x(n))),
    "a state of five layers": Case(lambda net, a: net.rows(a).expand(5, -1, -1), lambda n: (x(n),), REFUSED),
}
#: The line of docs/limits.md, what is computed, and its arguments.
SILENT: dict[str, tuple[str, Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "a mask of as many rows": ("A tensor whose first dimension happens to have the batch's size is split",
                               lambda net, a, m: net.rows(m @ a), lambda n: (x(n, n), torch.rand(n, n))),
    "numbers of as many layers": ("and so is a list with as many entries",
                                  lambda net, a, w: net.rows(a) * sum(w), lambda n: (x(n), [0.5] * n)),
    "an index of rows": ("an index of rows of the whole batch",
                         lambda net, a, i: net.rows(a)[i % len(a)], lambda n: (x(n), torch.arange(n).roll(1))),
    "nodes of several graphs": ("the nodes or tokens of packed graphs or texts",
                                lambda net, a, i: net.rows(a).new_zeros(8, 3).index_add(0, i, net.rows(a)),
                                lambda n: (x(2 * n), torch.arange(n).repeat_interleave(2))),
    "the length first": ("are computed within each microbatch",
                         lambda net, a: net.rows(a.softmax(0)), lambda n: (x(n, 5),)),
    "numbers of rows": ("row numbers (`torch.arange(len(y))`",
                        lambda net, a: (net.rows(a), torch.arange(len(a))), lambda n: (x(n),)),
    "the number of rows": ("sizes (`len(y)`)", lambda net, a: (net.rows(a), len(a)), lambda n: (x(n),)),
    "pairs of rows": ("`y @ y.T`",
                      lambda net, a: net.rows(a) @ net.rows(a).T, lambda n: (x(n),)),
    "entries not side by side": ("`torch.cat([x, -x])` then comes in another order",
                                 lambda net, a: torch.cat([net.rows(a), -net.rows(a)]), lambda n: (x(n),)),
    "a weight of as many rows": ("is returned once, unless it has their number of rows",
                                 lambda net, a: (net.rows(a), net.embed.weight[:2]), lambda n: (x(n),)),
}


def built(case: Case, chunks: int, schedule: str | None = None) -> tuple[Net, SplitPipe]:
    plain = Net(case.function, schedule is not None)
    return plain, SplitPipe(
        copy.deepcopy(plain), cuts=["last"], devices=["cpu"] * 2, chunks=chunks, batched=case.batched,
        schedule=schedule,
    )


def outcome(case: Case, rows: int, chunks: int, schedule: str | None) -> str:
    plain, model = built(case, chunks, schedule)
    given = case.arguments(rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "the loss, or another number")
        try:
            found = model(*given)
        except Exception:
            return REFUSED
    if caught:
        assert "every microbatch gets all of it" in str(caught[0].message)
        return WARNED
    expected = plain(*given)
    assert_same(found, expected, "output")
    for output in (expected, found):
        loss_of(output).backward()
    assert_same_tensors(model, plain)
    return EXACT


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_exact_or_said(name: str, schedule: str | None) -> None:
    case = CASES[name]
    assert {outcome(case, *sizes, schedule) for sizes in SIZES} == {case.outcome}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_silent_is_a_limit_and_check_finds_it(name: str) -> None:
    line, function, arguments = SILENT[name]
    assert line in LIMITS
    assert not check(built(Case(function, arguments), 4)[1], *arguments(8))


@pytest.mark.parametrize(("layer", "given", "line"), [
    (nn.Identity, lambda: (x(8), None, torch.tensor(0.5)), "Numbers that an `nn.Sequential` returns are stacked"),
    (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), lambda: x(8, 4), "the length, for layers without `batch_first`"),
], ids=["a number that is passed on", "the length first"])
def test_what_is_silent_in_a_sequential_is_a_limit_and_check_finds_it(layer: Any, given: Any, line: str) -> None:
    assert line in LIMITS
    found = check(SplitPipe(nn.Sequential(layer(), layer()), [1, 1], devices=["cpu"] * 2, chunks=4), given())
    assert not found and "split along dimension 0: the input" in str(found)
