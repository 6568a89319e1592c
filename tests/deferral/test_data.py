"""Weights that change between forward and backward: the gradients are those of the values that autograd would read."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from splitpipe import SplitPipe
from tests.helpers.deferring import Call, deferred
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double

Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], tuple[int, ...]]
CASES: dict[str, Case] = {
    "linear": (F.linear, ((5, 4),), (6, 4)),
    "linear, bias": (F.linear, ((5, 4), (5,)), (6, 4)),
    "linear, three dimensions": (F.linear, ((5, 4), (5,)), (6, 3, 4)),
    "mm": (torch.mm, ((4, 5),), (6, 4)),
    "matmul, three dimensions": (torch.matmul, ((4, 5),), (6, 3, 4)),
    "@ .t()": (lambda x, w: x @ w.t(), ((5, 4),), (6, 4)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), ((4, 5), (5,)), (6, 4)),
    "conv1d": (F.conv1d, ((5, 4, 3), (5,)), (6, 4, 8)),
    "conv_transpose1d": (F.conv_transpose1d, ((4, 5, 3), (5,)), (6, 4, 8)),
    "embedding": (lambda x, w: F.embedding(x.abs().long(), w) * x[..., None], ((7, 4),), (6, 4)),
}


def swapped(p: Parameter) -> None:
    p.data = p.data * 2


def written(p: Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)


def written_behind(p: Parameter) -> None:
    p.data.mul_(2)


def gradients(model: nn.Module, x: Tensor, change: Callable[[Parameter], None]) -> list[Tensor] | str:
    """Of the input and the parameters, which change between forward and backward; an error's words where it is one."""
    given = x.clone().requires_grad_()
    y = model(given)
    for p in model.parameters():
        change(p)
    try:
        return list(torch.autograd.grad(y.pow(2).sum(), [given, *model.parameters()]))
    except RuntimeError as error:
        return str(error).split(":")[0]


@pytest.mark.parametrize("change", [swapped, written, written_behind])
@pytest.mark.parametrize("name", CASES)
def test_weights_that_change_after_the_forward(name: str, change: Callable[[Parameter], None]) -> None:
    function, shapes, shape = CASES[name]
    layer = Call(function, **{f"p{number}": torch.randn(shape) for number, shape in enumerate(shapes)})
    plain = copy.deepcopy(layer)
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    x = torch.randn(shape)
    found, expected = gradients(model, x, change), gradients(plain, x, change)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)
    assert len(deferred(model)) == len(shapes)
