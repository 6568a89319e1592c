"""A module with cuts is what it was: its attributes, state, copies and pickles, hooks, and computed parameters."""
from __future__ import annotations

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, attach, detach
from tests.engine.models import SCHEDULES, Stack, batch, piped
from tests.helpers.covering import pairwise
from tests.helpers.twin import assert_same_tensors

CUTS = ["layers.1", "layers.3"]
PLACES = pytest.mark.parametrize("place", [SplitPipe, attach])


def placed(place: Any, module: nn.Module, **options: Any) -> Any:
    return place(module, cuts=CUTS, devices=["cpu"] * 3, **{"chunks": 3, **options})


class Rich(Stack):
    """Has methods and attributes of its own, and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 4}

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x)["y"])["y"]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Any:
        return iter(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]


@PLACES
def test_attributes_methods_and_the_signature_are_the_modules(place: Any) -> None:
    import inspect

    module = Rich()
    model, x = placed(place, copy.deepcopy(module)), torch.randn(6, 4)
    assert model.config == {"width": 4} and len(model) == 4 and [*model] == [*model.layers]
    assert model[1] is model.layers[1]
    assert inspect.signature(model.forward) == inspect.signature(module.forward)
    torch.testing.assert_close(model.twice(x), module.twice(x))
    assert isinstance(model, Rich) is (place is attach)
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018


def test_a_module_without_a_length_has_none() -> None:
    model = piped(Stack(), CUTS)
    assert model
    with pytest.raises(TypeError):
        len(model)
    with pytest.raises(TypeError):
        iter(model)


class Whole(nn.Linear):
    """A layer that is copied with all its attributes, as torch's recurrent layers are."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


@pairwise(
    place=[SplitPipe, attach], called=[False, True], schedule=SCHEDULES,
    way=[copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
)
def test_copies_and_pickles_run_by_themselves(place: Any, schedule: str, way: Any, called: bool) -> None:
    model, given = placed(place, Stack(block=Whole), schedule=schedule), batch()
    if called:
        model(**given)["loss"].backward()
    other = way(model)
    assert type(other) is type(model) and {*other.parameters()}.isdisjoint(model.parameters())
    assert place is SplitPipe or other.forward.runtime.module is other
    plain = Stack(block=Whole)
    plain.load_state_dict(other.state_dict())
    with torch.no_grad():
        model.last.weight.zero_()
    for each in (other, plain):
        each.zero_grad()
        each(**given)["loss"].backward()
    assert_same_tensors(other, plain)


@PLACES
def test_training_mode_is_one_however_it_is_set(place: Any) -> None:
    model = placed(place, Stack())
    inner = model if place is attach else model.inner
    model.eval()
    assert not (model.training or inner.training or model.layers[0].training)
    for part in model.modules():
        part.training = True
    assert model.training and inner.training and model.layers[0].training
    inner.eval()
    assert not model.training


class Frozen(Stack):
    """Changes what nn.Module's methods do, and keeps a tensor and a number that aren't in its state."""

    def __init__(self) -> None:
        super().__init__(block=lambda: nn.BatchNorm1d(4))
        self.scale, self.table = 1.0, torch.ones(1)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.layers.eval()
        return self

    def parameters(self, recurse: bool = True) -> Any:
        return self.last.parameters(recurse)

    def _apply(self, fn: Any, recurse: bool = True) -> Frozen:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = fn(self.table)
        return self

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


@PLACES
@pytest.mark.parametrize("inside", [False, True])
def test_methods_that_its_class_has_changed_are_the_modules(place: Any, inside: bool) -> None:
    model = placed(place, Frozen())
    module = model if place is attach else model.inner
    outer = nn.ModuleDict({"model": model}) if inside else model
    assert outer.eval().train() is outer and model.training and not module.layers[0].training
    state = outer.state_dict()
    assert [*state] == [f"model.{name}" if inside else name for name in Frozen().state_dict()]
    module.scale = 2.0
    outer.load_state_dict(state)
    assert outer.double() is outer and (module.scale, module.table.dtype) == (1.0, torch.float64)
    assert [*model.parameters()] == [*model.last.parameters()]


@PLACES
def test_an_attribute_that_the_module_has_is_set_there(place: Any) -> None:
    model = placed(place, Frozen())
    module = model if place is attach else model.inner
    model.scale, model.table, model.other = 3.0, None, 4.0
    assert (module.scale, module.table, model.other) == (3.0, None, 4.0)
    model.table = nn.Linear(4, 4)
    assert module.table is model.table is model.get_submodule("table")
    del model.scale, model.table, model.other
    assert not any(hasattr(each, name) for each in (model, module) for name in ("scale", "table", "other"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_report_names_parameters_as_the_module_does(schedule: str) -> None:
    model = piped(Stack(), CUTS, schedule=schedule)
    assert {row.why for row in model.deferral_report()} == {"not known yet: run a step first"}
    model(**batch())["loss"].backward()
    rows = {row.parameter: row for row in model.deferral_report()}
    assert [*rows] == [name for name, _ in model.named_parameters()]
    assert [rows[f"layers.{k}.weight"].stage for k in range(4)] == [0, 1, 1, 2]
    why = "the schedule has no W for it" if schedule == "1f1b" else "Linear"
    assert {(row.deferred, row.why) for row in rows.values()} == {(schedule != "1f1b", why)}


def test_replacing_the_pipelines_forward_warns_once() -> None:
    module, given = Stack(), batch()
    expected = module(**given)["y"]
    model = attach(module, CUTS, devices=["cpu"] * 3, chunks=3)
    model.forward = MethodType(Stack.forward, model)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="Stack didn't run as a pipeline, because its forward was replaced") as told:
        torch.testing.assert_close(model(**given)["y"], expected)
        model(**given)
    assert len(told) == 1 and told[0].filename == __file__


def test_a_forward_that_wraps_the_pipelines_gives_no_warning() -> None:
    model = attach(Stack(), CUTS, devices=["cpu"] * 3, chunks=3)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)["y"]  # type: ignore[method-assign]
    assert model(**batch()).shape[0] == len(batch()["x"])
    model.forward = inner  # type: ignore[method-assign]
    model(**batch())
    detach(model)
    model(**batch())
