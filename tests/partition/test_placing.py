"""A Sequential is cut and moved as asked, or refused; a tensor that says itself how it moves is moved by that."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from splitpipe.core.stream import Place
from splitpipe.partition.placement import move_stages, moved, verify_stages

CPU = Place(torch.device("cpu"))
META = Place(torch.device("meta"))


def test_sharing_between_devices_is_refused_and_on_one_device_is_not() -> None:
    tied, other, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)
    other.weight = tied.weight
    stages = [[tied, norm], [nn.Tanh()], [other, norm]]
    verify_stages(stages, [META] * 3)
    verify_stages(stages, [META, CPU, META])
    for number, name in enumerate(["Linear.weight", "BatchNorm1d.running_mean"]):
        with pytest.raises(ValueError, match=rf"{name} of stage 1 \(meta\) is also in stage 0 \(cpu\).*copy.deepcopy"):
            verify_stages([[stages[0][number]], [stages[2][number]]], [CPU, META])


@pytest.mark.cuda
def test_layers_move_to_the_device_with_their_gradients() -> None:
    modules = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3)]
    modules[1].weight = modules[0][0].weight
    nn.Sequential(*modules)(torch.rand(4, 3)).sum().backward()
    weight = modules[1].weight
    move_stages([[modules[0]], [modules[1]]], [Place(torch.device("cuda:0"))] * 2)
    assert weight.is_cuda and weight.grad is not None and weight.grad.is_cuda
    assert modules[0][0].weight is modules[1].weight is weight


CUDA = torch.device("cuda:0")
DEVICES = [torch.device("meta"), pytest.param(CUDA, marks=pytest.mark.cuda)]


class Scaled(nn.Parameter):
    """A weight with a scale of its own, and one that it shares with what its own ``to`` makes of it."""

    scale: Tensor
    shared: dict[str, Tensor]

    def to(self, *args: Any, **kwargs: Any) -> Scaled:  # type: ignore[override]
        self.shared["scale"] = self.shared["scale"].to(*args, **kwargs)
        return scaled(super().to(*args, **kwargs), self.scale.to(*args, **kwargs), self.shared)


class Quantised(nn.Parameter):
    """A weight that its own ``to`` changes and gives back, as one does that is quantised when it is moved."""

    def to(self, *args: Any, **kwargs: Any) -> Quantised:  # type: ignore[override]
        self.copy_(self.round())
        return self


def scaled(data: Tensor, scale: Tensor, shared: dict[str, Tensor]) -> Scaled:
    x = Scaled(data, requires_grad=False)
    x.scale, x.shared = scale, shared
    return x


def of_scaled(x: Any) -> list[Tensor]:
    return [x, x.scale, x.shared["scale"]]


def of_two(x: Any) -> list[Tensor]:
    return [x, x.a, x.b]


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Tensor]]]] = {
    "scaled": (lambda: scaled(torch.ones(2, 2), torch.ones(2), {"scale": torch.ones(2)}), of_scaled),
    "wrapper": (lambda: nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2))), of_two),
    "buffer": (lambda: TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), of_two),
}


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tensor_holds_goes_along(kind: str, device: torch.device) -> None:
    make, held = KINDS[kind]
    x = make()
    assert moved(x, device) is x
    assert {part.device for part in held(x)} == {device}
    assert type(x) is type(make()) and isinstance(x, nn.Parameter) is (kind != "buffer")


def test_a_tensor_that_its_own_to_changes_stays_itself() -> None:
    x = Quantised(torch.full((2, 2), 0.8))
    seen = weakref.ref(x)  # One that has such a reference can't be swapped.
    assert moved(x, torch.device("meta")) is x is seen() and (x == 1).all()
