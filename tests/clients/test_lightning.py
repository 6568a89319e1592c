"""A LightningModule that holds a SplitPipe trains, validates, saves and resumes as it does with the plain module."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.clients.test_accelerate import WAYS, loss_of

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


def module_of(model: nn.Module) -> Any:
    """A LightningModule around a model, which keeps its losses."""
    lightning: Any = pytest.importorskip("lightning")

    class Own(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss = loss_of(self.model, batch[0])
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


def fitted(model: nn.Module, epochs: int, saved: Path, resumed: Path | None = None) -> list[float]:
    """The losses of a fit with clipping and accumulation, and of validation; what the Trainer saves at its end."""
    lightning: Any = pytest.importorskip("lightning")
    own = module_of(model)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=saved.parent, enable_checkpointing=False, max_epochs=epochs, gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )
    trainer.fit(own, loader(), loader(), ckpt_path=None if resumed is None else str(resumed))
    trainer.save_checkpoint(saved)
    return [*own.losses, float(trainer.callback_metrics["validation"])]


@pytest.mark.parametrize("way", ["balance", "cuts", "cuts-zb-h1"])
def test_losses_are_those_of_the_plain_module_also_of_a_run_that_goes_on_piped_or_not(way: str, tmp_path: Path) -> None:
    make, pipe = WAYS[way]

    def trained(piped: bool, name: str, epochs: int, resumed: Path | None = None) -> list[float]:
        torch.manual_seed(0)
        return fitted(pipe(make()) if piped else make(), epochs, tmp_path / name, resumed)

    whole = trained(False, "whole", 2)
    assert trained(True, "piped", 2) == pytest.approx(whole, rel=1e-5)
    for first, second in ((True, True), (True, False), (False, True)):
        begun = trained(first, "begun", 1)[:-1]
        assert begun + trained(second, "resumed", 2, tmp_path / "begun") == pytest.approx(whole, rel=1e-5)
