"""Buffers that forward writes to are written to once, though a checkpointed stage runs twice."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from splitpipe import SplitPipe
from tests.helpers.twin import assert_same_tensors, twins


def assert_step(plain: nn.Module, model: SplitPipe) -> None:
    """A step of the model is that of the module on each of two microbatches."""
    x = torch.randn(8, 6)
    scheduled = model.schedule.name != "gpipe"
    torch.stack([plain(rows).square().mean() for rows in x.chunk(2)]).mean().backward()
    (model(x, target=torch.zeros(8)) if scheduled else model(x).square().mean()).backward()
    assert_same_tensors(model, plain)


class Reads(nn.Module):
    """Makes something of the output of a BatchNorm, and of its statistics."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.read = nn.BatchNorm1d(6), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.norm, self.norm(x))


class Renorm(nn.BatchNorm1d):
    """Normalises by the statistics that it has, in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x.detach())
        return (x - self.running_mean) / self.running_var.clone().sqrt()  # type: ignore[operator, union-attr]


def hooked() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    norm.register_forward_hook(look_at)
    return norm


def look_at(norm: Any, _: Any, y: Tensor) -> Tensor:
    return y * norm.running_var.clone()


def parametrised() -> nn.Module:
    linear = nn.Linear(6, 6)
    parametrize.register_parametrization(linear, "weight", nn.Sequential(nn.BatchNorm1d(6)))
    return linear


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(6),
    "momentum None": lambda: nn.BatchNorm1d(6, momentum=None),
    "no statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
    "a subclass": lambda: Renorm(6),
    "a layer that reads": lambda: Reads(lambda norm, y: y * (1 + norm.running_mean) / (1.0 + norm.running_var.sum())),
    "a layer that adds": lambda: Reads(lambda norm, y: (y * 2).add_(norm.running_mean).square() * (
        1 + norm.running_var.data) / float(norm.num_batches_tracked)),
    "a hook that reads": hooked,
    "in a parametrised layer": parametrised,
    "behind spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "half in eval": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6)),
}


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("gpipe", "always"), ("gpipe", "except_last"), ("1f1b", "always")]
)
@pytest.mark.parametrize("name", OTHERS)
def test_norms_of_every_kind_count_once_and_are_recomputed(name: str, schedule: Any, checkpoint: Any) -> None:
    options: dict[str, Any] = {"checkpoint": checkpoint}
    if schedule != "gpipe":
        options |= {"schedule": schedule, "loss_fn": lambda y, _: y.square().mean()}
    layers = nn.Sequential(nn.Linear(6, 6), OTHERS[name](), nn.Tanh(), nn.Linear(6, 6))
    plain, model = twins(layers, [3, 1], chunks=2, **options)
    for _ in range(3):
        if name == "half in eval":
            plain[1][1].eval()
            model[1][1].eval()
        assert_step(plain, model)


def test_a_lazy_batch_norm_counts_once() -> None:
    plain, model = twins(nn.Sequential(nn.Linear(6, 6)), [1])
    plain.append(nn.BatchNorm1d(6))
    lazy = SplitPipe(nn.Sequential(model[0], nn.LazyBatchNorm1d()), [2], devices=["cpu"], chunks=2, checkpoint="always")
    for _ in range(2):
        assert_step(plain, lazy)


@pytest.mark.parametrize("writes", [True, False])
def test_a_sparse_buffer_is_put_back_and_counts_once(writes: bool) -> None:
    class Multiplying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("matrix", torch.eye(6).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            matrix: Any = self.matrix.mul_(2.0).clone() if writes else self.matrix  # type: ignore[operator]
            return torch.mm(matrix, x.t()).t().tanh()

    plain, model = twins(nn.Sequential(nn.Linear(6, 6), Multiplying()), [1, 1], chunks=2, checkpoint="always")
    x = torch.randn(8, 6)
    torch.cat([plain(rows) for rows in x.chunk(2)]).square().sum().backward()
    model(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    torch.testing.assert_close(model[1].matrix.to_dense(), plain[1].matrix.to_dense())
