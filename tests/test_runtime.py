"""What a model has in its process alone: made when needed, kept from pass to pass, taken along by no copy."""
from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from splitpipe import schedule
from splitpipe.core.rng import RngMode
from splitpipe.core.stream import Place
from splitpipe.runtime.chain import ChainRuntime
from splitpipe.runtime.options import Options
from tests.helpers.modules import module_of
from tests.helpers.scheduled import twins
from tests.helpers.twin import assert_same_tensors
from tests.promise.layers import Apply

CPU = Place(torch.device("cpu"))


def runtime(
    chunks: int = 2, uncheckpointed: int | None = None, plan: schedule.Schedule | None = None,
    places: Sequence[Place] = (CPU, CPU),
) -> ChainRuntime:
    """One layer a stage."""
    options = Options(
        (), tuple(places), chunks, "never", uncheckpointed, True, None, plan, None, None, None, None, None, None
    )
    return ChainRuntime([(number, number + 1) for number in range(len(places))], options)


def layers(*modules: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(str(number), module) for number, module in enumerate(modules)]


def modes(found: ChainRuntime) -> list[RngMode]:
    return [facts.rng for cache in found._resources.caches for facts in cache.facts.values()]


def test_threads_are_kept_from_pass_to_pass() -> None:
    seen, found = list[threading.Thread](), runtime()

    def note(x: Tensor) -> Tensor:
        seen.append(threading.current_thread())
        return x.sin()

    for _ in range(2):
        found.forward(layers(Apply(note), nn.Identity()), torch.rand(2, 2), True)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_start_without_threads_and_knowledge(copied: Any) -> None:
    found = runtime()
    found.forward(layers(nn.Dropout(), nn.Identity()), torch.rand(2, 2), True)
    assert modes(found) == [RngMode.EXCLUSIVE, RngMode.NONE]
    other = copied(found)
    assert other._resources._pool is None and modes(other) == []
    other.forward(layers(nn.Identity(), nn.Identity()), torch.rand(2, 2), True)


def test_how_stages_draw_is_forgotten_when_something_drew_unwatched() -> None:
    draws, found = list[bool](), runtime()
    own = layers(Apply(lambda x: x * torch.rand(1) if draws else x * 1), nn.Identity())
    found.forward(own, torch.rand(2, 2), True)
    assert modes(found) == [RngMode.NONE, RngMode.NONE]
    draws.append(True)
    found.forward(own, torch.rand(2, 2), True)
    assert set(modes(found)) == {RngMode.DOUBTED}
    found.forward(own, torch.rand(2, 2), True)
    assert modes(found) == [RngMode.EXCLUSIVE, RngMode.NONE]


class Seen(TorchFunctionMode):
    """Notes which functions are called, but for those that a stage calls itself on the way to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("__get__", "detach"):
            self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def test_function_modes_of_the_users_see_what_the_layers_call_and_nothing_else() -> None:
    x = torch.ones(4, 2)
    with Seen() as seen:
        runtime().forward(layers(Apply(torch.sin), Apply(torch.sin)), x, True)
    assert seen.names == ["sin"] * 4


def test_function_modes_of_the_users_see_what_layers_and_loss_call_and_nothing_else() -> None:
    found = runtime(plan=schedule.build("1f1b", 2, 2))
    x = torch.ones(4, 2)
    with Seen() as seen:
        found.train(layers(Apply(torch.sin), Apply(torch.sin)), x, x, True, lambda y, target: y.mean(), None)
    assert sorted(seen.names) == ["mean"] * 2 + ["sin"] * 4


def test_gradients_are_scaled_where_the_last_stage_is() -> None:
    class Scaler:
        def is_enabled(self) -> bool:
            return True

        def scale(self, one: Tensor) -> Tensor:
            raise ValueError(f"asked on {one.device}")

    places = [CPU, CPU, Place(torch.device("meta"))]
    found = runtime(plan=schedule.build("1f1b", 3, 2), places=places)
    with pytest.raises(ValueError, match="asked on meta"):
        found.train(layers(*[Apply(torch.sin)] * 3), torch.ones(4, 2), None, True, torch.mean, Scaler())


def calling(self: Any, x: Tensor) -> Tensor:
    """Calls a model in forward, if it has one."""
    for model in self.model:
        model(x)
    return x * 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("target", [None, torch.zeros(5, 4)])
def test_a_layer_that_calls_its_own_model_is_told_so(name: str, target: Tensor | None) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), module_of(calling, model=[]), nn.Linear(4, 4))
    plain, model = twins(layers, name, loss_fn=F.mse_loss)
    x = torch.rand(5, 4)
    model[1].model = [model]
    with pytest.raises(RuntimeError, match="called by one of its layers"):
        model(x, target)
    model[1].model = []
    F.mse_loss(plain(x), torch.zeros(5, 4)).backward()
    model(x, target=torch.zeros(5, 4)).backward()
    assert_same_tensors(model, plain)


def differentiated(x: Tensor) -> Tensor:
    """The gradient of an energy, as of force fields."""
    with torch.enable_grad():
        found, = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    return found


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_checkpoint_around_a_model_whose_layer_differentiates_is_an_error(mode: Any) -> None:
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), Apply(differentiated)), "gpipe", checkpoint=mode, loss_fn=None)
    x = torch.rand(5, 4)
    with pytest.raises(RuntimeError, match="the model's own checkpoint='always'"):
        checkpoint(model, x, use_reentrant=False)
    for either in plain, model:
        either(x).sum().backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_checkpoint_around_a_model_calls_it_again_in_backward(name: str, mode: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain, model = twins(module, name, checkpoint=mode, loss_fn=F.mse_loss)
    x = torch.rand(5, 4)
    for either in plain, model:
        checkpoint(either, x, use_reentrant=False).sum().backward()
    assert_same_tensors(model, plain)
