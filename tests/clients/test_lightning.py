"""A LightningModule that holds a SplitPipe trains, validates, saves and resumes as it does with the plain module."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.clients.test_accelerate import WAYS

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


def trainer_of(folder: Path, **options: Any) -> Any:
    """A Trainer that says nothing."""
    lightning: Any = pytest.importorskip("lightning")
    return lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **options,
    )


def module_of(model: nn.Module) -> Any:
    """A LightningModule around a model, which keeps its losses."""
    lightning: Any = pytest.importorskip("lightning")

    class Own(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor]) -> Tensor:
            (x,) = batch
            output = self.model(x, labels=x.sin()) if "layers" in dict(model.named_children()) else self.model(x)
            loss: Tensor = output["loss"] if isinstance(output, dict) else output.square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[Tensor]) -> None:
            output = self.model(batch[0])
            self.log("validation", (output["y"] if isinstance(output, dict) else output).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Own()


def loader() -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    return torch.utils.data.DataLoader(data, batch_size=4)


def fitted(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """The losses of a fit."""
    own, trainer = module_of(model), trainer_of(folder, max_epochs=2, **options)
    trainer.fit(own, loader(), loader())
    return [*own.losses, float(trainer.callback_metrics["validation"])]


@pytest.mark.parametrize("way", ["balance", "cuts", "cuts-zb-h1"])
def test_the_losses_are_those_of_the_unwrapped_module(way: str, tmp_path: Path) -> None:
    make, pipe = WAYS[way]
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    torch.manual_seed(0)
    expected = fitted(make(), tmp_path / "plain", **options)
    torch.manual_seed(0)
    model = pipe(make())
    assert isinstance(model, SplitPipe)
    assert fitted(model, tmp_path / "piped", **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("way", ["balance", "cuts", "cuts-zb-h1"])
def test_a_checkpoint_resumes_piped_or_not(way: str, tmp_path: Path) -> None:
    """Both ways: what a pipeline has saved the plain module loads, with its optimizer's state, and the other way."""
    make, pipe = WAYS[way]

    def trained(piped: bool, folder: str, epochs: int, resumed: Path | None = None) -> list[float]:
        torch.manual_seed(0)
        own = module_of(pipe(make()) if piped else make())
        trainer = trainer_of(tmp_path / folder, max_epochs=epochs, enable_checkpointing=False)
        trainer.fit(own, loader(), loader(), ckpt_path=None if resumed is None else str(resumed))
        trainer.save_checkpoint(tmp_path / f"{folder}.ckpt")
        return list(own.losses)

    whole = trained(False, "whole", 2)
    for first, second in ((True, True), (True, False), (False, True)):
        name = f"{first}-{second}"
        begun = trained(first, name, 1)
        resumed = trained(second, f"{name}-resumed", 2, tmp_path / f"{name}.ckpt")
        assert begun + resumed == pytest.approx(whole, rel=1e-5)
