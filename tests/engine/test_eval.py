"""In eval mode microbatches run where their outputs make that of the batch; else one does, and the output is right."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.engine.models import piped
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same


class Cache:
    """An object that pytree doesn't know."""


class Net(nn.Module):
    """Counts its calls; gives what a function makes of the module and its output."""

    def __init__(self, function: Any = lambda self, y: y) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(8, 4))
        self.function = function
        self.state: Any = None
        self.calls: list[int] = []

    def forward(self, x: Tensor, labels: Tensor | None = None, use_cache: bool = True) -> Any:
        self.calls.append(len(x))
        y = self.function(self, self.two(self.one(x)))
        if labels is None:
            return y
        return {"loss": (y - labels).square().mean(), "y": y, "cache": Cache() if use_cache else None}


def kept(self: Net, y: Tensor) -> Tensor:
    self.kept[: len(y)].copy_(y.detach())
    return y


def stateful(self: Net, y: Tensor) -> Tensor:
    y = y if self.state is None else y + self.state
    self.state = y.detach()
    return y


def first_row(self: Net, y: Tensor) -> Tensor:
    y = y.clone()
    y[0] = 0
    return y


def chosen(self: Net, y: Tensor) -> Tensor:
    return (y > 0).nonzero()


WHOLE: dict[str, Any] = {
    "an integer count": lambda self, y: (y, (y > 0).sum()),
    "a comparison of rows": lambda self, y: y @ y.t(),
    "a mean over rows": lambda self, y: (y, y.mean(0)),
    "rows that see each other": lambda self, y: y - y.mean(0),
    "rows that see earlier ones": lambda self, y: y.cumsum(0),
    "rows with their numbers": lambda self, y: y + torch.arange(len(y))[:, None],
    "a first row": first_row,
    "numbers of rows in a list": lambda self, y: [{"row": own * k} for k, own in enumerate(y)],
    "a row's entries apart": lambda self, y: torch.cat([y, -y]),
    "a row's nearly equal entries apart": lambda self, y: 5 + 1e-3 * torch.cat([y, -y]),
    "rows of the whole batch alone": lambda self, y: y.view(8, -1),
    "a buffer that is written to": kept,
    "a state in an attribute": stateful,
    "a number of rows of the data": chosen,
}
APART: dict[str, Any] = {
    "a tensor": lambda self, y: y,
    "a nesting": lambda self, y: {"a": (y, [y * 2, None]), "b": "text"},
    "one thing per row": lambda self, y: [{"row": own} for own in y],
    "a parameter": lambda self, y: (y, self.two.weight),
    "the batch second": lambda self, y: y.t(),
    "nearly equal entries": lambda self, y: 5 + 1e-3 * torch.stack([y, -y], 1).flatten(0, 1),
}


@pytest.mark.parametrize("name", [*WHOLE, *APART])
@pytest.mark.parametrize("grad", [True, False])
def test_the_output_is_that_of_the_module(name: str, grad: bool) -> None:
    plain = Net({**WHOLE, **APART}[name]).eval()
    model = piped(plain, ["two"], chunks=4).eval()
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(8, 4)
        model.calls.clear()
        with torch.set_grad_enabled(grad):
            assert_same(model(x), plain(x), "output")
        # Rows that the data choose may be as many in a first look as if they were not chosen.
        assert name in APART and model.calls == [2] * 4 or name in WHOLE and model.calls[-1] == 8
    assert_same(model.kept, plain.kept, "buffer")


def test_an_output_with_an_object_is_that_of_the_whole_batch() -> None:
    model = piped(Net(lambda self, y: (y, Cache())), ["two"]).eval()
    for _ in range(2):
        y, cache = model(torch.randn(6, 4))
        assert isinstance(cache, Cache) and model.calls.pop() == 6


def test_with_labels_no_cache_is_asked_for_and_microbatches_run() -> None:
    plain = Net().eval()
    model = piped(plain, ["two"]).eval()
    x, labels = torch.randn(7, 4), torch.randn(7, 4)
    found, expected = model(x, labels=labels), plain(x, labels=labels)
    assert model.calls == [3, 3, 1] and found["cache"] is None
    assert_same([found["y"], found["loss"]], [expected["y"], expected["loss"]], "output")
    model.calls.clear()
    assert isinstance(model(x, labels=labels, use_cache=True)["cache"], Cache) and model.calls == [7]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_with_a_target_microbatches_run(schedule: str) -> None:
    plain = Net().eval()
    model = SplitPipe(copy.deepcopy(plain), cuts=["two"], devices=["cpu"] * 2, chunks=2, schedule=schedule,
                      loss_fn=nn.MSELoss()).eval()
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    torch.testing.assert_close(model(x, target=target), nn.MSELoss()(plain(x), target))
    assert model.calls == [3, 3]


def test_in_doubt_about_a_list_one_microbatch_runs() -> None:
    def sums(self: Any, rows: list[Tensor]) -> Tensor:
        return self.two(self.one(torch.stack([own.sum(0) for own in rows])))

    plain, given = module_of(sums, **linears("one", "two")), [torch.randn(3, 4) for _ in range(5)]
    model = piped(plain, ["two"]).eval()
    assert_same(model(given), plain(given), "output")
    with pytest.raises(ValueError, match="it could be 5 rows, one entry each, or a batch of 3 rows"):
        model.train()(given)
