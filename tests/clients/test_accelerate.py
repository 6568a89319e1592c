"""accelerate prepares a SplitPipe, accumulates, clips, saves and loads as it does for the unwrapped module."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe
from tests.engine.models import Stack

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


CUTS: dict[str, Any] = {"cuts": ["layers.1", "layers.3"], "devices": ["cpu"] * 3, "chunks": 2}
WAYS: dict[str, Any] = {"balance": (sequence, lambda model: SplitPipe(model, [2, 2, 1], devices=["cpu"] * 3, chunks=2)),
                        "cuts": (Stack, lambda model: SplitPipe(model, **CUTS)),
                        "cuts-zb-h1": (Stack, lambda model: SplitPipe(model, schedule="zb-h1", **CUTS)),
                        "attach": (Stack, lambda model: splitpipe.attach(model, **CUTS))}
STEPS, SAVED = 8, 4


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The loss that a stack computes of its labels, or one of a sequence's output."""
    if "layers" in dict(model.named_children()):
        loss: Tensor = model(x, labels=x.sin())["loss"]
        return loss
    return model(x).square().mean()


def trained(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """Losses of a loop as accelerate's pages have it; those after the save have come twice, with the same values."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # A process has one, and one precision.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    own, optimizer = model, torch.optim.Adam(model.parameters(), lr=0.1)
    data = torch.randn(STEPS * 4, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.unwrap_model(model) is own

    def step(x: Tensor) -> float:
        with accelerator.accumulate(model):
            loss = loss_of(model, x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        value: float = loss.item()
        return value

    batches = list(loader)
    losses = [step(x) for x in batches[:SAVED]]
    accelerator.save_state(str(folder))
    later = [step(x) for x in batches[SAVED:]]
    accelerator.load_state(str(folder))
    assert [step(x) for x in batches[SAVED:]] == pytest.approx(later)
    return losses + later


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_the_losses_are_those_of_the_unwrapped_module(way: str, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    make, pipe = WAYS[way]
    torch.manual_seed(0)
    expected = trained(make(), tmp_path / "plain", mixed_precision=precision)
    torch.manual_seed(0)
    found = trained(pipe(make()), tmp_path / "piped", mixed_precision=precision)
    assert found == pytest.approx(expected, rel=1e-4 if precision == "no" else 2e-2)


@pytest.mark.parametrize("way", WAYS)
def test_placement_is_left_to_the_pipeline(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    make, pipe = WAYS[way]
    model = pipe(make())
    monkeypatch.setattr(type(model), "to", lambda *_, **__: pytest.fail("the model was moved"))
    accelerate.Accelerator(cpu=True).prepare(model)


def test_a_dispatched_model_loses_its_hooks_and_gets_them_back() -> None:
    hooks: Any = pytest.importorskip("accelerate.hooks")
    model, x = Stack(), torch.randn(6, 4)
    expected = model(x)["y"]
    for part in (model, *model.layers):  # type: ignore[misc]
        hooks.add_hook_to_module(part, hooks.AlignDevicesHook("cpu", io_same_device=True))
    before = {part: dict(vars(part)) for part in model.modules()}
    splitpipe.attach(model, devices=["cpu", "cpu"])
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())
    torch.testing.assert_close(model(x)["y"], expected)
    splitpipe.detach(model)
    assert {part: dict(vars(part)) for part in model.modules()} == before
    torch.testing.assert_close(model(x)["y"], expected)
