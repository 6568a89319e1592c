"""Layers that the user has compiled: whoever may compile is alone, whatever backend it is."""
from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, attach
from splitpipe.compiled import gate as gates
from splitpipe.compiled.theirs import KINDS, Guard, guarded
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.covering import few
from tests.helpers.deferring import double as double
from tests.helpers.twin import Looped, assert_same

pytestmark = pytest.mark.usefixtures("nothing_compiled", "double")


def alone() -> bool:
    """True if this thread has the gate of the process alone."""
    found: bool = gates._GATES.lock.is_alone
    return found


class Part(nn.Module):
    """Two ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y.tanh()


class Layer(nn.Module):
    """A part that may be compiled, and code beside it."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.part = Part(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return y + x


def of_its_own(kind: type[nn.Module], number: int) -> type[nn.Module]:
    """The class with code of its own: what torch compiles belongs to the code, and two threads that look there at once
    may miss what there is."""
    forward: Any = kind.forward
    code = forward.__code__.replace(co_name=f"forward_{number}")
    return type(f"{kind.__name__}{number}", (kind,), {"forward": FunctionType(code, forward.__globals__)})


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*[of_its_own(Layer, number)() for number in range(4)])
    for number, layer in enumerate(made):
        layer.part = of_its_own(Part, number)(4)
    return made


def x(rows: int) -> Tensor:
    return torch.linspace(-1, 1, 4 * rows).reshape(rows, 4).sin()


HOW: dict[str, Callable[[nn.Sequential, Any], None]] = {
    "layer.compile": lambda made, backend: [layer.compile(backend=backend) for layer in made],  # type: ignore[dict-item]
    "torch.compile": lambda made, backend: [  # type: ignore[dict-item]
        setattr(made, str(number), torch.compile(layer, backend=backend)) for number, layer in enumerate(made)
    ],
    "a part": lambda made, backend: [layer.part.compile(backend=backend) for layer in made],  # type: ignore[dict-item]
}


@pytest.mark.thorough
@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(("how", "cut", "way"), [
    ("layer.compile", "layers", {"checkpoint": "never"}), ("torch.compile", "cuts", {"checkpoint": "always"}),
    ("a part", "layers", {"schedule": "1f1b", "loss_fn": F.mse_loss}),
    ("layer.compile", "cuts", {"schedule": "1f1b", "loss_fn": F.mse_loss}),
])
def test_who_may_compile_is_alone(how: str, cut: str, way: dict[str, Any]) -> None:
    plain = layers()
    made, seen = copy.deepcopy(plain), list[bool]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(alone())
        return graph.forward

    HOW[how](made, backend)
    if cut == "layers":
        model: nn.Module = SplitPipe(made, [1] * 4, devices=["cpu"] * 4, chunks=4, **way)
    else:
        model = attach(Looped(*made), ["1", "2", "3"], devices=["cpu"] * 4, chunks=4, **way)
    for rows in (8, 7, 10, 3):
        for each in (plain, model):
            each.zero_grad()
        given = x(rows)
        (model(given, target=0 * given) if "schedule" in way else F.mse_loss(model(given), 0 * given)).backward()
        F.mse_loss(plain(given), 0 * given).backward()
        for one, other in zip(made.parameters(), plain.parameters(), strict=True):
            assert_same(one.grad, other.grad, "gradient")
    assert len(seen) > 4 and all(seen)


def test_a_kind_of_call_that_is_known_passes() -> None:
    found = list[bool]()

    def call(x: Tensor, scale: float = 1.0, *, names: Any = None) -> Tensor:
        found.append(alone())
        return x

    own = partial(Guard().call, call)
    one = torch.ones(2, 3)
    for given, more in (
        ((one,), {}), ((one + 1,), {}), ((one, 2.0), {}), ((one, 2), {}), ((one.float(),), {}), ((one[:1],), {}),
        ((one.clone().requires_grad_(),), {}), ((one,), {"names": [one, "a", object()]}),
        ((one,), {"names": [one, "a", object()]}), ((one.to_sparse(),), {}), ((one.to_sparse(),), {}),
    ):
        own(*given, **more)
    assert found == [True, False, True, True, True, True, True, True, False, True, False]
    with torch.no_grad():
        own(one)
    with torch.autocast("cpu"):
        own(one)
    assert found[-2:] == [True, True]


def test_a_call_that_fails_stays_unknown() -> None:
    found = list[bool]()

    def call(x: Tensor) -> None:
        found.append(alone())
        raise ValueError("the layer's own")

    own = partial(Guard().call, call)
    for _ in range(2):
        with pytest.raises(ValueError, match="the layer's own"):
            own(torch.ones(2))
    assert found == [True, True]


def test_more_kinds_than_torch_compiles_for_pass() -> None:
    found = list[bool]()
    own = partial(Guard().call, lambda x: found.append(alone()))
    for rows in range(KINDS + 2):
        own(torch.ones(rows))
    assert found == [True] * KINDS + [False] * 2


def test_layers_that_nobody_has_compiled_are_called_as_they_are() -> None:
    layer = Layer()
    assert guarded(layer) is layer


class Asking(nn.Module):
    """Asks another pipeline, which is no part of it."""

    def __init__(self, teacher: SplitPipe) -> None:
        super().__init__()
        self.layer, self.asked = Layer(), [teacher]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hint = self.asked[0](x)
        y: Tensor = self.layer(x)
        return y + hint


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("inside", few(1, ["a part", "attached", "elsewhere", "elsewhere, compiled by us"]))
def test_a_pipeline_in_a_compiled_layer_is_no_hang(inside: str) -> None:
    torch.manual_seed(0)
    ours = inside == "elsewhere, compiled by us"
    inner = nn.Sequential(Layer(), Layer())
    for layer in () if ours else inner:
        layer.compile(backend="aot_eager")
    pipe: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": 2}
    if inside == "attached":
        middle: nn.Module = attach(Looped(*inner), ["1"], **pipe)
    elif inside == "a part":
        middle = SplitPipe(inner, [1, 1], **pipe)
    else:
        middle = Asking(SplitPipe(inner, [1, 1], compile=EAGER if ours else False, **pipe))
        middle.layer.compile(backend="aot_eager")
    model = SplitPipe(nn.Sequential(Layer(), middle, Layer()), [1, 2], **pipe)
    for rows in (8, 6, 8):
        model(x(rows)).sum().backward()


@pytest.mark.parametrize("cut", ["layers", "cuts"])
def test_whatever_stands_in_the_slot_for_compiled_calls_is_called_alone_first(cut: str) -> None:
    plain = layers()
    made, seen = copy.deepcopy(plain), list[bool]()
    for layer in made:
        own: Any = layer

        def call(x: Tensor, own: Any = own) -> Tensor:
            seen.append(alone())
            found: Tensor = own._call_impl(x)
            return found

        own._compiled_call_impl = call
    pipe: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": 2}
    model: nn.Module = SplitPipe(made, [2, 2], **pipe)
    if cut == "cuts":
        model = attach(Looped(*made), ["2"], **pipe)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x(8)).square().mean().backward()
        for one, other in zip(made.parameters(), plain.parameters(), strict=True):
            assert_same(one.grad, other.grad, "gradient")
    assert any(seen) and not all(seen)
