"""A tensor that says itself how it goes to another device, as quantised weights do, is moved by that alone."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from splitpipe.core.stream import Place
from splitpipe.partition import placing
from splitpipe.partition.moving import moved

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
DEVICES = [torch.device("meta"), pytest.param(CUDA, marks=pytest.mark.cuda)]


class Scaled(nn.Parameter):
    """A weight with a scale of its own, and one that it shares with what its own ``to`` makes of it."""

    scale: Tensor
    shared: dict[str, Tensor]

    def to(self, *args: Any, **kwargs: Any) -> Scaled:  # type: ignore[override]
        self.shared["scale"] = self.shared["scale"].to(*args, **kwargs)
        return scaled(super().to(*args, **kwargs), self.scale.to(*args, **kwargs), self.shared)


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


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["scaled", "wrapper"])
def test_layers_with_such_tensors_move_and_come_back(kind: str) -> None:
    make, held = KINDS[kind]
    layer = nn.Linear(2, 2)
    layer.weight = x = make()
    undo = placing.move([[layer]], [Place(CUDA)])
    assert layer.weight is x and {part.device for part in (*held(x), layer.bias)} == {CUDA}
    undo()
    assert layer.weight is x and {part.device for part in (*held(x), layer.bias)} == {CPU}
