"""A batch that is not the first dimension: batched= names it, and outputs are joined along theirs."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.batch.dims import batches, only_dimension
from tests.helpers import scheduled
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same, assert_same_tensors, assert_transparent
from tests.promise.layers import Apply

LENGTH, WIDTH = 5, 8
SIZES = pytest.mark.parametrize(("rows", "chunks"), [(4, 2), (7, 3), (5, 4), (8, 8)])


class Step(nn.Module):
    """An LSTM that takes and gives its state."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=batch_first)

    def forward(self, value: Any) -> Any:
        x, state = value
        return self.rnn(x, state)


def transformer() -> nn.Sequential:
    return nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0) for _ in range(2)])


@SIZES
@pytest.mark.parametrize("batch_first", [True, False])
def test_states_of_an_rnn_have_the_batch_second(batch_first: bool, rows: int, chunks: int) -> None:
    x = torch.randn(rows, LENGTH, WIDTH) if batch_first else torch.randn(LENGTH, rows, WIDTH)
    state = torch.randn(2, rows, WIDTH), torch.randn(2, rows, WIDTH)
    module = nn.Sequential(Step(batch_first), Step(batch_first))
    assert_transparent(module, (x, state), batched=(0, 1) if batch_first else 1, chunks=chunks)


def test_slices_are_contiguous_where_the_batch_is() -> None:
    viewed = Apply(lambda x: x.view(LENGTH, -1, 2, WIDTH // 2).flatten(2).relu())
    assert_transparent(nn.Sequential(viewed, nn.Linear(WIDTH, 2)), torch.randn(LENGTH, 6, WIDTH), batched=1, chunks=3)


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("length", "batched"), [
    (5, 1), (5, {"input": 1, "target": 1}), (4, {"input": -2, "target": -1}),
])
def test_targets_are_cut_along_theirs(batched: Any, length: int, name: str) -> None:
    target = torch.randint(0, WIDTH, (length, 4))
    scheduled.assert_transparent(transformer(), torch.randn(length, 4, WIDTH), name, target=target, loss_fn=of_tokens,
                                 batched=batched, chunks=4)


def test_a_target_of_two_dimensions_of_that_size_is_an_error_that_shows_both() -> None:
    model = SplitPipe(transformer(), [1, 1], devices=["cpu"] * 2, chunks=2, batched=1, loss_fn=of_tokens)
    with pytest.raises(ValueError, match=r"\[4, 4\]: its dimension 0 or its dimension 1 could be the batch. Spec"):
        model(torch.randn(4, 4, WIDTH), target=torch.randint(0, WIDTH, (4, 4)))


class Turned(nn.Module):
    """Positions of [3, batch, length] beside an input of [batch, length, width], and an output of all orders."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        y = self.two(self.one(x) * position_ids.sum(0)[..., None])
        return {"y": y, "turned": y.transpose(0, 1), "positions": position_ids * 2}


@SIZES
@pytest.mark.parametrize("training", [True, False])
def test_arguments_are_cut_along_what_is_said_of_their_names(training: bool, rows: int, chunks: int) -> None:
    plain = Turned().train(training)
    model = SplitPipe(copy.deepcopy(plain), cuts=["two"], devices=["cpu"] * 2, chunks=chunks,
                      batched={"position_ids": 1}).train(training)
    x, positions = torch.randn(rows, LENGTH, WIDTH), torch.randn(3, rows, LENGTH, requires_grad=True)
    mine = positions.detach().clone().requires_grad_()
    found, expected = model(x, mine), plain(x, positions)
    assert_same(found, expected, "output")
    for output in (found, expected):
        (output["y"].square().mean() + output["positions"].mean()).backward()
    assert_same_tensors(model, plain)
    torch.testing.assert_close(mine.grad, positions.grad)


def test_positions_of_which_nothing_is_said_are_named_by_the_error() -> None:
    model = SplitPipe(Turned(), cuts=["two"], devices=["cpu"] * 2, chunks=2)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(4, LENGTH, WIDTH), torch.randn(3, 4, LENGTH))
    assert "batched={'position_ids': 1}" in str(caught.value.__notes__)  # type: ignore[attr-defined]


def test_positions_that_would_be_broadcast_with_the_one_row_of_a_microbatch_are_an_error() -> None:
    model = SplitPipe(Turned(), cuts=["two"], devices=["cpu"] * 2, chunks=4)
    given = torch.randn(4, LENGTH, WIDTH), torch.randn(3, 4, LENGTH)
    with pytest.raises(ValueError, match=r"of shape \[3, 4, 5\] isn.t split.*batched=\{'position_ids': 1\}.*False\}"):
        model(*given)
    assert model.eval()(*given)["y"].shape == (4, LENGTH, WIDTH)


def test_an_output_without_the_batch_that_differs_is_an_error() -> None:
    mean = Apply(lambda x: (x, x.mean(1)))
    model = SplitPipe(nn.Sequential(nn.Identity(), mean), [1, 1], devices=["cpu"] * 2, chunks=2, batched=1)
    with pytest.raises(ValueError, match="has no dimension of the batch, but differs between"):
        model(torch.randn(3, 4, WIDTH))


@pytest.mark.parametrize("layer", [
    lambda: nn.TransformerEncoderLayer(8, 2), lambda: nn.LSTM(8, 8), lambda: nn.Transformer(8, 2, 1, 1, 8),
    lambda: nn.Sequential(nn.GRU(8, 8)), lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1),
    lambda: nn.MultiheadAttention(8, 2),
])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_sequential_that_takes_the_length_first_is_warned_of_once(layer: Any) -> None:
    layers = [nn.Linear(8, 8), layer(), nn.LSTM(8, 8)]
    with pytest.warns(UserWarning, match="without batch_first, .*batched=1") as caught:
        SplitPipe(nn.Sequential(*layers), [2, 1], devices=["cpu"] * 2, chunks=2)
    assert len(caught) == 1


@pytest.mark.parametrize("options", [{"batched": 1}, {"batched": True}, {"chunks": 1}])
def test_where_it_is_said_or_nothing_is_cut_no_warning_comes(options: Any) -> None:
    SplitPipe(nn.Sequential(nn.LSTM(8, 8), nn.Identity()), [1, 1], devices=["cpu"] * 2, **{"chunks": 2, **options})
    SplitPipe(nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True)), [1], devices=["cpu"], chunks=2)


def test_without_another_run_the_only_dimension_of_as_many_elements_as_rows_is_the_batchs() -> None:
    assert [only_dimension(leaf, 3) for leaf in (torch.zeros(5, 3), torch.zeros(3), torch.zeros(()), "text")] == [
        1, 0, 0, 0]
    for shape in ((3, 3), (2, 5)):
        with pytest.raises(ValueError, match="wasn't possible: expected one dimension of 3"):
            only_dimension(torch.zeros(shape), 3)


def test_a_dimension_that_grows_with_the_rows_is_the_batchs() -> None:
    leaves = [torch.zeros(5, 2), torch.zeros(4), torch.zeros(()), 3, torch.zeros(2)]
    others = [torch.zeros(5, 1), torch.zeros(4), torch.zeros(()), 3, torch.zeros(1, 1)]
    assert list(batches(leaves, 2, others, 1)) == [1, None, 0, 0, 0]
    with pytest.raises(ValueError, match="each row is compared with all others"):
        batches([torch.zeros(2, 2)], 2, [torch.zeros(1, 1)], 1)
