"""Batches of which it is hard to see what belongs to a row: what is silent is a known limit, and ``check`` finds it."""
from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from splitpipe import SplitPipe, check
from splitpipe.microbatch.division import divide_target
from tests.helpers.modules import Rows

LIMITS = " ".join((Path(__file__).parents[2] / "docs" / "limits.md").read_text().split())


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, 6)


#: The line of docs/limits.md, what is computed, and its arguments.
SILENT: dict[str, tuple[str, Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "a mask of as many rows": ("A tensor whose first dimension happens to have the batch's size is split",
                               lambda net, a, m: net.features(m @ a), lambda n: (x(n, n), torch.rand(n, n))),
    "numbers of as many layers": ("and so is a list with as many entries",
                                  lambda net, a, w: net.features(a) * sum(w), lambda n: (x(n), [0.5] * n)),
    "an index of rows": ("an index of rows of the whole batch",
                         lambda net, a, i: net.features(a)[i % len(a)], lambda n: (x(n), torch.arange(n).roll(1))),
    "nodes of several graphs": ("the nodes or tokens of packed graphs or texts",
                                lambda net, a, i: net.features(a).new_zeros(8, 5).index_add(0, i, net.features(a)),
                                lambda n: (x(2 * n), torch.arange(n).repeat_interleave(2))),
    "the length first": ("are computed within each microbatch",
                         lambda net, a: net.features(a.softmax(0)), lambda n: (x(n, 5),)),
    "numbers of rows": ("row numbers (`torch.arange(len(y))`",
                        lambda net, a: (net.features(a), torch.arange(len(a))), lambda n: (x(n),)),
    "the number of rows": ("sizes (`len(y)`)", lambda net, a: (net.features(a), a.numel()), lambda n: (x(n),)),
    "pairs of rows": ("`y @ y.T`", lambda net, a: net.features(a) @ net.features(a).T, lambda n: (x(n),)),
    "entries not side by side": ("`torch.cat([x, -x])` then comes in another order",
                                 lambda net, a: torch.cat([net.features(a), -net.features(a)]), lambda n: (x(n),)),
    "a weight of as many rows": ("is returned once, unless it has their number of rows",
                                 lambda net, a: (net.features(a), net.last.weight[:2]), lambda n: (x(n),)),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_silent_is_a_limit_and_check_finds_it(name: str) -> None:
    line, function, arguments = SILENT[name]
    assert line in LIMITS
    assert not check(SplitPipe(Rows(function), cuts=["last"], devices=["cpu"] * 2, chunks=4), *arguments(8))


class Recurrent(nn.Module):
    """Begins without a state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, state = self.first(x, state)
        return self.last(y), state


def test_a_state_has_the_dimension_that_batched_names_even_if_there_is_none_before() -> None:
    model = SplitPipe(plain := Recurrent(), cuts=["last"], devices=["cpu"] * 2, chunks=2, batched={"state": 1})
    a, state = x(6, 4), None
    for _ in range(2):
        expected, (_, state) = plain(a, state), model(a, state)
        torch.testing.assert_close(state, expected[1])


def test_packed_sequences_have_the_rows_that_begin_in_them() -> None:
    def split(args: Any, kwargs: Any, chunks: int) -> Any:
        return [((pack_padded_sequence(part, [4] * len(part), batch_first=True),), {}) for part in padded.chunk(chunks)]

    padded, net = x(6, 4), Rows(lambda net, a: net.features(pad_packed_sequence(a, batch_first=True)[0][:, 0]))
    model = SplitPipe(copy.deepcopy(net), cuts=["last"], devices=["cpu"] * 2, chunks=2, split=split)
    packed = pack_padded_sequence(padded, [4] * 6, batch_first=True)
    torch.testing.assert_close(model(packed), net(packed))


def test_an_array_as_the_target_is_an_error() -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=4,
                      schedule="1f1b", loss_fn=lambda o, t: (o - torch.as_tensor(t)).square().mean())
    for target in (x(4).numpy(), {"y": x(4).numpy()}):
        with pytest.raises(TypeError, match="is a ndarray: expected a tensor"):
            model(x(4), target=target)
    divide_target([{"y": x(4).numpy()}] * 4, None, [2, 2])  # An entry of each row may be one.


@pytest.mark.parametrize(("layer", "given", "line"), [
    (nn.Identity, lambda: (x(8), None, torch.tensor(0.5)), "Numbers that an `nn.Sequential` returns are stacked"),
    (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), lambda: x(8, 4), "the length, for layers without `batch_first`"),
], ids=["a number that is passed on", "the length first"])
def test_what_is_silent_in_a_sequential_is_a_limit_and_check_finds_it(layer: Any, given: Any, line: str) -> None:
    assert line in LIMITS
    found = check(SplitPipe(nn.Sequential(layer(), layer()), [1, 1], devices=["cpu"] * 2, chunks=4), given())
    assert not found and "split along dimension 0: the input" in str(found)
