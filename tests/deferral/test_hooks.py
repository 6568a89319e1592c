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


def test_an_input_under_way_is_waited_for() -> None:
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    layer = Call(lambda x, w: F.linear(collectives.AsyncCollectiveTensor(x), w), w=torch.randn(6, 6))
    assert deferred(trained(nn.Sequential(Call(torch.detach), layer), torch.randn(7, 6))) == {"1.1.w": "Linear"}
