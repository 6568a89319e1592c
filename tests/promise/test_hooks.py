"""Hooks, drop-in and with a schedule: each fires as often, and sees the same, as with the unwrapped module."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers import scheduled, twin
from tests.helpers.covering import few
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import loss_of, mlp
from tests.helpers.twin import assert_same, assert_same_tensors

Way = tuple[str | None, int, dict[str, Any]]
WAYS = pytest.mark.parametrize(
    "way",
    few(3, [
        (None, 2, {"checkpoint": "never"}),
        ("v-half", 2, {"backward": "autograd"}),
        ("zb-h1", 2, {"checkpoint": "always", "by": "cuts"}),
        (None, 2, {"checkpoint": "except_last", "stash_limit": 0}),
        (None, 2, {"checkpoint": "always", "backward": "autograd"}),
        (None, 2, {"checkpoint": "never", "by": "cuts"}),
        ("1f1b", 2, {}),
        ("zb-v", 2, {"checkpoint": "always"}),
    ]),
    ids=["drop-in", "v-half, autograd", "zb-h1, cuts", "not held back", "drop-in, autograd", "drop-in, cuts", "1f1b",
         "zb-v, checkpointed"],
)


def twins(module: nn.Sequential, way: Way, **more: Any) -> tuple[nn.Sequential, SplitPipe]:
    name, devices, options = way
    options = {**options, **more}
    return twin.twins(module, **options) if name is None else scheduled.twins(module, name, devices, **options)


def pair(way: Way) -> tuple[nn.Sequential, SplitPipe]:
    return twins(mlp(5), way, chunks=3)


def losses(plain: nn.Module, model: SplitPipe, x: Tensor) -> tuple[Tensor, Tensor]:
    return loss_of(plain, x), loss_of(model, x)


def hooked(model: nn.Module) -> dict[str, list[Tensor]]:
    """What tensor hooks of the parameters see; each makes the gradient three times as large."""
    log: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():

        def hook(grad: Tensor, name: str = name) -> Tensor:
            log.setdefault(name, []).append(grad.clone())
            return grad * 3

        parameter.register_hook(hook)
    return log


@WAYS
def test_tensor_hooks_of_parameters_fire_once_and_may_change_the_gradient(way: Way) -> None:
    models = pair(way)
    logs = [hooked(model) for model in models]
    found = losses(*models, torch.randn(7, 4))
    assert logs == [{}, {}]
    for loss in found:
        loss.backward()
    assert_same(dict(sorted(logs[1].items())), dict(sorted(logs[0].items())), "what hooks saw")
    assert set(map(len, logs[1].values())) == {1}
    assert_same_tensors(models[1], models[0])


@WAYS
def test_hooks_of_parameters_that_nobody_asks_for_stay_silent(way: Way) -> None:
    fired: list[str] = []
    _, model = pair(way)
    for key, parameter in model.named_parameters():
        parameter.register_hook(lambda _, key=key: fired.append(key))
    torch.autograd.grad(loss_of(model, torch.randn(7, 4)), model[2].weight)
    assert fired == ["2.weight"]


@WAYS
def test_post_accumulate_hooks_fire_once_with_the_whole_gradient(way: Way) -> None:
    models = pair(way)
    fired: list[Counter[str]] = [Counter(), Counter()]
    for model, counts in zip(models, fired):
        for key, parameter in model.named_parameters():

            def step(parameter: Tensor, key: str = key, counts: Counter[str] = counts) -> None:
                counts[key] += 1
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad

            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        for model in models:
            model.zero_grad()
        found, before = losses(*models, torch.randn(7, 4)), [*map(Counter, fired)]
        assert fired == before
        for loss in found:
            loss.backward()
    assert fired[1] == fired[0] and set(fired[1].values()) == {2}
    assert_same_tensors(models[1], models[0])


@WAYS
def test_hooks_of_accumulate_grad_nodes_fire_once(way: Way) -> None:
    models = pair(way)
    counts: list[Counter[str]] = [Counter(), Counter()]
    nodes = []  # They live as long as someone holds them.
    for model, count in zip(models, counts):
        for key, parameter in model.named_parameters():
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, key=key, count=count: count.update([key]))
            nodes.append(node)
    for loss in losses(*models, torch.randn(7, 4)):
        loss.backward()
    assert counts[1] == counts[0] and set(counts[1].values()) == {1}


@WAYS
def test_module_hooks_fire_once_a_microbatch(way: Way) -> None:
    plain, model = pair(way)
    logs: list[list[Any]] = [[], []]
    for m, log in zip((plain, model), logs):
        m[2].register_full_backward_hook(lambda _, inputs, outputs, log=log: log.append((inputs[0], outputs[0])))
        m[2].register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 2,))
    forward: list[int] = []
    model[2].register_forward_hook(lambda m, given, output: forward.append(len(output)))
    for loss in losses(plain, model, torch.randn(7, 4, requires_grad=True)):
        loss.backward()
    again = {"never": [], "except_last": [3, 3], "always": [3, 3, 1]}[model.checkpoint]
    assert sorted(forward) == sorted([3, 3, 1, *again])
    assert len(logs[1]) == 3
    # The row of a microbatch stands by itself: both sides sorted, they are the whole batch's.
    for k in (0, 1):
        found, whole = torch.cat([entry[k] for entry in logs[1]]), logs[0][0][k]
        torch.testing.assert_close(found.sort(0).values, whole.sort(0).values)
    assert_same_tensors(model, plain)


def test_hooks_of_the_whole_model_see_the_batch_and_the_loss() -> None:
    seen: list[tuple[int, torch.Size]] = []
    _, model = pair(("1f1b", 2, {}))
    model.register_forward_hook(lambda m, given, loss: seen.append((len(given[0]), loss.shape)))
    model(torch.randn(7, 4), target=0.25)
    assert seen == [(7, torch.Size([]))]


@WAYS
def test_the_input_may_retain_its_gradient_and_have_hooks(way: Way) -> None:
    plain, model = pair(way)
    leaf = torch.randn(7, 4, requires_grad=True)
    found = []
    for module in (plain, model):
        seen: list[Tensor] = []
        x = leaf * 2
        x.retain_grad()
        x.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        leaf.grad = None
        loss_of(module, x).backward()
        assert len(seen) == 1
        found.append((seen[0], x.grad, leaf.grad))
    assert_same(found[1], found[0], "gradients of the input")


def test_the_loss_may_retain_its_gradient_and_have_hooks() -> None:
    plain, model = pair(("zb-h1", 2, {}))
    for loss in losses(plain, model, torch.randn(7, 4)):
        loss.retain_grad()
        loss.register_hook(lambda grad: grad * 2)
        (loss * 5).backward()
        assert loss.grad == 10
    assert_same_tensors(model, plain)


@WAYS
def test_gradients_accumulate_in_place_over_backwards(way: Way) -> None:
    plain, model = pair(way)
    for _ in range(2):
        for loss in losses(plain, model, torch.randn(7, 4)):
            loss.backward()
    assert_same_tensors(model, plain)
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    for m in (plain, model):
        m.zero_grad(set_to_none=False)
    for loss in losses(plain, model, torch.randn(7, 4)):
        loss.backward()
    assert all(parameter.grad is kept[name] for name, parameter in model.named_parameters())
    assert_same_tensors(model, plain)


class Touching(nn.Module):
    """Does something to its parameter in forward."""

    def __init__(self, touch: Callable[[Any], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.touch = touch
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.touch(self)
        return x * self.weight


def hook_once(layer: Any) -> None:
    if not hasattr(layer, "handle"):
        layer.handle = layer.weight.register_hook(lambda grad: layer.seen.append(grad.clone()))


def hook_and_remove(layer: Any) -> None:
    if hasattr(layer, "handle"):
        layer.handle.remove()
    layer.handle = layer.weight.register_hook(lambda grad: layer.seen.append(grad.clone()))


def freeze(layer: Any) -> None:
    layer.weight.requires_grad_(False)


def read_grad(layer: Any) -> None:
    layer.seen.append(None if layer.weight.grad is None else layer.weight.grad.clone())


def mark(layer: Any) -> None:
    layer.weight.mark = len(layer.seen)


def replace(layer: Any) -> None:
    if not layer.seen:
        layer.seen.append("replaced")
        layer.weight = nn.Parameter(layer.weight.detach() * 2)


@WAYS
@pytest.mark.parametrize("touch", [hook_once, hook_and_remove, freeze, read_grad, mark, replace])
def test_what_a_layer_does_to_its_parameter_in_forward(touch: Callable[[Any], None], way: Way) -> None:
    """One microbatch, so that the unwrapped module's forward runs as often."""
    module = nn.Sequential(nn.Linear(4, 4), Touching(touch), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    plain, model = twins(module, way, chunks=1, checkpoint="never")
    for _ in range(3):  # The gradients of all accumulate.
        x = torch.randn(7, 4)
        for loss in losses(plain, model, x):
            loss.backward()
    assert_same(model[1].seen, plain[1].seen, "what the layer saw")
    assert_same_tensors(model, plain)
    assert vars(model[1].weight) == vars(plain[1].weight)
    assert model[1].weight.requires_grad is plain[1].weight.requires_grad
