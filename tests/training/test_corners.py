"""Corners of schedules: what layers do with parameters, who shares them, and who asks twice."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, is_recomputing, schedule
from splitpipe.training.step import Trainer
from tests.helpers.scheduled import twins
from tests.helpers.twin import assert_same, assert_same_tensors

ENGINES = pytest.mark.parametrize("backward", ["split", "autograd"])


def pipe(module: nn.Sequential, chunks: int = 4, **options: Any) -> SplitPipe:
    count = len(module)
    given = {"schedule": "1f1b", "loss_fn": F.mse_loss, **options}
    return SplitPipe(module, [count // 2, count - count // 2], devices=["cpu"] * 2, chunks=chunks, **given)


def assert_trained(module: nn.Sequential, factor: float = 1.0, steps: int = 2, **options: Any) -> SplitPipe:
    plain, model = copy.deepcopy(module).double(), pipe(module.double(), **options)
    for _ in range(steps):
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        for loss in (model(x, target=y), F.mse_loss(plain(x), y)):
            (loss * factor).backward()
        assert_same_tensors(model, plain)
        for each in (plain, model):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)
    return model


class Sum(nn.Module):
    """Two parameters whose gradients are one memory."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.view = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2)), view

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.view(self.a) + self.view(self.b))


@ENGINES
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("view", [lambda w: w.view(4), lambda w: w.t().reshape(4), torch.flatten])
def test_gradients_that_share_memory_are_summed_apart(view: Any, chunks: int, backward: Any) -> None:
    assert_trained(nn.Sequential(Sum(view), nn.Linear(4, 4)), factor=3.0, steps=1, chunks=chunks, backward=backward)


class MaxNorm(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
        return super().forward(x)


def test_data_that_a_layer_gives_its_parameter_stays() -> None:
    layer = MaxNorm(4, 4)
    assert_trained(nn.Sequential(layer, nn.Linear(4, 4)))
    parameter = layer.weight
    assert isinstance(parameter, nn.Parameter) and "0.weight" in dict(nn.Sequential(layer).named_parameters())


class Penalised(nn.Module):
    """Keeps a penalty for the loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.w.square().sum()
        return x * self.w


def test_what_a_layer_has_kept_of_its_parameter_leads_to_the_parameter() -> None:
    layer = Penalised()
    model, fired = pipe(nn.Sequential(layer, nn.Linear(4, 4))), []
    layer.w.register_hook(lambda grad: fired.append(grad.clone()))
    x = torch.randn(8, 4)
    (0 * model(x, target=x) + layer.penalty).backward()
    assert layer.w.grad is not None and layer.w.grad.tolist() == [2.0] * 4
    assert torch.stack(fired).sum(0).tolist() == [2.0] * 4
    first, second = [], []
    for found in first, second:  # Nothing of a step is left for the next one.
        model.zero_grad()
        model(x, target=x).backward()
        found.append(layer.w.grad.clone())
    assert torch.equal(first[0], second[0])


class Tying(nn.Module):
    """Ties in forward, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.b.weight = self.a.weight
        self.kept = self.a.bias
        return self.b(self.a(x))


def test_a_parameter_that_a_layer_has_put_elsewhere_is_the_parameter() -> None:
    layer = Tying()
    weight, bias = layer.a.weight, layer.a.bias
    model = pipe(nn.Sequential(layer, nn.Linear(4, 4)))
    x = torch.randn(8, 4)
    for _ in range(2):
        model(x, target=x).backward()
    assert layer.b.weight is weight and layer.a.weight is weight and layer.kept is bias


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, target=torch.ones_like(x)).expand(len(x), 4) + x


class Unwrapped(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(nn.Sequential(*self.model)(x), torch.ones_like(x)).expand(len(x), 4) + x


@ENGINES
def test_a_model_with_a_schedule_is_a_layer_of_another(backward: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Inner()).double()
    plain = copy.deepcopy(module)
    plain[1].__class__ = Unwrapped
    model = pipe(module, chunks=1, backward=backward)
    x = torch.randn(8, 4, dtype=torch.float64)
    for loss in (model(x, target=x), F.mse_loss(plain(x), x)):
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_same_tensors(model, plain)


class Waiting(nn.Module):
    """Once told to, forward waits until the other has tried."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.tried, self.wait = threading.Event(), threading.Event(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.wait:
            self.inside.set()
            assert self.tried.wait(60)
        return x

    def __deepcopy__(self, memo: object) -> Waiting:
        return Waiting()


def test_models_that_share_layers_may_be_called_at_once() -> None:
    gate = Waiting()
    module = nn.Sequential(nn.Linear(4, 4), gate)
    one, other, x = pipe(module, chunks=1), pipe(module, chunks=1), torch.randn(4, 4)
    for model in (one, other):
        model(x, target=x)  # A first run is made alone.
    weight, seen = module[0].weight, []
    weight.register_hook(seen.append)
    losses: list[Tensor] = []
    gate.wait = True
    thread = threading.Thread(target=lambda: losses.append(one(x, target=x)))
    thread.start()
    assert gate.inside.wait(60)
    gate.wait = False
    losses.append(other(x, target=x))  # From beginning to end during the one.
    gate.tried.set()
    thread.join(60)
    assert weight.grad is None and not seen
    (expected,) = torch.autograd.grad(F.mse_loss(module(x), x), [weight])
    seen.clear()
    for loss in losses:
        loss.backward()
    assert_same(seen, [expected, expected], "what the hook saw")
    assert_same(weight.grad, 2 * expected, "gradient")


def test_what_retain_graph_gives_is_the_askers_own() -> None:
    model, x = pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.randn(8, 4)
    loss = model(x, target=x)
    first = [grad.clone() for grad in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
    for grad in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True):
        grad.zero_()
    loss.backward()
    for parameter, grad in zip(model.parameters(), first):
        assert parameter.grad is not None and torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("factor", [1, 2])
def test_gradients_are_handed_over_and_not_copied(factor: int) -> None:
    model, x = pipe(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), schedule="zb-h1"), torch.randn(8, 4)
    loss = model(x, target=x)
    node = loss.grad_fn
    releases = [following for following, _ in node.next_functions if following is not None]  # type: ignore[union-attr]
    memory = {total.value.data_ptr() for release in releases for total in release.totals}
    (loss * factor).backward()
    assert {parameter.grad.data_ptr() for parameter in model.parameters()} == memory  # type: ignore[union-attr]


def test_a_shared_layer_is_summed_in_the_same_order_every_time() -> None:
    norm = nn.LayerNorm(64)
    module = nn.Sequential(nn.Linear(64, 64), norm, nn.Tanh(), norm)
    model, x = pipe(module, chunks=8), torch.randn(64, 64)
    found = []
    for _ in range(6):
        model.zero_grad()
        model(x, target=x).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_child_of_a_fork_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.randn(8, 4)
    model(x, target=x)
    held = model._runtime._engine._lock.lock  # As a thread of the parent's has it.
    threading.Thread(target=held.acquire).start()
    monkeypatch.setattr("os.getpid", lambda: -1)
    model(x, target=x).backward()


@pytest.mark.parametrize("loss_fn", [
    lambda y, t: y.mean() if t[0, 0] else (y.sum(), y.numel()),
    lambda y, t: (y.sum(), y.numel()) if t[0, 0] else y.mean(),
])
def test_a_mean_for_one_microbatch_and_a_total_for_another_are_refused(loss_fn: Any) -> None:
    model = pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss_fn=loss_fn)
    target = torch.ones(8, 4)
    target[2:] = 0
    with pytest.raises(ValueError, match="losses of different kinds"):
        model(torch.randn(8, 4), target=target)


@ENGINES
def test_stages_may_stand_on_the_devices_in_any_order(backward: Any) -> None:
    rows = schedule.build("zb-h1", 3, 4).rows
    turned = schedule.Schedule([rows[1], rows[2], rows[0]], placement=[2, 0, 1])
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).double()
    plain = copy.deepcopy(module)
    model = SplitPipe(module, [1] * 3, devices=["cpu"] * 3, chunks=4, schedule=turned, loss_fn=F.mse_loss,
                      backward=backward)
    x = torch.randn(7, 4, dtype=torch.float64)
    for loss in (model(x, target=x), F.mse_loss(plain(x), x)):
        loss.backward()
    assert_same_tensors(model, plain)
    torch.testing.assert_close(model(x), plain(x))


class Recomputed(nn.Module):
    """Says when it is run again."""

    def __init__(self, again: threading.Event) -> None:
        super().__init__()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            self.again.set()
        return x * 1


class WaitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, event: threading.Event) -> Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.event.wait(60), "the stage before waits for this gradient before it recomputes"
        return grad, None


class Waits(nn.Module):
    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event

    def forward(self, x: Tensor) -> Tensor:
        return WaitInBackward.apply(x, self.event)


def test_a_stage_recomputes_before_its_gradient_arrives() -> None:
    again = threading.Event()
    module = nn.Sequential(Recomputed(again), nn.Linear(4, 4), Waits(again), nn.Linear(4, 4))
    model, x = pipe(module, chunks=1, checkpoint="always"), torch.randn(8, 4)
    model(x, target=x).backward()
    assert again.is_set()


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_workers_put_hooks_back_without_the_callers_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    _, model = twins(layers, name, loss_fn=F.mse_loss, chunks=4, backward="autograd")  # Which parks each hook.
    x = torch.randn(8, 4)
    seen: list[Tensor] = []
    hooks = [parameter.register_hook(seen.append) for parameter in model.parameters()]
    recover, calls = Trainer.recover, []

    def interrupted(trainer: Trainer) -> None:
        calls.append(trainer)
        if len(calls) == 2:  # At the end of the pass.
            raise KeyboardInterrupt
        recover(trainer)

    monkeypatch.setattr(Trainer, "recover", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x, target=x)
    F.mse_loss(nn.Sequential(*model)(x), x).backward()
    assert len(seen) == len(hooks)
    model(x, target=x).backward()
    assert len(seen) == 2 * len(hooks)


class Inward(nn.Module):
    """Goes backward inside its forward, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.norm, self.way = nn.Linear(4, 4), nn.LayerNorm(4), way

    def forward(self, input: Tensor) -> Tensor:
        weight = self.layer.weight.view(4, 4) if self.way == "view" else self.layer.weight
        inner = self.norm(F.linear(input.detach(), weight, self.layer.bias)).square().sum(0).mean()
        if self.way == "backward":
            inner.backward()
        elif self.way == "backwards":
            torch.autograd.backward([inner])
        else:
            asked = self.norm.bias if self.way == "elsewhere" else self.layer.weight
            (found,) = torch.autograd.grad(inner, [asked], allow_unused=True)
            assert found is not None
            input = input + found.mean()
        return self.layer(input)


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("way", ["grad", "view", "backward", "backwards"])
def test_a_layer_may_go_backward_to_its_own_deferred_weights(way: str, backward: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Inward(way))
    assert_trained(module, factor=3.0, chunks=1, backward=backward, schedule="zb-h1")


@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_layer_may_go_backward_to_what_is_not_deferred(backward: Any) -> None:
    assert_trained(nn.Sequential(nn.Linear(4, 4), Inward("elsewhere")), factor=3.0, chunks=1, backward=backward)


class Box:
    """An object that pytree knows nothing of."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_gradient_that_goes_through_an_object_between_stages_is_an_error(checkpoint: Any) -> None:
    class Boxes(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x * 1, Box(super().forward(x))

    class Opens(nn.Module):
        def forward(self, given: Any) -> Tensor:
            x: Tensor = given[0] + given[1].x
            return x

    module = nn.Sequential(nn.Linear(4, 4), Boxes(4, 4), Opens())
    plain, model = twins(module, "1f1b", 3, loss_fn=F.mse_loss, chunks=2, checkpoint=checkpoint)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="which the stages before would lose.*not inside of other objects"):
        model(x, target=y)
    for either in plain, model:
        F.mse_loss(either(x), y).backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_tensor_that_a_hook_kept_of_a_step_can_not_be_differentiated(name: str) -> None:
    _, model = twins(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), name, 2, loss_fn=F.mse_loss, chunks=2)
    kept: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda _, given: None if is_recomputing() else kept.append(given[0]))
    model(torch.randn(4, 4), target=torch.randn(4, 4))
    for x in kept:
        with pytest.raises(RuntimeError, match="which the stages before would lose"):
            (x * 2).sum().backward()
    assert len(kept) == 2


def test_a_tensor_that_a_hook_kept_of_a_recomputation_can_not_be_differentiated() -> None:
    _, model = twins(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), "gpipe", 2, loss_fn=None, checkpoint="always")
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda _, given, output: kept.append(output) if is_recomputing() else None)
    model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        kept[0].sum().backward()


class Probes(nn.Module):
    """The input; keeps what a head makes of it, which nothing else comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.kept = nn.Linear(4, 4), []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.head(x.detach()))
        return x * 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_weight_gradient_that_comes_after_its_step_is_right(name: str, backward: Any) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    module = nn.Sequential(nn.Linear(4, 4), Probes(), nn.Linear(4, 4))
    plain, model = twins(module, name, 2, loss_fn=F.mse_loss, chunks=2, checkpoint="never", backward=backward)
    loss, expected = model(x, target=y), F.mse_loss(plain(x), y)
    (loss + torch.cat(model[1].kept).mean()).backward()
    (expected + plain[1].kept[0].mean()).backward()
    assert_same_tensors(model, plain)
