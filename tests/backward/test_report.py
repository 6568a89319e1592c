"""What the report says of every parameter, and how it looks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe import SplitPipe, deferral_report
from tests.helpers.deferring import Call, Scale, deferred, fused
from tests.helpers.twin import step, twins

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
USES: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "functions without a rule, products": (
        lambda x, w, v: x * w.exp().sum() + w.sin().sum() + F.linear(x @ v, v),
        "ExpBackward0 has no rule, SinBackward0 has no rule", "+ linear"),
    "a view, in another way, too": (
        both, f"{MM}, SelectBackward0 has no rule", "SelectBackward0 has no rule"),
    "a function of one's own": (
        lambda x, w, v: Scale.apply(F.prelu(x, w[0, :1])[:, None], v), "SelectBackward0 has no rule", "+ Scale"),
}


@pytest.mark.parametrize("name", USES)
def test_a_row_names_what_its_parameter_is_used_for(name: str) -> None:
    function, *expected = USES[name]
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
    why = "MmBackward0: a hook was set on an activation in this forward"
    assert fused(model) == {"0.w": why}
    hooks.clear()
    step(model, torch.randn(4, 4))
    assert deferred(model) == {"0.w": "linear"}
