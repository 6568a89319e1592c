"""What layers call under saved-tensor hooks and in transforms of torch.func, and inputs of other classes."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.helpers.deferring import WAYS, Call, deferred, trained
from tests.helpers.deferring import double as double
from tests.helpers.twin import step, twins


class Own(Tensor):
    """A class of its own."""


def hooked(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return F.linear(x, w)


def differentiated(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: F.linear(row, w).square().sum()))(x)


def mapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: F.linear(row, w))(x)


def pushed(x: Tensor, w: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(F.linear(dual, w))[1] * x


#: Whether the gradient of the weight is deferred, and how, or why not.
CALLS: dict[str, tuple[Callable[..., Tensor], bool, str]] = {
    "saved-tensor hooks": (hooked, False, "mm: what it saves has hooks"),
    "torch.func.vmap": (mapped, True, "Linear"),
    "torch.func.grad": (differentiated, True, "Linear"),
    "forward-mode AD": (pushed, False, "cpp_function has no rule"),
    "a subclass": (lambda x, w: F.linear(x.as_subclass(Own), w).as_subclass(Tensor), False,
                   "mm: its input or its weight has a custom class"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # Torch's own, in forward-mode AD.
@pytest.mark.parametrize("way", [*WAYS.values()][:2], ids=[*WAYS][:2])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_autograd_sees_otherwise_is_its_module(name: str, way: dict[str, Any]) -> None:
    function, late, why = CALLS[name]
    model = trained(Call(function, w=torch.randn(6, 6)), torch.randn(7, 6), **way)
    assert [(row.deferred, row.why) for row in model.deferral_report()] == [(late, why)]


def test_a_layer_without_hooks_beside_one_with_hooks_is_deferred() -> None:
    layers = nn.Sequential(Call(hooked, w=torch.randn(6, 6)), nn.Linear(6, 6, bias=False))
    assert deferred(trained(layers, torch.randn(7, 6), checkpoint="never")) == {"1.1.weight": "Linear"}


def test_hooks_around_the_pipeline_are_given_what_layers_save() -> None:
    plain, model = twins(nn.Sequential(nn.Linear(6, 6)), chunks=3, checkpoint="never")
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    x = torch.randn(7, 6)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = model(x)
    plain(x).square().sum().backward()
    y.square().sum().backward()
    assert not deferred(model)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    assert [len(x) for x in packed if x is not model[0].weight] == [3, 3, 1]
    step(model, x)
    assert set(deferred(model)) == {"0.weight", "0.bias"}  # Without them.


def test_an_input_under_way_is_waited_for() -> None:
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    layer = Call(lambda x, w: F.linear(collectives.AsyncCollectiveTensor(x), w), w=torch.randn(6, 6))
    assert deferred(trained(nn.Sequential(Call(torch.detach), layer), torch.randn(7, 6))) == {"1.1.w": "Linear"}
