"""Under autocast a pipeline computes as its module does, and defers as ever."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from splitpipe import SplitPipe
from tests.helpers.deferring import Call, deferred, drop_in
from tests.helpers.deferring import apart as apart
from tests.helpers.twin import step, twins

CAST: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), (7, 6), (6, 6)),
    "linear, three dimensions": (lambda x, w, b: F.linear(x, w, b), (7, 3, 6), (6, 6)),
    "linear, transposed": (lambda x, w, b: F.linear(x, w.t(), b), (7, 6), (6, 6)),
    "matmul": (lambda x, w, b: x @ w + b, (7, 6), (6, 6)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (7, 6), (6, 6)),
    "conv": (lambda x, w, b: F.conv1d(x, w, b), (7, 4, 8), (6, 4, 3)),
    "conv_transpose": (lambda x, w, b: F.conv_transpose1d(x, w, b), (7, 4, 8), (4, 6, 3)),
    "embedding": (lambda x, w, b: F.linear(F.embedding(x.abs().long(), w), w, b), (7, 5), (6, 6)),
    "several": (lambda x, w, b: F.linear(x @ w, w, b) * x, (7, 6), (6, 6)),
}


def cast(function: Callable[..., Tensor], w: tuple[int, ...], **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    layer = Call(function, w=torch.randn(w) / 2, b=torch.randn(6))
    return twins(nn.Sequential(layer, nn.Tanh()), [1, 1], **{"chunks": 3, "checkpoint": "never", **options})


def autocast(module: Callable[[Any], Any], enabled: bool = True) -> Callable[[Any], Any]:
    def under(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return module(x)

    return under


def assert_near(found: Tensor | None, expected: Tensor | None) -> None:
    """Equal but for the last digit of bfloat16, of the largest numbers."""
    assert found is not None and expected is not None
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.016 * expected.abs().max().item())


@pytest.mark.parametrize("enabled", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("compute", [lambda x, w: w.t(), lambda x, w: w * 2], ids=["deferred", "left"])
def test_a_view_of_a_weight_is_gone_with_its_microbatch(compute: Callable[..., Tensor], enabled: bool) -> None:
    gone: list[bool] = []
    weights: list[weakref.ref[Tensor]] = []

    def call(x: Tensor, w: Tensor) -> Tensor:
        gone.extend(weight() is None for weight in weights)
        computed = compute(x, w)
        weights.append(weakref.ref(computed))
        return F.linear(x.float(), computed)

    layers = nn.Sequential(nn.Linear(6, 6), Call(call, w=torch.randn(6, 6)))
    model = SplitPipe(layers, [2], devices=["cpu"], chunks=2, checkpoint="never")
    y = autocast(model, enabled)(torch.randn(4, 6))
    if enabled:
        assert gone == [True]
    y.sum().backward()
    del y
    assert [weight() for weight in weights] == [None, None]


@drop_in
@pytest.mark.parametrize("name", CAST)
def test_autocast_in_a_pipeline_is_autocast_in_its_module(name: str, way: dict[str, Any]) -> None:
    function, shape, w = CAST[name]
    plain, model = cast(function, w, **way)
    x = torch.randn(shape)
    output, gradients, _ = step(autocast(model), x)
    expected, expected_gradients, _ = step(autocast(plain), x)
    assert_near(output, expected)
    assert_near(gradients[0], expected_gradients[0]) if expected_gradients[0] is not None else None
    for found, wanted in zip(model.parameters(), plain.parameters()):
        assert_near(found.grad, wanted.grad)
    assert "0.w" in deferred(model)


class Casts(TorchDispatchMode):
    """Counts conversions to bfloat16, by the shape of what is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **kwargs or {})


def test_a_weight_is_cast_once_a_step() -> None:
    _, model = cast(lambda x, w, b: F.linear(F.linear(x, w, b), w, b), (6, 6))
    for _ in range(2):
        with Casts() as casts:
            autocast(model)(torch.randn(7, 5, 6))
        assert (casts.shapes[6, 6], casts.shapes[(6,)]) == (1, 1)
