"""Models that accelerate has spread over devices, by hooks that have its attributes."""
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from tests.engine.models import Stack


class AlignDevicesHook:
    """Counts its calls, and has accelerate's name."""

    calls = 0

    def forward(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, as accelerate calls it."""
        self.calls += 1
        return part._old_forward(*args, **kwargs)  # type: ignore[operator]


def dispatched() -> tuple[nn.Module, dict[str, AlignDevicesHook]]:
    """A model whose blocks have hooks, and these."""
    model, hooks = Stack(), {}
    for name, part in model.named_modules():
        if name.count(".") == 1 or not name:
            hooks[name] = hook = AlignDevicesHook()
            vars(part).update(_hf_hook=hook, _old_forward=part.forward)
            vars(part)["forward"] = partial(hook.forward, part)
    return model, hooks


def test_hooks_are_taken_off_and_come_back() -> None:
    model, hooks = dispatched()
    x = torch.randn(4, 4)
    expected, before = model(x)["y"], {name: dict(vars(part)) for name, part in model.named_modules()}
    for hook in hooks.values():
        hook.calls = 0
    model.hf_device_map = {"layers.0": "cpu"}  # type: ignore[assignment]

    for cut in ("layers.1", "layers.2"):  # Attached again, it keeps the hooks for detach.
        splitpipe.attach(model, cuts=[cut], devices=["cpu", "cpu"], chunks=2)
    torch.testing.assert_close(model(x)["y"], expected)
    assert not any(hook.calls for hook in hooks.values())

    splitpipe.detach(model)
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == {
        name: {**own, "hf_device_map": {"layers.0": "cpu"}} if not name else own for name, own in before.items()
    }
    torch.testing.assert_close(model(x)["y"], expected)
    assert all(hook.calls == 1 for hook in hooks.values())


def test_a_sample_that_fails_leaves_hooks_where_they_were() -> None:
    model, _ = dispatched()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        splitpipe.attach(model, cuts=["layers.2"], devices=["cpu", "cpu"], sample=(torch.randn(4, 5),))
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before


def test_offloaded_parts_are_an_error_that_names_them() -> None:
    model, _ = dispatched()
    model.layers[2].to("meta")  # type: ignore[index, operator]
    model.hf_device_map = {"layers.0": 0, "layers.2": "disk"}  # type: ignore[assignment]
    before = dict(vars(model))
    for given in ({}, {"cuts": ["layers.2"], "devices": ["cpu", "cpu"]}):
        with pytest.raises(ValueError, match=r"'layers\.2\..* are on meta and have no data.*without device_map"):
            splitpipe.attach(model, **given)  # type: ignore[arg-type]
    assert vars(model) == before


def test_a_hook_of_another_kind_stays() -> None:
    class Other(AlignDevicesHook):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hook = Other()
    vars(model[0]).update(_hf_hook=hook, _old_forward=model[0].forward)
    vars(model[0])["forward"] = partial(hook.forward, model[0])
    splitpipe.attach(model, cuts=["1"], devices=["cpu", "cpu"], chunks=2)
    y: Tensor = model(torch.randn(4, 4))
    assert y.shape == (4, 4) and hook.calls
