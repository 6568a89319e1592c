"""Conversion keeps all of a BatchNorm but how it counts, and refuses before it changes anything."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import splitpipe
from splitpipe.batchnorm import DeferredBatchNorm

convert = DeferredBatchNorm.convert_deferred_batch_norm


class OwnForward(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


def kinds(model):
    return [type(layer) for layer in model.modules()]


def test_everything_of_the_layer_stays():
    layer = nn.BatchNorm2d(3, eps=0.1, momentum=None).double().eval()
    layer.mine = "kept"
    attributes = dict(vars(layer))
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    converted = convert(layer)
    assert converted is layer
    assert type(converted) is DeferredBatchNorm
    assert all(vars(converted)[name] is value for name, value in attributes.items())
    now = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    assert now.keys() == tensors.keys()
    assert all(now[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_dimensions_are_checked_as_before(kind):
    layer = kind(3)
    converted = convert(copy.deepcopy(layer))
    for dims in range(1, 6):
        x, found = torch.randn(2, 3, 2, 2, 2)[(..., *[0] * (5 - dims))], []
        for each in (layer, converted):
            try:
                each(x)
            except ValueError as error:
                found.append(str(error))
        assert len(found) in (0, 2) and len({*found}) < 2


def test_every_depth_is_converted_and_shared_layers_stay_shared():
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(shared, nn.ModuleDict({"a": nn.Sequential(nn.BatchNorm2d(3)), "b": shared}))
    assert convert(model) is model
    assert type(model[1]["a"][0]) is DeferredBatchNorm
    assert type(model[0]) is DeferredBatchNorm
    assert model[0] is model[1]["b"] is shared


def test_others_are_left_alone():
    patched = nn.BatchNorm1d(3)
    patched.forward = lambda input: input
    deferred = convert(nn.BatchNorm1d(3))
    untracked = nn.BatchNorm1d(3)
    untracked.track_running_stats = False
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.LayerNorm(3),
                          OwnForward(3), patched, nn.BatchNorm1d(3, track_running_stats=False),
                          nn.LazyBatchNorm1d(track_running_stats=False), deferred, untracked)
    before = kinds(model)
    convert(model)
    assert kinds(model) == before and deferred._original is nn.BatchNorm1d


def test_all_that_is_refused_is_told_and_nothing_is_changed():
    parametrized = nn.BatchNorm1d(3)
    parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.LazyBatchNorm1d()), parametrized)
    before = kinds(model)
    with pytest.raises(ValueError, match=r"\('1\.0', '2'\) are parametrized or not initialized yet: expected"):
        convert(model)
    assert kinds(model) == before
    model(torch.rand(2, 3))
    assert isinstance(convert(model[:2])[1][0], DeferredBatchNorm)  # As the error says: after a batch.
    parametrize.register_parametrization(model[0], "weight", nn.Identity())  # And so may layers be that it has made.
    model[:2](torch.rand(2, 3)).sum().backward()


# Where a graph breaks, the compiler itself reads .grad, and hides the warning where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
@pytest.mark.thorough
def test_layer_compiled_before_is_deferred_too():
    plain = nn.BatchNorm1d(3)
    deferred = copy.deepcopy(plain)
    compiled = torch.compile(deferred, backend="eager")
    x = torch.randn(8, 3)
    compiled(x)
    convert(deferred)
    compiled(x)
    for _ in range(2):
        plain(x)
    torch.testing.assert_close(dict(deferred.state_dict()), dict(plain.state_dict()))


def test_layers_that_normalise_each_microbatch_are_logged_unless_deferred(said: list[str]) -> None:
    def layers(count: int = 1) -> nn.Sequential:
        return nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(count)], nn.Linear(3, 3), nn.Linear(3, 3))

    where: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 2}
    splitpipe.attach(layers(), ["1"], **where)
    splitpipe.SplitPipe(layers(), [1, 2], **where)
    splitpipe.SplitPipe(layers(5), [1, 6], **where)
    assert [message.partition(" normalise each microbatch separately")[0] for message in said] == [
        "BatchNorm layers ('0')", "BatchNorm layers ('0')", "BatchNorm layers ('0', '1', '2' and 2 more)"
    ]
    said.clear()
    splitpipe.attach(layers(), ["1"], **where, deferred_batch_norm=True)
    splitpipe.SplitPipe(layers(), [1, 2], **where, deferred_batch_norm=True)
    splitpipe.SplitPipe(layers().eval(), [1, 2], **where)
    splitpipe.SplitPipe(layers(), [1, 2], devices=["cpu", "cpu"], chunks=1)
    assert not said
