"""torch's own losses with a schedule: that of the whole batch, whatever is ignored, weighted, smoothed or summed."""
from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors

CLASSES = 4
WEIGHT = torch.tensor([0.5, 2.0, 0.25, 1.0], dtype=torch.float64)


def assert_equal(plain: nn.Module, model: SplitPipe, x: Tensor, y: Any, loss_fn: Any) -> None:
    for module in (plain, model):
        module.zero_grad()
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    loss, expected = model(mine, target=y), loss_fn(plain(theirs), y)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert loss.shape == () and loss.dtype == expected.dtype
    (3 * loss).backward()
    (3 * expected).backward()
    assert_same_tensors(model, plain)
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch is older")
def test_a_loss_with_the_last_layer_inside() -> None:
    for options in {"ignore_index": 1, "label_smoothing": 0.1}, {"weight": WEIGHT}, {"reduction": "sum"}, {}:
        loss_fn: Any = nn.LinearCrossEntropyLoss(4, CLASSES, bias=True, **options)
        weights = []
        plain, model = twins(mlp(3), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
        x, y = torch.randn(7, 4), torch.tensor([1, 1, 1, 0, 1, 2, 3])
        for run in (lambda: model(x, target=y), lambda: loss_fn(plain(x), y)):  # noqa: B023
            loss_fn.zero_grad()
            run().backward()
            weights.append([parameter.grad.clone() for parameter in loss_fn.parameters()])
        torch.testing.assert_close(*weights)
        assert_equal(plain, model, x, y, loss_fn)


def test_a_function_with_the_old_arguments_is_not_understood() -> None:
    loss_fn = partial(F.mse_loss, size_average=False)
    _, model = twins(mlp(4), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    with pytest.warns(UserWarning, match="beyond mse_loss.*reduction="):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "size_average and reduce args")
            model(torch.randn(7, 4), target=torch.randn(7, 4))


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own.
@pytest.mark.thorough
def test_a_compiled_loss_is_a_mean_over_rows_which_is_said() -> None:
    for loss_fn in (nn.CrossEntropyLoss(), partial(F.cross_entropy)):
        plain, model = twins(mlp(3), "1f1b", 2, loss_fn=torch.compile(loss_fn, backend="eager"), chunks=2)
        with pytest.warns(UserWarning, match="a compiled function"):
            assert_equal(plain, model, torch.randn(4, 4), torch.tensor([1, 1, 2, 3]), loss_fn)
        assert_equal(plain, model, torch.randn(4, 4), torch.tensor([1, 1, 2, 3]), loss_fn)


def test_what_torch_takes_for_one_sample() -> None:
    for loss_fn, y in ((F.cross_entropy, torch.rand(6)), (F.multilabel_margin_loss, torch.zeros(6, dtype=torch.long))):
        _, model = twins(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), "1f1b", 2, loss_fn=loss_fn, chunks=3)
        with pytest.warns(UserWarning, match=f"beyond {loss_fn.__name__}"):
            model(torch.randn(6, 4), target=y)
