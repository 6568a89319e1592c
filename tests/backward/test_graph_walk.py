"""What a walk takes for W, and what it leaves to B: gradients are the module's; what the report says of parameters."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe import SplitPipe, deferral_report
from splitpipe.backward import graph_walk
from tests.helpers.deferring import WAYS, Call, Scale, deferred, fused, trained, tried
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same_tensors, step, twins
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
def test_what_a_newer_torch_calls_by_another_name_loses_deferral_alone(what, layer, shape, monkeypatch):
    def read(node: Any, edges: Any) -> Any:
        return node._saved_under_another_name

    for kind in [kind for kind in graph_walk.RULES if kind.__name__[:5] in ("Addmm", "Convo", "Embed")]:
        if what == "node":
            monkeypatch.delitem(graph_walk.RULES, kind)
        else:
            monkeypatch.setitem(graph_walk.RULES, kind, (read, graph_walk.RULES[kind][1]))
    value = torch.randint(0, 11, (7, 5)) if shape is None else torch.randn(shape)
    why = fused(trained(copy.deepcopy(layer).double(), value, schedule="zb-h1"))["1.weight"]
    assert why.endswith("has no rule" if what == "node" else REFUSED)


NOT_YET = "not known yet: no step has used it"
MM = "MmBackward0: its rule doesn't take this call"


def pipeline(*layers: nn.Module, balance: list[int] | None = None, **options: Any) -> SplitPipe:
    return twins(nn.Sequential(*layers), balance, chunks=2, **options)[1]


def unruled() -> Call:
    """A layer whose parameter no rule will ever take: what it is used for has no input."""
    return Call(lambda x, w: x + w.sin(), weight=torch.randn(4))


def both(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    view = w.t()
    return (x @ view) * view[0].exp() * v[0]


#: What two parameters of a layer are used for, and what the report says of them.
REPORTED: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "functions without a rule, products": (
        lambda x, w, v: x * w.exp().sum() + w.sin().sum() + F.linear(x @ v, v),
        "ExpBackward0 has no rule, SinBackward0 has no rule", "+ linear"),
    "a view, in another way, too": (both, f"{MM}, SelectBackward0 has no rule", "SelectBackward0 has no rule"),
    "a function of one's own": (
        lambda x, w, v: Scale.apply(F.prelu(x, w[0, :1])[:, None], v), "SelectBackward0 has no rule", "+ Scale"),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_row_names_what_its_parameter_is_used_for(name: str) -> None:
    function, *expected = REPORTED[name]
    model = pipeline(Call(function, w=torch.randn(4, 4), v=torch.randn(4, 4)))
    step(model, torch.randn(4, 4))
    assert [("+ " if row.deferred else "") + row.why for row in deferral_report(model)] == expected


def test_the_report_before_a_step_and_after_a_forward() -> None:
    whole = pipeline(nn.Linear(6, 4), unruled(), backward="autograd")
    whole[0].bias.requires_grad_(False)
    for _ in range(2):
        why = "backward='autograd'"
        assert fused(whole) == {"0.weight": why, "0.bias": "it is frozen", "1.weight": why}
        step(whole, torch.randn(4, 6))
    model = pipeline(nn.Linear(6, 4), unruled())
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert set(fused(model).values()) == {NOT_YET} and len(fused(model)) == 3
    model(torch.randn(4, 6))
    assert set(deferred(model)) == {"0.weight", "0.bias"}
    report = deferral_report(model)
    assert len(report) == 3 and tuple(report) == report.rows
    assert [(row.parameter, row.stage, row.elements) for row in report] == [
        ("0.weight", 0, 24), ("0.bias", 0, 4), ("1.weight", 1, 4)]


def test_a_hook_on_an_activation_is_the_reason_until_a_microbatch_has_none() -> None:
    hooks = [True]

    def hooked(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        if hooks:
            y.register_hook(lambda grad: grad * 2)
        return y

    model = pipeline(Call(hooked, w=torch.randn(4, 4)))
    step(model, torch.randn(4, 4))
    why = "MmBackward0: a hook was set in this forward"
    assert fused(model) == {"0.w": why}
    hooks.clear()
    step(model, torch.randn(4, 4))
    assert deferred(model) == {"0.w": "linear"}
