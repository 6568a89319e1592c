"""A module with cuts is what it was: attributes, state, copies, pickles; what may be named in cuts, in which order."""
from __future__ import annotations

import copy
import inspect
import pickle
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

import splitpipe
from splitpipe import SplitPipe, attach
from tests.engine.models import CHECKPOINTS, SCHEDULES, Stack, batch, piped
from tests.helpers.covering import pairwise
from tests.helpers.scheduled import inside, loss_of, mean
from tests.helpers.twin import assert_same_tensors, stages
from tests.promise.layers import Apply

CUTS = ["layers.1", "layers.3"]
variable: ContextVar[float] = ContextVar("variable", default=0.0)
PLACES = pytest.mark.parametrize("place", [SplitPipe, attach])


def placed(place: Any, module: nn.Module, **options: Any) -> Any:
    return place(module, cuts=CUTS, devices=["cpu"] * 3, **{"chunks": 3, **options})


class Rich(Stack):
    """Has methods and attributes of its own, calls itself, changes what nn.Module's methods do, has no plain state."""

    def __init__(self) -> None:
        super().__init__(block=lambda: nn.BatchNorm1d(4))
        self.config, self.scale, self.table = {"width": 4}, 1.0, torch.ones(1)

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x)["y"])["y"]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Any:
        return iter(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def train(self, mode: bool = True) -> Rich:
        super().train(mode)
        self.layers.eval()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Rich:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = fn(self.table)
        return self

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


@PLACES
def test_attributes_methods_and_the_signature_are_the_modules(place: Any) -> None:
    module = Rich().train()
    model, x = placed(place, copy.deepcopy(module)), torch.randn(6, 4)
    assert model.config == {"width": 4} and len(model) == 4 and [*model] == [*model.layers]
    assert model[1] is model.layers[1]
    assert inspect.signature(model.forward) == inspect.signature(module.forward)
    torch.testing.assert_close(model.twice(x), module.twice(x))
    assert isinstance(model, Rich) is (place is attach)
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018
    plain = placed(place, Stack())
    for asked in (len, list):
        with pytest.raises(TypeError):
            asked(plain)
    assert plain


@PLACES
@pytest.mark.parametrize("inside", [False, True])
def test_methods_that_its_class_has_changed_are_the_modules(place: Any, inside: bool) -> None:
    model = placed(place, Rich())
    module = model if place is attach else model.inner
    outer = nn.ModuleDict({"model": model}) if inside else model
    assert outer.eval().train() is outer and model.training and not module.layers[0].training
    for part in model.modules():
        part.training = True
    module.eval()
    assert not (model.training or model.layers[0].training)
    state = outer.state_dict()
    assert [*state] == [f"model.{name}" if inside else name for name in Rich().state_dict()]
    module.scale = 2.0
    outer.load_state_dict(state)
    assert outer.double() is outer and (module.scale, module.table.dtype) == (1.0, torch.float64)


@PLACES
def test_an_attribute_that_the_module_has_is_set_there(place: Any) -> None:
    model = placed(place, Rich())
    module = model if place is attach else model.inner
    model.scale, model.table, model.other = 3.0, None, 4.0
    assert (module.scale, module.table, model.other) == (3.0, None, 4.0)
    model.table = nn.Linear(4, 4)
    assert module.table is model.table is model.get_submodule("table")
    del module.scale, module.other, model.table
    assert not any(hasattr(each, name) for each in (model, module) for name in ("scale", "table", "other"))


class Whole(nn.Linear):
    """A layer that is copied with all its attributes, as torch's recurrent layers are."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


@pairwise(place=[SplitPipe, attach], called=[False, True], schedule=SCHEDULES,
          way=[copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_run_by_themselves(place: Any, schedule: str, way: Any, called: bool) -> None:
    model, given = placed(place, Stack(block=Whole), schedule=schedule), batch()
    model.layers[2].bias.requires_grad_(False)
    if called:
        model(**given)["loss"].backward()
    loss = model(**given)["loss"]  # It has a graph meanwhile.
    other = way(model)
    loss.backward()
    assert other.last.weight is other.first.weight and not other.layers[2].bias.requires_grad
    assert type(other) is type(model) and {*other.parameters()}.isdisjoint(model.parameters())
    assert place is SplitPipe or other.forward.runtime.module is other
    plain = Stack(block=Whole)
    plain.layers[2].bias.requires_grad_(False)
    plain.load_state_dict(other.state_dict())
    with torch.no_grad():
        model.last.weight.zero_()
    for each in (other, plain):
        each.zero_grad()
        each(**given)["loss"].backward()
    assert_same_tensors(other, plain)


@PLACES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_report_names_parameters_as_the_module_does(place: Any, schedule: str) -> None:
    model = placed(place, Stack(), schedule=schedule)
    assert {row.why for row in splitpipe.deferral_report(model)} == {"not known yet: no step has used it"}
    model(**batch())["loss"].backward()
    rows = {row.parameter: row for row in splitpipe.deferral_report(model)}
    assert [*rows] == [name for name, _ in model.named_parameters()]
    assert [rows[f"layers.{k}.weight"].stage for k in range(4)] == [0, 1, 1, 2]
    assert {(row.deferred, row.why) for row in rows.values()} == {(True, "linear")}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_saved_tensor_hooks_may_be_forbidden_around_the_call(schedule: str) -> None:
    plain = Stack()
    model, given = piped(plain, CUTS, schedule=schedule, checkpoint="never"), batch()
    for each in (model, plain):
        with disable_saved_tensors_hooks("not here"):
            loss = each(**given)["loss"]
        loss.backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_context_variables_go_along_with_a_microbatch(by: str, checkpoint: str, schedule: str) -> None:
    def sets(x: Tensor) -> Tensor:
        assert variable.get() == 7.0
        variable.set(float(x.detach().sum()))
        return x * 2

    layers = nn.Sequential(Apply(sets), nn.Linear(4, 4), Apply(lambda x: x * variable.get()))
    module, where = stages(layers, [2, 1], by)
    model = SplitPipe(module, devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint, **where,
                      **inside({"schedule": schedule}))
    token, x = variable.set(7.0), torch.randn(6, 4)
    try:
        expected = torch.cat([layers[1](rows * 2) * rows.sum() for rows in x.chunk(3)])
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)
        grads = torch.autograd.grad(mean(expected), [*layers.parameters()])
        loss_of(model, x).backward()
        torch.testing.assert_close([parameter.grad for parameter in layers.parameters()], [*grads])
        assert variable.get() == 7.0
    finally:
        variable.reset(token)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


@pytest.mark.parametrize("cuts", [["2"], ["1", "3"], [], ["2.1", "3"]])
def test_a_sequential_with_cuts_runs_its_own_forward(cuts: list[str]) -> None:
    module, x = layers(), torch.randn(6, 4)
    model = SplitPipe(module, cuts=cuts, devices=["cpu"] * 3, chunks=2)
    assert model.balance == [] and model.cuts == cuts
    for rows in (x[:1], x, x):  # Of more microbatches, which take more threads.
        torch.testing.assert_close(model(rows), module(rows))
    assert len(model) == 4 and model[2][1] is [*model][2][1] and list(model.state_dict()) == list(module.state_dict())


def test_a_sequential_may_be_cut_before_its_first_layer() -> None:
    module, x = layers(), torch.randn(6, 4)
    torch.testing.assert_close(piped(module, ["0"])(x), module(x))


def test_hf_device_map_has_every_block_and_layer() -> None:
    cpu = torch.device("cpu")
    module = attach(Stack(), cuts=["layers.2"], devices=["cpu", "cpu"])
    names = ["first", "layers.0", "layers.1", "layers.2", "layers.3", "last"]
    assert module.hf_device_map == dict.fromkeys(names, cpu)
    assert SplitPipe(Stack(), cuts=["layers.2"], devices=["cpu", "cpu"]).hf_device_map == module.hf_device_map
    piped = SplitPipe(layers(), [1, len(layers()) - 1], devices=["cpu", "cpu"])
    assert piped.hf_device_map == dict.fromkeys(["0", "1", "2", "3"], cpu)
