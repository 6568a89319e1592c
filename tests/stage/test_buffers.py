"""Buffers that forward writes to are written to once, though a checkpointed stage runs twice."""
from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from splitpipe import SplitPipe
from tests.helpers.twin import assert_same, assert_same_tensors, twins
from tests.promise.layers import Apply


def assert_step(plain: nn.Module, model: SplitPipe) -> None:
    """A step of the model is that of the module on each of two microbatches."""
    x = torch.randn(8, 6)
    scheduled = model.schedule.name != "gpipe"
    torch.stack([plain(rows).square().mean() for rows in x.chunk(2)]).mean().backward()
    (model(x, target=torch.zeros(8)) if scheduled else model(x).square().mean()).backward()
    assert_same_tensors(model, plain)


def zeroed() -> nn.Module:
    first = nn.Linear(6, 6)
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    return first


def differentiating(x: Tensor) -> Tensor:
    y = x * 1
    return x + torch.autograd.grad(y.sin().sum(), y)[0].detach()


NORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "of zeros at first": lambda: [zeroed(), nn.BatchNorm1d(6)],
    "after a layer that differentiates": lambda: [nn.Linear(6, 6), Apply(differentiating), nn.BatchNorm1d(6)],
    "without momentum at first": lambda: [nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.0)],
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_counts_once_whatever_its_first_run_shows(name: str) -> None:
    layers = NORMS[name]()
    plain, model = twins(nn.Sequential(*layers), [len(layers)], chunks=2, checkpoint="always")
    for momentum in (layers[-1].momentum, 0.1):
        plain[-1].momentum = model[len(layers) - 1].momentum = momentum
        assert_step(plain, model)


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


def beside(norm: Any, x: Tensor) -> Tensor:
    """Reads the statistics of a BatchNorm that is another layer."""
    y: Tensor = x * (1 + norm.running_mean)
    return y


def uncounted(norm: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.5)


class Uncounted(nn.BatchNorm1d):
    """Counts no batches."""

    forward = uncounted


def with_a_reader(layers: Any) -> None:
    norm = (layers[1],)  # No submodule.
    layers._modules["2"] = Apply(lambda x: beside(norm[0], x))


def with_a_layer_that_reads(layers: Any) -> None:
    layers[2].forward = MethodType(beside, layers[1])


def with_another_forward(layers: Any) -> None:
    layers[1].forward = MethodType(uncounted, layers[1])


def of_another_class(layers: Any) -> None:
    layers[1].__class__ = Uncounted


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize(
    "change", [with_a_reader, with_a_layer_that_reads, with_another_forward, of_another_class]
)
def test_norms_that_change_after_the_first_call(change: Callable[[Any], None], checkpoint: Any) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    plain, model = twins(layers, [4], chunks=2, checkpoint=checkpoint)
    assert_step(plain, model)
    for module in (plain, model):
        change(module)
    for _ in range(2):
        assert_step(plain, model)


def test_statistics_that_change_before_a_recomputation() -> None:
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


class Doubling(Tensor):
    """Its exp is that of twice the value."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.exp, Tensor.exp):
            args = (args[0] * 2,)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_recomputation_asks_subclasses_of_tensor(backward: Any) -> None:
    """Though their backward asks none."""
    layers = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x.as_subclass(Doubling).exp()))
    plain, model = twins(layers, [1, 1], chunks=2, checkpoint="always", backward=backward)
    x = torch.randn(8, 4)
    plain(x).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


class Counts(nn.Module):
    """Multiplies by the number of its calls so far, once it is active; it counts past the buffer's version or not."""

    def __init__(self, seen: bool, active: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))
        self.seen, self.active = seen, active

    def forward(self, x: Tensor) -> Tensor:
        y = x * x * self.count.clone()
        if self.active:
            (self.count if self.seen else self.count.data).add_(1)
        return y


@pytest.mark.parametrize(("seen", "late"), [(True, True), (False, False)])
def test_a_buffer_is_put_back_though_it_changes_late_or_unseen(seen: bool, late: bool) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), Counts(seen, not late), nn.Tanh())
    plain, model = twins(layers, [2, 1], chunks=2, checkpoint="always")
    for step in range(4):
        for each in (plain, model):
            each[1].active = each[1].active or step > 0
            if not late:  # Nobody has compared a new buffer.
                each[1].register_buffer(f"late {step}", torch.zeros(2))
        assert_step(plain, model)
