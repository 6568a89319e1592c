"""The mode stands aside for layers where it caught nothing, and for no others."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from splitpipe import SplitPipe
from splitpipe.deferral.catch import Catch, Register
from splitpipe.deferral.mode import Deferring
from splitpipe.deferral.report import Sightings
from tests.helpers.deferring import Call, deferred, in_more_ways, trained
from tests.helpers.deferring import double as double
from tests.helpers.twin import step, twins


class Watch(nn.Module):
    """A layer; notes at each call whether the mode watches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.watched: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.watched.append(any(isinstance(mode, Deferring) for mode in _get_current_function_mode_stack()))
        y: Tensor = self.inner(x)
        return y


def watched(*layers: nn.Module, x: Tensor | None = None, passes: int = 1, **options: Any) -> list[list[bool]]:
    """Whether the mode watches each layer of a stage, in each of three microbatches of each pass."""
    watches = [Watch(layer) for layer in layers]
    model = SplitPipe(nn.Sequential(*watches), [len(layers)], devices=["cpu"], chunks=3,
                      **{"checkpoint": "never", **options})
    for _ in range(passes):
        step(model, torch.randn(6, 4) if x is None else x)
    return [watch.watched for watch in watches]


ALWAYS, ONCE = [True, True, True], [True, False, False]


def test_a_layer_without_anything_to_catch_is_watched_in_its_first_microbatch_alone() -> None:
    assert watched(nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)) == [ONCE, ALWAYS, ONCE, ALWAYS]


def test_a_layer_that_has_its_weight_from_elsewhere_is_watched_as_long_as_it_uses_it() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    assert watched(Call(lambda x: F.linear(x, weight)), nn.Tanh()) == [ALWAYS, ONCE]


def test_each_pass_looks_anew() -> None:
    assert watched(nn.Tanh(), nn.Linear(4, 4), passes=2) == [ONCE * 2, ALWAYS * 2]


def test_the_last_layer_is_looked_at_too() -> None:
    assert watched(nn.Linear(4, 4), nn.Tanh()) == [ALWAYS, ONCE]


def test_what_is_made_again_in_backward_is_not_watched() -> None:
    assert watched(nn.Tanh(), nn.Linear(4, 4), checkpoint="always") == [[False] * 6] * 2


def test_a_call_that_was_left_to_autograd_is_no_catch() -> None:
    assert watched(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), x=torch.randn(6, 4, 4)) == [ALWAYS, ONCE]


class Adding(TorchFunctionMode):
    """Adds one to what tanh gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **kwargs or {})
        return y + 1 if func in (torch.tanh, Tensor.tanh) else y


def test_a_mode_of_the_users_stays_where_the_engines_goes_and_comes_back() -> None:
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), [4], chunks=3)
    x = torch.randn(6, 4)
    for _ in range(2):
        with Adding():
            torch.testing.assert_close(model(x), plain(x))
    assert len(deferred(model)) == 4


class Leaving(nn.Module):
    """Leaves a mode on the stack, as torch.set_default_device does."""

    def forward(self, x: Tensor) -> Tensor:
        if not any(isinstance(mode, Adding) for mode in _get_current_function_mode_stack()):
            torch._C._push_on_torch_function_stack(Adding())
        return x


def test_a_mode_that_a_layer_leaves_is_there_for_the_layers_after_it() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Leaving(), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model = SplitPipe(layers, [5], devices=["cpu"], chunks=3, checkpoint="never")
    x = torch.randn(6, 4)
    expected = layers[3](layers[0](x).tanh() + 1).tanh() + 1
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    assert len(deferred(model)) == 4


def test_a_layer_that_raises_is_not_taken_for_one_without_anything_to_catch() -> None:
    failures = [ValueError("once")]

    def failing(x: Tensor, w: Tensor) -> Tensor:
        if failures:
            raise failures.pop()
        return F.linear(x, w)

    _, model = twins(nn.Sequential(Call(failing, w=torch.randn(4, 4))), chunks=3, checkpoint="never")
    with pytest.raises(ValueError, match="once"):
        step(model, torch.randn(6, 4))
    step(model, torch.randn(6, 4))
    assert set(deferred(model)) == {"0.w"}


@in_more_ways
def test_layers_that_catch_and_layers_that_do_not_are_their_module(way: dict[str, Any]) -> None:
    layer = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4))
    trained(layer, torch.randn(7, 4), **way)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own, since torch 2.14.
def test_a_compiled_layer_is_watched_whatever_it_did() -> None:
    inner = nn.Sequential(nn.Tanh())
    inner.compile(backend="eager")
    assert watched(inner) == [ALWAYS]


@pytest.mark.parametrize("shown", [True, False])
def test_what_is_worth_catching_where_it_fills_idle_time_is_looked_at_apart(shown: bool) -> None:
    store: Any = SimpleNamespace(gains=lambda microbatch: (shown, True))
    register = Register(store, {}, Sightings())
    mode = Deferring(Catch(register, 0, False, {}), noting=False)
    with mode.watching():
        mode.at("a layer that catches nothing", "here")
    assert register.idle == {(0, shown): True}
