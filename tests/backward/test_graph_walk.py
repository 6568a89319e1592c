"""What a walk takes for W, and what it leaves to B: all gradients are those of the module, none counts twice."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.backward import rules
from splitpipe.core.torch_private import _functions
from tests.helpers.deferring import WAYS, Call, Scale, fused, trained, tried
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same_tensors
from tests.promise.layers import Apply


def hooked_at_its_node(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """W would have the gradient before the hook, in silence."""
    y = F.linear(x, w, b)
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))  # type: ignore[union-attr]
    return y


#: Used as a layer that uses its leaves in such a way.
USES: dict[str, Callable[..., Tensor]] = {
    "the weight in another way, too": lambda x, w, b: F.linear(x, w, b) + w.sin(),
    "the bias in another way, too": lambda x, w, b: F.linear(x, w, b) * b,
    "a function's weight": lambda x, w, b: Scale.apply(F.linear(x, w, b), b),
    "of the input": lambda x, w, b: F.linear(x, w * x[:1].sum(), b),
    "modified in place": lambda x, w, b: F.linear(x, w.t().mul(2).add_(1), b),
    "complex": lambda x, w, b: (torch.complex(x, x) @ torch.complex(w, w)).real + b,
    "hooked at its node": hooked_at_its_node,
}


@tried(USES)
def test_uses_of_leaves_have_the_modules_gradients(name: str, way: dict[str, Any]) -> None:
    trained(Call(lambda x, w, b: torch.cat([USES[name](row[None], w, b) for row in x]), w=torch.randn(6, 6),
                 b=torch.randn(6)), torch.randn(7, 6), **way)


class Own(Tensor):
    """A class of its own."""


def hooked(x: Tensor, w: Tensor) -> Tensor:
    unpacked: list[int] = []

    def unpack(packed: list[Tensor]) -> Tensor:  # Only once.
        unpacked.append(1)
        return packed.pop()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], unpack):
        return F.linear(x, w)


REFUSED = "its rule doesn't take this call"


@pytest.mark.parametrize("way", [*WAYS.values()][:2], ids=[*WAYS][:2])
@pytest.mark.parametrize("function", [hooked, lambda x, w: F.linear(x.as_subclass(Own), w).as_subclass(Tensor)],
                         ids=["saved-tensor hooks", "a subclass"])
def test_a_call_that_autograd_sees_otherwise_is_its_module(function: Any, way: dict[str, Any]) -> None:
    model = trained(Call(function, w=torch.randn(6, 6)), torch.randn(7, 6), **way)
    assert fused(model) == {"1.w": f"MmBackward0: {REFUSED}"}


def test_a_hook_set_on_an_activation_after_the_forward_counts() -> None:
    seen: list[Tensor] = []
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Call(Scale.apply, w=torch.randn(4)), nn.Tanh())
    layers.insert(2, Apply(lambda y: seen.append(y) or y))
    plain = copy.deepcopy(layers)
    model = SplitPipe(layers, [4, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    x = torch.randn(6, 4)
    for module in (model, plain):
        y = module(x)
        for activation in seen:
            activation.register_hook(lambda grad: grad * 3)
        seen.clear()
        y.square().sum().backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Linear(6, 4), (7, 6)), (nn.Conv1d(4, 6, 3), (7, 4, 9)), (nn.Embedding(11, 6), None)])
@pytest.mark.parametrize("what", ["node", "saved tensors"])
def test_what_a_newer_torch_calls_by_another_name_loses_deferral_alone(
    what: str, layer: nn.Module, shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(node: Any, edges: Any) -> Any:
        return node._saved_under_another_name

    for name in "AddmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0":
        kind = getattr(_functions, name)
        if what == "node":
            monkeypatch.delitem(rules.RULES, kind)
        else:
            monkeypatch.setitem(rules.RULES, kind, (read, rules.RULES[kind][1]))
    value = torch.randint(0, 11, (7, 5)) if shape is None else torch.randn(shape)
    why = fused(trained(copy.deepcopy(layer).double(), value, schedule="zb-h1"))["1.weight"]
    assert why.endswith("has no rule" if what == "node" else REFUSED)
