"""Buffers that forward writes to are written to once, though a checkpointed stage runs twice."""
from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from splitpipe import SplitPipe
from tests.helpers.twin import assert_same, assert_same_tensors, twins


def zeroed() -> nn.Sequential:
    first = nn.Linear(6, 6)
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    return nn.Sequential(first, nn.BatchNorm1d(6))


class Differentiating(nn.Module):
    """Differentiates inside its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        return x + torch.autograd.grad(y.sin().sum(), y)[0].detach()


NORMS: dict[str, Callable[[], nn.Sequential]] = {
    "of zeros at first": zeroed,
    "after a layer that differentiates": lambda: nn.Sequential(nn.Linear(6, 6), Differentiating(), nn.BatchNorm1d(6)),
    "without momentum at first": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.0)),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_counts_once_whatever_its_first_run_has_shown(name: str) -> None:
    layers = NORMS[name]()
    plain, model = twins(layers, [len(layers)], chunks=2, checkpoint="always")
    for momentum in (None, 0.1):
        for module in (*plain.modules(), *model.modules()):
            if momentum is not None and isinstance(module, nn.BatchNorm1d):
                module.momentum = momentum
        x = torch.randn(8, 6)
        torch.cat([plain(rows) for rows in x.chunk(2)]).square().sum().backward()
        model(x).square().sum().backward()
        assert_same_tensors(model, plain)


class Reads(nn.Module):
    """Reads the statistics of its BatchNorm in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x) * (1 + self.norm.running_mean)  # type: ignore[operator]
        return y / (1.0 + self.norm.running_var.sum())  # type: ignore[union-attr]


class Adds(nn.Module):
    """Reads the statistics of its BatchNorm in ways that look like something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.norm(x) * 2).add_(self.norm.running_mean)  # type: ignore[arg-type]
        return y.square() * (1 + self.norm.running_var.data) / float(self.norm.num_batches_tracked)  # type: ignore


class Renorm(nn.BatchNorm1d):
    """Normalises by the statistics that it has, in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x.detach())
        return (x - self.running_mean) / self.running_var.clone().sqrt()  # type: ignore[operator, union-attr]


class Hooked(nn.BatchNorm1d):
    """Has a hook that looks at its statistics."""

    def __init__(self) -> None:
        super().__init__(6)
        self.register_forward_hook(look_at)


def look_at(norm: Any, _: Any, y: Tensor) -> Tensor:
    return y * norm.running_var.clone()


class Shift(nn.Module):
    """Parametrises by a BatchNorm of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, weight: Tensor) -> Tensor:
        y: Tensor = self.norm(weight)
        return y


def parametrised() -> nn.Module:
    linear = nn.Linear(6, 6)
    parametrize.register_parametrization(linear, "weight", Shift())
    return linear


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(6),
    "momentum None": lambda: nn.BatchNorm1d(6, momentum=None),
    "no statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
    "a subclass": lambda: Renorm(6),
    "a layer that reads": Reads,
    "a layer that adds": Adds,
    "a hook that reads": Hooked,
    "in a parametrised layer": parametrised,
    "behind spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)),
    "half in eval": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6)),
}


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("gpipe", "always"), ("gpipe", "except_last"), ("1f1b", "always")]
)
@pytest.mark.parametrize("name", OTHERS)
def test_norms_of_every_kind_count_once_and_are_recomputed(name: str, schedule: Any, checkpoint: Any) -> None:
    options: dict[str, Any] = {}
    if schedule != "gpipe":
        options = {"schedule": schedule, "loss_fn": lambda y, _: y.square().mean()}
    plain = nn.Sequential(nn.Linear(6, 6), OTHERS[name](), nn.Tanh(), nn.Linear(6, 6))
    model = SplitPipe(copy.deepcopy(plain), [3, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint, **options)
    if name == "half in eval":
        for module in (plain, model):
            module[1][1].eval()
    for _ in range(3):
        x = torch.randn(8, 6)
        torch.stack([plain(rows).square().mean() for rows in x.chunk(2)]).mean().backward()
        (model(x, target=torch.zeros(8)) if options else model(x).square().mean()).backward()
        assert_same_tensors(model, plain)


class Beside(nn.Module):
    """Reads the statistics of a BatchNorm beside it."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.beside = (norm,)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * (1 + self.beside[0].running_mean)
        return y


def uncounted(norm: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.5)


class Uncounted(nn.BatchNorm1d):
    """Counts no batches."""

    forward = uncounted


def with_a_reader(layers: Any) -> None:
    layers._modules["2"] = Beside(layers[1])


def with_a_layer_that_reads(layers: Any) -> None:
    layers[2].forward = Beside(layers[1]).forward


def with_another_forward(layers: Any) -> None:
    layers[1].forward = MethodType(uncounted, layers[1])


def of_another_class(layers: Any) -> None:
    layers[1].__class__ = Uncounted


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize(
    "change", [with_a_reader, with_a_layer_that_reads, with_another_forward, of_another_class]
)
def test_norms_that_change_after_the_first_call_are_recomputed_as_they_are_then(
    change: Callable[[Any], None], checkpoint: Any
) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    plain, model = twins(layers, [4], chunks=2, checkpoint=checkpoint)
    for _ in range(3):
        x = torch.randn(8, 6)
        torch.cat([plain(rows) for rows in x.chunk(2)]).square().sum().backward()
        model(x).square().sum().backward()
        assert_same_tensors(model, plain)
        if not hasattr(plain, "changed"):
            for module in (plain, model):
                module.changed = True
                change(module)


def test_statistics_that_change_between_an_eval_forward_and_its_recomputation() -> None:
    norm = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    plain, model = twins(norm, [3], chunks=2, checkpoint="always")
    x, gradients = torch.randn(8, 6), []
    for module in (plain, model):
        losses = []
        for training in (False, True, False):
            module.train(training)
            parts = [x] if module is model else x.chunk(2)
            losses.append(torch.cat([module(rows) for rows in parts]).square().sum())
        torch.stack(losses).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert_same(gradients[1], gradients[0], "gradients")
    assert_same_tensors(model, plain)


class Multiplying(nn.Module):
    """Has a buffer of some layout, and may write to it."""

    def __init__(self, buffer: Tensor, writes: bool) -> None:
        super().__init__()
        self.register_buffer("matrix", buffer)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        matrix: Any = self.matrix
        if self.writes:
            matrix.mul_(2.0)
            matrix = matrix.clone()
        return torch.mm(matrix, x.t()).t().tanh()


def test_a_lazy_batch_norm_counts_once() -> None:
    lazy = nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d())
    plain = nn.Sequential(copy.deepcopy(lazy[0]), nn.BatchNorm1d(6))
    model = SplitPipe(lazy, [2], devices=["cpu"], chunks=2, checkpoint="always")
    for _ in range(2):
        x = torch.randn(8, 6)
        torch.cat([plain(rows) for rows in x.chunk(2)]).square().sum().backward()
        model(x).square().sum().backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


@pytest.mark.parametrize("writes", [True, False])
def test_a_sparse_buffer_is_put_back_and_counts_once(writes: bool) -> None:
    multiplying = Multiplying(torch.eye(6).to_sparse(), writes)
    plain, model = twins(nn.Sequential(nn.Linear(6, 6), multiplying), [1, 1], chunks=2, checkpoint="always")
    x = torch.randn(8, 6)
    torch.cat([plain(rows) for rows in x.chunk(2)]).square().sum().backward()
    model(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    torch.testing.assert_close(model[1].matrix.to_dense(), plain[1].matrix.to_dense())


class Doubling(Tensor):
    """Its exp is that of twice the value."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.exp, Tensor.exp):
            args = (args[0] * 2,)
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.as_subclass(Doubling).exp()


@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_recomputation_asks_subclasses_of_tensor_though_their_backward_asks_none(backward: Any) -> None:
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), Doubled()), [1, 1], chunks=2, checkpoint="always",
                         backward=backward)
    x = torch.randn(8, 4)
    plain(x).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


class Unseen(nn.Module):
    """Writes to its buffer past its version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x * (1 + self.n.clone())
        self.n.data.add_(1)
        return y


def test_a_buffer_whose_version_does_not_tell_is_put_back_when_other_buffers_are_new() -> None:
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), Unseen(), nn.Tanh()), [2, 1], checkpoint="always")
    for step in range(4):
        x = torch.randn(3, 4)
        for each in plain, model:
            each[1].register_buffer(f"late {step}", torch.zeros(2))
            each(x).sum().backward()
        assert_same_tensors(model, plain)
