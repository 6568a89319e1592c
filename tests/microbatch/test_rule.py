"""The rule for the batch, from end to end: several entries per row, the loss of an output, numbers, errors."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.modules import Rows
from tests.helpers.twin import assert_same, assert_same_tensors

WAYS = pytest.mark.parametrize("how", [
    {}, {"checkpoint": "always", "backward": "autograd"}, {"schedule": "1f1b"},
    {"schedule": "zb-h1", "checkpoint": "always"},
], ids=["drop-in", "autograd", "1f1b", "zb-h1"])


def loss_of(output: Any) -> Tensor:
    values = output.values() if isinstance(output, dict) else output
    [loss] = [x for x in values if isinstance(x, Tensor) and x.requires_grad and not x.dim()]
    return loss


def verify(function: Callable[..., Any], given: tuple[Any, ...], how: dict[str, Any], **options: Any) -> None:
    plain = Rows(function)
    model = SplitPipe(copy.deepcopy(plain), cuts=["last"], devices=["cpu"] * 2, **{"chunks": 4, **how, **options})
    expected, found = plain(*given), model(*given)
    assert type(found) is type(expected)
    assert_same(found, expected, "output")
    for output in (expected, found):
        loss_of(output).backward()
    assert_same_tensors(model, plain)


def ranked(net: Rows, questions: Tensor, passages: Tensor, names: list[str], labels: Tensor) -> dict[str, Tensor]:
    """Two passages, with names, for each question."""
    sizes = torch.tensor([float(len(name)) for name in names], dtype=passages.dtype)
    found = (net.features(passages) * sizes[:, None]).view(len(questions), -1, 5)
    scores = (net.features(questions).unsqueeze(1) * found).sum(-1)
    return {"loss": F.cross_entropy(scores, labels), "scores": scores}


@pytest.mark.filterwarnings("ignore:the loss")  # Lengths of names are numbers that nobody follows.
@WAYS
@pytest.mark.parametrize("rows", [8, 7])
def test_groups_go_with_their_rows(rows: int, how: dict[str, Any]) -> None:
    names = [str(10 ** (number % 3)) for number in range(2 * rows)]
    given = torch.randn(rows, 6), torch.randn(2 * rows, 6), names, torch.randint(2, (rows,))
    verify(ranked, given, how, batched={"args[1]": "groups", "args[2]": "groups"})


def piped(function: Callable[..., Any], chunks: int = 3, **options: Any) -> SplitPipe:
    return SplitPipe(Rows(function), cuts=["last"], devices=["cpu"] * 2, chunks=chunks, **options)


@WAYS
@pytest.mark.parametrize("make", [
    lambda y, loss: (y, loss), lambda y, loss: (loss, y, "text"), lambda y, loss: [y, (y > 0).double().mean(), loss],
    lambda y, loss: {"y": y, "objective": loss, "entropy": y.detach().square().mean()},
], ids=["last", "first", "beside a metric", "in a dict"])
def test_the_one_number_with_a_graph_is_the_loss(make: Callable[..., Any], how: dict[str, Any]) -> None:
    def function(net: Rows, x: Tensor, labels: Tensor) -> Any:
        y = net.features(x)
        return make(y, F.cross_entropy(y, labels, ignore_index=3))

    verify(function, (torch.randn(7, 6), torch.tensor([0, 3, 3, 1, 2, 3, 0])), how)


@pytest.mark.parametrize(("function", "reduction"), [
    (torch.mean, None), (torch.sum, "sum"), (torch.max, lambda values, rows: torch.stack(values).max() * rows[2]),
])
def test_numbers_are_means_by_rows_or_sums_or_what_a_function_makes_of_them(function: Any, reduction: Any) -> None:
    model, x = piped(lambda net, x: function(net.features(x)), reduction=reduction), torch.randn(7, 6)
    assert_same(model(x), model.inner(x), "output")


@pytest.mark.parametrize(("function", "reduction", "error", "words"), [
    (lambda y: [y, y.mean() if len(y) == 3 else 0.0], None, ValueError, "0 and 2 return a Tensor and 0.0"),
])
def test_what_cannot_be_one_number_is_refused(function, reduction, error, words):
    with pytest.raises(error, match=words):
        piped(lambda net, x: function(net.features(x)), reduction=reduction)(torch.randn(7, 6))


@pytest.mark.parametrize("function", [len, lambda y: y.shape])
def test_numbers_that_may_count_rows_are_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="each microbatch has 2 rows, which it may count"):
        piped(lambda net, x: {"y": net.features(x), "n": function(x)})(torch.randn(6, 6))


HOW = " (batched= or split= changes how they are split)\n    "


def notes(call: Any, kind: Any = RuntimeError) -> str:
    with pytest.raises(kind) as raised:
        call()
    return "\n".join(raised.value.__notes__)


def test_an_error_tells_how_each_argument_was_treated() -> None:
    def fail(net: Rows, x: Tensor, *more: Any) -> Tensor:
        return x @ x

    given = torch.rand(6, 3), torch.rand(3, 8), 2.0, [torch.rand(2)] * 6, torch.rand(18, 2), None
    assert notes(lambda: piped(fail, batched={"args[4]": "groups"})(*given)).endswith(
        f"microbatches of 2 rows of 6, as argument 'args[0]' has them{HOW}"
        "split along dimension 0: argument 'args[0]' (6, 3)\n"
        "    whole: argument 'args[1]' (3, 8), argument 'args[2]' (float)\n"
        "    split between rows: argument 'args[3]'[0] (2,), argument 'args[3]'[1] (2,), argument 'args[3]'[2] (2,), "
        "argument 'args[3]'[3] (2,), ...\n"
        "    split along dimension 0, 3 entries per row: argument 'args[4]' (18, 2)"
    )
    assert "rows of" not in notes(lambda: piped(fail)(torch.rand(1, 3)))  # Of a single microbatch nothing is said.


def test_an_error_tells_of_an_input_and_its_target() -> None:
    model = SplitPipe(nn.Sequential(nn.Identity(), nn.Linear(3, 2)), [1, 1], devices=["cpu"] * 2, chunks=4,
                      schedule="1f1b", loss_fn=F.mse_loss)
    said = notes(lambda: model(torch.rand(8, 3), target=torch.rand(8, 3)), UserWarning)
    assert f"microbatches of 2 rows of 8, as the input has them{HOW}split along dimension 0: the input (8, 3)" in said
    assert "    split along dimension 0: the target (8, 3)" in said


@dataclass
class Out:
    y: Tensor


def test_what_a_forward_has_returned_stays_as_it_was() -> None:
    kept: list[Out] = []
    out = piped(lambda net, x: kept.append(Out(net.features(x))) or kept[-1])(torch.randn(6, 6))
    assert [len(x.y) for x in kept] == [2, 2, 2] and len(out.y) == 6
