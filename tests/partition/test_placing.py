"""A Sequential is cut and moved as asked, or refused as a whole."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from splitpipe.core.stream import Place
from splitpipe.partition import placing
from splitpipe.partition.placing import verify_graphs, verify_sharing, verify_stages

CPU = Place(torch.device("cpu"))
META = Place(torch.device("meta"))


def test_spans_are_first_and_last_layers() -> None:
    assert placing.spans([2, 1, 3]) == [(0, 2), (2, 3), (3, 6)]
    assert placing.spans([]) == []


def test_sharing_between_devices_is_refused_and_on_one_device_is_not() -> None:
    tied, other, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)
    other.weight = tied.weight
    stages = [[tied, norm], [nn.Tanh()], [other, norm]]
    verify_sharing(stages, [META] * 3)
    verify_sharing(stages, [META, CPU, META])
    with pytest.raises(ValueError) as error:
        verify_sharing(stages, [CPU, CPU, META])
    text = str(error.value)
    assert "Linear.weight of stage 2 (meta) is also in stage 0 (cpu)" in text
    assert "BatchNorm1d.running_mean of stage 2 (meta) is also in stage 0 (cpu)" in text
    assert "Linear.bias" not in text
    assert "Choose a balance that puts the layers that share it into one stage" in text and "copy.deepcopy" in text


def norms(count: int) -> list[nn.BatchNorm1d]:
    return [nn.BatchNorm1d(2) for _ in range(count)]


def test_stages_on_the_cpu_have_a_worker_each_unless_they_share_state() -> None:
    a, b, c = norms(3)
    tied, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = tied.weight

    def workers(*stages: list[nn.Module]) -> list[int]:
        return placing.workers(stages, [CPU] * 9)

    assert workers([a], [b], [c]) == [0, 1, 2]
    assert workers([tied], [other]) == [0, 1]
    assert workers([a], [b], [a]) == [0, 1, 0]
    assert workers([a], [b], [nn.Sequential(c, a)], [b]) == [0, 1, 0, 1]
    assert workers([tied], [nn.Sequential(tied)]) == [0, 0]
    relu, empty = nn.ReLU(), nn.Sequential()
    assert workers([relu, empty, c], [relu, empty]) == [0, 1]
    assert workers() == []


def test_a_stage_that_shares_buffers_with_several_brings_their_workers_together() -> None:
    a, b, c, d = norms(4)
    assert placing.workers([[a], [b], [a, b]], [CPU] * 3) == [0, 0, 0]
    assert placing.workers([[a], [b], [c], [d], [c, b], [d]], [CPU] * 6) == [0, 1, 1, 2, 1, 2]
    assert placing.workers([[a, b], [b, c], [d], [c, a]], [CPU] * 4) == [0, 0, 1, 0]


def test_an_accelerator_has_one_worker() -> None:
    layers = [[layer] for layer in norms(5)]
    assert placing.workers(layers, [META, CPU, META, CPU, META]) == [0, 1, 0, 2, 0]


class Immovable(nn.Linear):
    """A layer that raises when it is moved, once its own tensors have been."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Immovable:
        super()._apply(fn, recurse)
        raise KeyboardInterrupt


def described(modules: list[nn.Module]) -> list[Any]:
    """What there is in modules, down to the memory that it lies in."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    gradients = [tensor.grad for tensor in tensors]
    return [
        (id(tensor), tensor.data_ptr(), tensor.device, tensor._version, tensor.tolist())
        for tensor in (*tensors, *gradients)
        if tensor is not None
    ]


def trained() -> list[nn.Module]:
    modules = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3), Immovable(3, 3)]
    modules[1].weight = modules[0][0].weight
    nn.Sequential(*modules)(torch.rand(4, 3)).sum().backward()
    modules[2].bias.grad = None
    return modules


def test_if_one_layer_cannot_be_moved_nothing_is() -> None:
    modules = trained()
    before = described(modules)
    with pytest.raises(KeyboardInterrupt):
        placing.move([[modules[0]], [modules[1], modules[2]]], [META, META])
    assert described(modules) == before
    assert modules[0][0].weight is modules[1].weight


def test_a_move_can_be_undone() -> None:
    modules = trained()[:2]
    before = described(modules)
    undo = placing.move([[modules[0]], [modules[1]]], [META, CPU])
    assert {tensor.device.type for tensor in (*modules[0].parameters(), *modules[0].buffers())} == {"meta"}
    undo()
    assert described(modules) == before


def test_a_lazy_layer_is_moved_and_moved_back() -> None:
    layer = nn.LazyLinear(2)
    undo = placing.move([[layer]], [META])
    assert layer.weight.device.type == "meta"
    undo()
    assert layer(torch.rand(3, 4)).shape == (3, 2)


@pytest.mark.cuda
def test_layers_move_to_the_device_and_back_with_their_gradients() -> None:
    modules = trained()[:2]
    before = described(modules)
    undo = placing.move([[modules[0]], [modules[1]]], [Place(torch.device("cuda:0"))] * 2)
    weight = modules[1].weight
    assert isinstance(weight, Tensor) and weight.grad is not None
    assert weight.is_cuda and weight.grad.is_cuda and modules[0][0].weight is weight
    undo()
    assert described(modules) == before


class InPlace(nn.BatchNorm1d):
    """A layer that is changed in place before it raises."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InPlace:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data[:1] + 1
            parameter.data = parameter.data[:1] + 1
            parameter.grad = None
        self.running_mean = torch.ones(1)
        raise KeyboardInterrupt


def test_a_layer_changed_in_place_before_it_raises_is_as_it_was() -> None:
    layer = InPlace(3)
    layer(torch.rand(4, 3)).square().sum().backward()
    tensors = [layer.weight, layer.bias, layer.running_mean, layer.weight.grad, layer.bias.grad]
    before = [(tensor.data_ptr(), tensor.tolist()) for tensor in tensors]
    with pytest.raises(KeyboardInterrupt):
        placing.move([[nn.Linear(3, 3)], [layer]], [Place(torch.device("meta")), Place(torch.device("cpu"))])
    now = [layer.weight, layer.bias, layer.running_mean, layer.weight.grad, layer.bias.grad]
    assert all(found is tensor for found, tensor in zip(now, tensors))
    assert [(tensor.data_ptr(), tensor.tolist()) for tensor in now] == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(("options", "graphs"), [
    ({"mode": "reduce-overhead"}, True), ({"mode": "max-autotune"}, True),
    ({"options": {"triton.cudagraphs": True}}, True), ({}, False), ({"mode": "max-autotune-no-cudagraphs"}, False),
    ({"backend": "eager"}, False),
])
@pytest.mark.thorough
def test_layers_compiled_to_cuda_graphs_are_refused_where_torch_cannot_run_them(
    options: dict[str, Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = nn.Linear(2, 2)
    inside.compile(**options)
    for layer in torch.compile(nn.Linear(2, 2), **options), nn.Sequential(nn.ReLU(), inside):
        stages = [[nn.Linear(2, 2)], [layer]]
        verify_graphs(stages, [META, META])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", TorchVersion("2.12.1"))
            verify_graphs(stages, [META, CPU])
            if not graphs:
                verify_stages(stages, [META, META])
                continue
            with pytest.raises(ValueError, match="Linear in stage 1 .*Expected torch 2.13 or newer, or torch.compile"):
                verify_stages(stages, [META, META])
