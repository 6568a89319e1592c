"""Hooks, drop-in and with a schedule: each fires as often, and sees the same, as with the unwrapped module."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.backward.split_backward import LeafHooks
from tests.helpers import scheduled
from tests.helpers.covering import few
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import loss_of, mlp
from tests.helpers.twin import Nothing, assert_same, assert_same_tensors
from tests.promise.layers import Apply

Way = tuple[str | None, dict[str, Any]]
WAYS: dict[str, Way] = {
    "drop-in": (None, {"checkpoint": "never"}),
    "v-half, autograd": ("v-half", {"backward": "autograd"}),
    "zb-h1, cuts": ("zb-h1", {"checkpoint": "always", "by": "cuts"}),
    "not held back": (None, {"checkpoint": "except_last", "stash_limit": 0}),
    "drop-in, autograd": (None, {"checkpoint": "always", "backward": "autograd"}),
    "drop-in, cuts": (None, {"checkpoint": "always", "by": "cuts"}),
    "1f1b": ("1f1b", {}),
    "zb-v, checkpointed": ("zb-v", {"checkpoint": "always"}),
}
ways = pytest.mark.parametrize("way", few(3, WAYS))


def twins(module: nn.Sequential, way: str, **more: Any) -> tuple[nn.Sequential, SplitPipe]:
    name, options = WAYS[way]
    options = {"chunks": 3, **options, **more}
    return scheduled.twins(module, name, 2, **options)


def losses(models: tuple[nn.Sequential, SplitPipe], x: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the module and of the pipeline."""
    return loss_of(models[0], x), loss_of(models[1], x)


def watched(model: nn.Module) -> dict[str, list[Tensor]]:
    """What hooks of the parameters see; tensor hooks make the gradient three times as large."""
    log: dict[str, list[Tensor]] = {}

    def note(name: str, grad: Any) -> None:
        log.setdefault(name, []).append(grad.clone())

    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: (note(f"{name}, hook", grad), grad * 3)[1])  # type: ignore[func-returns-value]
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(f"{name}, after", p.grad))
    return log


@ways
def test_hooks_of_parameters_fire_once_with_the_whole_gradient_and_may_change_it(way: str) -> None:
    models = twins(mlp(5), way)
    logs, grads = [watched(model) for model in models], list[Any]()
    for _ in range(2):  # The second step's gradients are added, in place.
        found = losses(models, torch.randn(7, 4))
        assert logs == [{}, {}], "a hook fired in the forward"
        for loss in found:
            loss.backward()
        assert_same(dict(sorted(logs[1].items())), dict(sorted(logs[0].items())), "what hooks saw")
        assert set(map(len, logs[1].values())) == {1}
        assert_same_tensors(models[1], models[0])
        grads.append([id(parameter.grad) for parameter in models[1].parameters()])
        for log in logs:
            log.clear()
    assert grads[0] == grads[1]


def sparing(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Uses parameters for rows with a large number, for an output that nothing uses, and never."""
    y: Tensor = self.layer(x)
    y = torch.cat([y[k : k + 1] + self.spare(x[k]) if x.detach()[k].max() > 100 else y[k : k + 1]
                   for k in range(len(x))])
    return y, self.head(y)


@ways
@pytest.mark.parametrize("large", [[], [0], [3], [6]])
@pytest.mark.parametrize("use", [lambda pair: pair[0], lambda pair: pair[0] + Nothing.apply(pair[1])])
def test_what_a_loss_does_not_use_has_no_gradient_and_its_hooks_are_silent(use, large, way):
    first = module_of(sparing, **linears("layer", "spare", "head", "never"))
    plain, model = models = twins(nn.Sequential(first, Apply(use), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), way)
    fired: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: fired.update([name]))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    x = torch.randn(7, 4)
    x[large] = 200.0
    for loss in losses(models, x):
        loss.backward()
    assert_same_tensors(model, plain)
    used = [name for name, parameter in plain.named_parameters() if parameter.grad is not None]
    if way == "drop-in, autograd":  # In one graph, autograd calls the hooks of the head with None, as in a module.
        fired = Counter({name: count for name, count in fired.items() if "head" not in name})
    assert len(used) == (8 if large else 6) and fired == Counter(2 * used)
    fired.clear()
    sum(parameter.sum() for parameter in model.parameters()).backward()
    assert fired == Counter(2 * [name for name, _ in plain.named_parameters()]), "all are called again"

def test_hooks_of_an_argument_that_the_loss_does_not_use_are_silent() -> None:
    fired, given = list[str](), {name: torch.rand(4, 4, requires_grad=True) for name in ("x", "y")}
    both = module_of(lambda self, x, y: (self.last(self.first(x)), y.exp()), **linears("first", "last"))
    model = SplitPipe(both, cuts=["last"], devices=["cpu"] * 2, chunks=2)
    for name, x in given.items():
        x.register_hook(lambda _, name=name: fired.append(name))
        x.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    model(**given)[0].sum().backward()
    assert fired == ["x", "x"] and given["y"].grad is None


@ways
def test_hooks_of_parameters_that_nobody_asks_for_stay_silent(way: str) -> None:
    _, model = twins(mlp(5), way)
    log = watched(model)
    torch.autograd.grad(loss_of(model, torch.randn(7, 4)), model[2].weight)
    assert [*log] == ["2.weight, hook"]


@ways
def test_a_hook_after_accumulation_may_take_the_optimizers_step(way: str) -> None:
    models = twins(mlp(5), way)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for model in models:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        for loss in losses(models, torch.randn(7, 4)):
            loss.backward()
    assert_same_tensors(models[1], models[0])


@ways
def test_module_hooks_fire_once_a_microbatch(way: str) -> None:
    plain, model = models = twins(mlp(5), way)
    logs: list[list[Any]] = [[], []]
    for m, log in zip(models, logs):
        m[2].register_full_backward_hook(lambda _, inputs, outputs, log=log: log.append((inputs[0], outputs[0])))
        m[2].register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 2,))
    forward: list[int] = []
    model[2].register_forward_hook(lambda m, given, output: forward.append(len(output)))
    for loss in losses(models, torch.randn(7, 4, requires_grad=True)):
        loss.backward()
    again = {"never": [], "except_last": [3, 3], "always": [3, 3, 1]}[model.checkpoint]
    assert sorted(forward) == sorted([3, 3, 1, *again])
    assert len(logs[1]) == 3
    # The row of a microbatch stands by itself: both sides sorted, they are the whole batch's.
    for k in (0, 1):
        found, whole = torch.cat([entry[k] for entry in logs[1]]), logs[0][0][k]
        torch.testing.assert_close(found.sort(0).values, whole.sort(0).values)
    assert_same_tensors(model, plain)


@ways
def test_the_input_and_the_loss_may_retain_their_gradients_and_have_hooks(way: str) -> None:
    models, leaf, found = twins(mlp(5), way), torch.randn(7, 4, requires_grad=True), []
    for module in models:
        seen: list[Tensor] = []
        x = leaf * 2
        x.retain_grad()
        x.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        leaf.grad = None
        loss = loss_of(module, x)
        loss.retain_grad()
        loss.register_hook(lambda grad: grad * 2)
        (loss * 5).backward()
        assert len(seen) == 1 and loss.grad == 10
        found.append((seen[0], x.grad, leaf.grad))
    assert_same(found[1], found[0], "gradients of the input")
    assert_same_tensors(models[1], models[0])


def touching(self: Any, x: Tensor) -> Tensor:
    """Does something to its parameter in forward."""
    self.touch[0](self)
    return x * self.weight  # type: ignore[no-any-return]


def hook_again(layer: Any) -> None:
    if hasattr(layer, "handle"):
        layer.handle.remove()
    layer.handle = layer.weight.register_hook(lambda grad: layer.seen.append(grad.clone()))


def freeze(layer: Any) -> None:
    layer.weight.requires_grad_(False)


def read_grad(layer: Any) -> None:
    layer.seen.append(None if layer.weight.grad is None else layer.weight.grad.clone())


def replace(layer: Any) -> None:
    if not layer.seen:
        layer.seen.append("replaced")
        layer.weight = nn.Parameter(layer.weight.detach() * 2)


@ways
@pytest.mark.parametrize("touch", [hook_again, freeze, read_grad, replace])
def test_what_a_layer_does_to_its_parameter_in_forward(touch: Callable[[Any], None], way: str) -> None:
    """One microbatch, so that the unwrapped module's forward runs as often."""
    layer = module_of(touching, weight=nn.Parameter(torch.randn(4)), touch=[touch], seen=[])
    module = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    plain, model = models = twins(module, way, chunks=1, checkpoint="never")
    for _ in range(3):  # The gradients of all accumulate.
        for loss in losses(models, torch.randn(7, 4)):
            loss.backward()
    assert_same(model[1].seen, plain[1].seen, "what the layer saw")
    assert_same_tensors(model, plain)
    assert model[1].weight.requires_grad is plain[1].weight.requires_grad


def test_hooks_that_two_calls_park_while_b_computes_gradients_are_back_after_both() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), list[Tensor]()
    weight.register_hook(seen.append)
    weight.register_hook(lambda grad: grad * 2)
    removed, one, other = weight.register_hook(lambda grad: grad * 5), LeafHooks(), LeafHooks()
    for hooks in (one, other):
        hooks.park([weight])
    removed.remove()
    one.restore()
    other.restore()
    weight.sum().backward()
    assert len(seen) == 1 and weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]
