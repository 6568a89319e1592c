"""A Sequential is cut and placed as asked, or refused as a whole, all faults said at once."""
from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from splitpipe.checks import TooFewDevicesError, verify_balance, verify_devices, verify_listed, verify_module
from splitpipe.core.stream import Place
from splitpipe.stage import cut
from splitpipe.stage.cut import verify_graphs, verify_sharing, verify_stages

CPU = Place(torch.device("cpu"))
META = Place(torch.device("meta"))
MEASURE = "balance_by_time({}, module, sample)"


class Custom(nn.Sequential):
    def forward(self, input: Any) -> Any:
        return super().forward(input) + 1


class Plain(nn.Sequential):
    """A subclass that runs its layers as nn.Sequential does."""


def patched() -> nn.Sequential:
    module = nn.Sequential(nn.Tanh())
    module.forward = lambda input: input
    return module


def parts(error: Any) -> str:
    return str(error.value)


@pytest.mark.parametrize(
    ("module", "found", "step"),
    [
        (nn.Linear(1, 1), "module is a Linear: expected an nn.Sequential", "Write the model as nn.Sequential(layer"),
        (None, "module is a NoneType: expected an nn.Sequential", "Write the model as"),
        (nn.ModuleList(), "module is a ModuleList", "Write the model as"),
        (Custom(), "module is a Custom, whose forward() is its own: expected nn.Sequential's", "Move that code into a"),
        (patched(), "module is a Sequential, whose forward() is its own", "Move that code into a layer"),
    ],
)
def test_what_is_no_plain_sequential_is_refused(module: Any, found: str, step: str) -> None:
    with pytest.raises(TypeError) as error:
        verify_module(module)
    assert found in parts(error) and step in parts(error)


def test_subclasses_that_keep_forward_are_welcome() -> None:
    verify_module(nn.Sequential())
    verify_module(Plain(nn.Tanh()))


@pytest.mark.parametrize("balance", [[2, 1], (2, 1), iter([2, 1]), numpy.array([2, 1]), torch.tensor([2, 1])])
def test_a_balance_of_any_ints_is_taken(balance: Any) -> None:
    numbers = verify_balance(balance, 3)
    assert numbers == [2, 1] and all(type(number) is int for number in numbers)


@pytest.mark.parametrize(
    ("balance", "kind", "texts"),
    [
        (None, ValueError, ["balance is required", "3 layers", MEASURE.format("devices")]),
        ([], ValueError, ["balance [] doesn't fit", "it is empty: expected at least one", "sums to 0", "3 layers"]),
        ([1, 1], ValueError, ["balance [1, 1] doesn't fit: it sums to 2, but the module has 3", MEASURE.format(2)]),
        ([4, 0], ValueError, ["[4, 0]", "every stage needs at least one layer; it sums to 4", MEASURE.format(2)]),
        ([5, -2], ValueError, ["[5, -2]", "every stage needs at least one layer"]),
        (3, TypeError, ["balance is 3: expected a list of ints", MEASURE.format("devices")]),
        ("21", TypeError, ["balance is '21': expected a list of ints"]),
        (b"21", TypeError, ["balance is b'21': expected a list of ints"]),
        ([2, 1.0], TypeError, ["balance[1] is 1.0: expected an int"]),
        ([True, 2], TypeError, ["balance[0] is True: expected an int"]),
        ([numpy.True_, 2], TypeError, ["balance[0] is", "expected an int"]),
        ([torch.tensor(1.5), 2], TypeError, ["balance[0] is tensor(1.5000): expected an int"]),
        (["a", 2, None], TypeError, ["balance[0] is 'a'; balance[2] is None: expected an int", MEASURE]),
    ],
)
def test_a_wrong_balance_says_all_that_is_wrong_and_how_to_get_one(
    balance: Any, kind: type[Exception], texts: list[str]
) -> None:
    with pytest.raises(kind) as error:
        verify_balance(balance, 3)
    for text in texts:
        assert text.replace("{}", "devices") in parts(error)


def test_devices_are_named_in_any_way(no_accelerator: None) -> None:
    assert verify_devices(None, 2) == [CPU, CPU]
    assert verify_devices(["cpu", torch.device("cpu")], 2) == [CPU, CPU]
    assert verify_devices(verify_listed(iter(["cpu:0", torch.device("cpu", 0), "cpu"]), 2), 2) == [CPU, CPU]


@pytest.mark.parametrize(
    ("devices", "kind", "texts"),
    [
        ("cpu", TypeError, ["devices is 'cpu': expected a list", "['cpu', 'cpu']"]),
        (torch.device("cpu"), TypeError, ["devices is device(type='cpu'): expected a list"]),
        (0, TypeError, ["devices is 0: expected a list"]),
        (["cpu", 1.5], TypeError, ["devices[1] is 1.5: expected a torch.device, an index, a string", "torch.Stream"]),
        ([True, "cpu"], TypeError, ["devices[0] is True: expected a torch.device"]),
        (["cpu", "nowhere"], ValueError, ["devices[1] is 'nowhere'", "expected one of cpu"]),
        (["meta", "cpu"], ValueError, ["devices[0] is 'meta', which isn't available: expected one of cpu"]),
        ([-1, "cpu"], ValueError, ["devices[0] is -1", "expected one of cpu"]),
        (["cuda:0", 1.5, "meta"], ValueError, ["devices[0] is 'cuda:0'", "devices[1] is 1.5", "devices[2] is 'meta'"]),
        ([], ValueError, ["0 devices (none) for 2 stages: expected 2", "balance of 1 number."]),
        (["cpu"], ValueError, ["1 device (cpu) for 2 stages: expected 2", "Name 2 (one may be named twice)"]),
    ],
)
def test_wrong_devices_are_refused_together(
    no_accelerator: None, devices: Any, kind: type[Exception], texts: list[str]
) -> None:
    with pytest.raises(kind) as error:
        verify_devices(verify_listed(devices, 2), 2)
    for text in texts:
        assert text in parts(error)


def test_too_few_devices_are_an_index_error_too(no_accelerator: None) -> None:
    assert issubclass(TooFewDevicesError, ValueError) and issubclass(TooFewDevicesError, IndexError)
    with pytest.raises(IndexError):
        verify_devices(["cpu"], 2)


class Two:
    """Two accelerators, of which the second is the current one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "device_count", lambda: 2)
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_device_index", lambda: 1)


def test_accelerators_are_the_default_and_a_bare_name_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Two(monkeypatch)
    first, second = (Place(torch.device("cuda", index)) for index in range(2))
    assert verify_devices(None, 2) == [first, second]
    assert verify_devices(None, 1) == [first]
    assert verify_devices(["cuda", torch.device("cuda:0"), "cuda:1", "cpu"], 4) == [second, first, second, CPU]
    with pytest.raises(ValueError, match=r"devices\[0\] is 'cuda:2', which isn't available: expected one of cpu and "
                                         r"cuda:0 to cuda:1") as error:
        verify_devices(["cuda:2", "xpu:0"], 2)
    assert "devices[1] is 'xpu:0'" in parts(error)


@pytest.mark.cuda
def test_a_stream_is_a_device_and_a_stream_to_compute_on() -> None:
    stream = torch.Stream(device="cuda:0")
    assert verify_devices([stream, 0], 2) == [Place(torch.device("cuda:0"), stream), Place(torch.device("cuda:0"))]


def test_spans_are_first_and_last_layers() -> None:
    assert cut.spans([2, 1, 3]) == [(0, 2), (2, 3), (3, 6)]
    assert cut.spans([]) == []


def test_sharing_between_devices_is_refused_and_on_one_device_is_not() -> None:
    tied, other, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)
    other.weight = tied.weight
    stages = [[tied, norm], [nn.Tanh()], [other, norm]]
    verify_sharing(stages, [META] * 3)
    verify_sharing(stages, [META, CPU, META])
    with pytest.raises(ValueError) as error:
        verify_sharing(stages, [CPU, CPU, META])
    text = parts(error)
    assert "Linear.weight of stage 2 (meta) is also in stage 0 (cpu)" in text
    assert "BatchNorm1d.running_mean of stage 2 (meta) is also in stage 0 (cpu)" in text
    assert "Linear.bias" not in text
    assert "Choose a balance that puts the layers that share it in one stage" in text and "copy.deepcopy" in text


def norms(count: int) -> list[nn.BatchNorm1d]:
    return [nn.BatchNorm1d(2) for _ in range(count)]


def test_stages_on_the_cpu_have_a_worker_each_unless_they_share_a_buffer() -> None:
    a, b, c = norms(3)
    tied, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = tied.weight

    def workers(*stages: list[nn.Module]) -> list[int]:
        return cut.workers(stages, [CPU] * 9)

    assert workers([a], [b], [c]) == [0, 1, 2]
    assert workers([tied], [other]) == [0, 1]
    assert workers([a], [b], [a]) == [0, 1, 0]
    assert workers([a], [b], [nn.Sequential(c, a)], [b]) == [0, 1, 0, 1]
    assert workers() == []


def test_a_stage_that_shares_buffers_with_several_brings_their_workers_together() -> None:
    a, b, c, d = norms(4)
    assert cut.workers([[a], [b], [a, b]], [CPU] * 3) == [0, 0, 0]
    assert cut.workers([[a], [b], [c], [d], [c, b], [d]], [CPU] * 6) == [0, 1, 1, 2, 1, 2]
    assert cut.workers([[a, b], [b, c], [d], [c, a]], [CPU] * 4) == [0, 0, 1, 0]


def test_an_accelerator_has_one_worker() -> None:
    layers = [[layer] for layer in norms(5)]
    assert cut.workers(layers, [META, CPU, META, CPU, META]) == [0, 1, 0, 2, 0]


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
        cut.move([[modules[0]], [modules[1], modules[2]]], [META, META])
    assert described(modules) == before
    assert modules[0][0].weight is modules[1].weight


def test_a_move_can_be_undone() -> None:
    modules = trained()[:2]
    before = described(modules)
    undo = cut.move([[modules[0]], [modules[1]]], [META, CPU])
    assert {tensor.device.type for tensor in (*modules[0].parameters(), *modules[0].buffers())} == {"meta"}
    undo()
    assert described(modules) == before


def test_a_lazy_layer_is_moved_and_moved_back() -> None:
    layer = nn.LazyLinear(2)
    undo = cut.move([[layer]], [META])
    assert layer.weight.device.type == "meta"
    undo()
    assert layer(torch.rand(3, 4)).shape == (3, 2)


def test_a_place_is_copied_as_itself_and_pickled_as_its_device() -> None:
    stream: Any = object()
    place = Place(torch.device("cpu"), stream)
    assert copy.deepcopy([place])[0] is place
    assert pickle.loads(pickle.dumps(place)) == CPU
    assert str(Place(torch.device("cuda:1"))) == "cuda:1"


@pytest.mark.cuda
def test_layers_move_to_the_device_and_back_with_their_gradients() -> None:
    modules = trained()[:2]
    before = described(modules)
    undo = cut.move([[modules[0]], [modules[1]]], [Place(torch.device("cuda:0"))] * 2)
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
        cut.move([[nn.Linear(3, 3)], [layer]], [Place(torch.device("meta")), Place(torch.device("cpu"))])
    now = [layer.weight, layer.bias, layer.running_mean, layer.weight.grad, layer.bias.grad]
    assert all(found is tensor for found, tensor in zip(now, tensors))
    assert [(tensor.data_ptr(), tensor.tolist()) for tensor in now] == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(("options", "graphs"), [
    ({"mode": "reduce-overhead"}, True), ({"mode": "max-autotune"}, True),
    ({"options": {"triton.cudagraphs": True}}, True), ({}, False), ({"mode": "max-autotune-no-cudagraphs"}, False),
    ({"backend": "eager"}, False),
])
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
