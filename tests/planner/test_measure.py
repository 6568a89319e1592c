"""Layers are measured as stages of their own, on copies, and nothing else notices."""
from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe.balance.layers import layers_of
from splitpipe.balance.units import Times
from splitpipe.checks import verify_devices
from splitpipe.core.stream import Place
from splitpipe.core.worker import in_new_thread
from splitpipe.planner import machine, measure, work
from splitpipe.planner.machine import shared_threads
from splitpipe.planner.measure import bar
from splitpipe.planner.profile import Layer, Profile
from tests.helpers.copied import Log
from tests.helpers.covering import few
from tests.helpers.skipping import Pop, Stash
from tests.promise.layers import Apply

FLOAT = 4


def profiled(
    module: nn.Sequential, sample: Any, chunks: Sequence[int] = (2,), target: Any = None, loss_fn: Any = None,
    rows: int = 1, seconds: float = 0.01, **options: Any,
) -> Profile:
    places: list[Place] = verify_devices(["cpu"] * rows, rows)
    given = {"memory": None, "optimizer_state": 2.0, "progress": lambda done, total, what: None, **options}
    of = layers_of(module, sample, "the sample")
    return measure.profile(module, of, target, loss_fn, places, chunks, seconds=seconds, **given)


def layers(found: Profile, chunks: int = 2) -> tuple[Layer, ...]:
    return found.kinds[0].layers[chunks]


def times(layer: Layer) -> tuple[float, float, float]:
    return layer.forward, layer.backward_input, layer.backward_weight


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer takes long."""
    monkeypatch.setattr(work.Work, "again", lambda *_: True)


@pytest.mark.thorough
def test_each_number_of_chunks_has_each_layer() -> None:
    found = profiled(mlp(), torch.randn(8, 64), [1, 4])
    assert found.chunks == [1, 4] and found.names == ("0", "1", "2")


@pytest.mark.usefixtures("quick")
def test_forward_backward_and_weight_gradient_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "times_of", lambda _: [Times(9.0, 7.0, 5.0)])
    monkeypatch.setattr(work, "overhead", lambda *_: [Times(1.0, 8.0, 0.5)])
    assert {times(layer) for layer in layers(profiled(mlp(), torch.randn(8, 64)))} == {(8.0, 0.0, 4.5)}


@pytest.mark.parametrize("rows", few(1, [2, 1]))
def test_bytes_are_those_of_a_microbatch(rows: int) -> None:
    one, two, three = layers(profiled(mlp(), torch.randn(8, 64), rows=rows))
    assert (one.input, two.input, three.input) == (4 * 64 * FLOAT, 4 * 32 * FLOAT, 4 * 32 * FLOAT)
    assert (one.saved, two.saved, three.saved) == (4 * 64 * FLOAT, 4 * 32 * FLOAT, 4 * 32 * FLOAT)
    assert (one.kept, two.kept, three.kept) == (4 * (64 + 32) * FLOAT, 0, 4 * (32 + 16) * FLOAT)


@pytest.mark.thorough
@pytest.mark.usefixtures("quick")
def test_of_what_is_saved_input_and_output_are_told_apart() -> None:
    linear, tanh, _ = layers(profiled(mlp(), torch.randn(8, 64)))
    assert (linear.saved_input, linear.saved_output) == (4 * 64 * FLOAT, 0)
    assert (tanh.saved_input, tanh.saved_output) == (0, 4 * 32 * FLOAT)
    linear, _, _ = layers(profiled(mlp(), torch.randn(8, 64), seconds=0.0))  # Run once.
    assert (linear.saved_input, linear.saved_output) == (4 * 64 * FLOAT, 0)


def seen_by(function: Any, *before: nn.Module, sample: Any = None, **options: Any) -> Log:
    """What a function tells of what a layer is given, in each of its runs, behind others; it gives a tensor on."""
    seen = Log()
    last = Apply(lambda x: (seen.append(function(x)), x["x"] if isinstance(x, dict) else x)[1])
    profiled(nn.Sequential(*before, last), torch.randn(8, 4) if sample is None else sample, **options)
    return seen


@pytest.mark.thorough
def test_a_layer_longer_than_its_part_of_the_time_runs_once() -> None:
    assert len(seen_by(type, seconds=0.0)) == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("quick")
def test_other_layers_run_at_least_three_times_more() -> None:
    assert len(seen_by(type, chunks=[1])) > 3


@pytest.mark.thorough
@pytest.mark.usefixtures("quick")
def test_a_stage_on_the_cpu_is_measured_with_its_share_of_the_threads() -> None:
    with shared_threads(1):
        torch.set_num_threads(6)
        assert set(seen_by(lambda x: torch.get_num_threads(), rows=3)) == {2} and torch.get_num_threads() == 6


@pytest.mark.thorough
def test_the_layer_gets_its_microbatch_as_it_is() -> None:
    sample = {"x": torch.randn(6, 3), "n": torch.arange(6), "scale": torch.tensor(2.0), "word": "a"}
    for value in seen_by(dict, sample=sample, chunks=[3]):
        assert value["x"].equal(sample["x"][:2]) and value["n"].equal(sample["n"][:2])
        assert value["scale"].equal(sample["scale"]) and value["word"] == "a"


@pytest.mark.thorough
def test_strides_of_the_flow_are_kept() -> None:
    last = Apply(lambda x: x.to(memory_format=torch.channels_last))
    seen = seen_by(lambda x: x.is_contiguous(memory_format=torch.channels_last), last, sample=torch.randn(8, 3, 4, 4))
    assert seen and all(seen)


@pytest.mark.thorough
def test_sparse_tensors_between_layers_are_taken_along() -> None:
    module = nn.Sequential(Apply(lambda x: x.to_sparse()), Apply(lambda x: x.to_dense()))
    assert len(layers(profiled(module, torch.randn(8, 4)))) == 2


@pytest.mark.parametrize("rows", few(1, [2, 1]))
def test_skips_reach_the_layer_that_pops_them(rows: int) -> None:
    module = nn.Sequential(Stash(), nn.Linear(4, 4), Pop())
    found = layers(profiled(module, torch.randn(8, 4), rows=rows))
    assert found[2].input == 2 * 4 * 4 * FLOAT


@pytest.mark.thorough
def test_a_layer_may_keep_what_it_computed() -> None:
    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    assert len(layers(profiled(nn.Sequential(Keeping(4, 4)), torch.randn(8, 4), seconds=1.0))) == 1


@pytest.mark.thorough
def test_without_anything_to_train_backward_takes_no_time() -> None:
    module = mlp().requires_grad_(False)
    assert {times(layer)[1:] for layer in layers(profiled(module, torch.randn(8, 64)))} == {(0.0, 0.0)}
    assert {layer.saved for layer in layers(profiled(module, torch.randn(8, 64)))} == {0}


def test_the_loss_counts_for_the_last_layer() -> None:
    x, y = torch.randn(8, 64), torch.randn(8, 16)
    plain = layers(profiled(mlp(), x))
    found = layers(profiled(mlp(), x, target=y, loss_fn=nn.MSELoss()))
    assert [layer.saved for layer in found[:2]] == [layer.saved for layer in plain[:2]]
    assert found[2].saved == plain[2].saved + 2 * 4 * 16 * FLOAT  # The output and the target.


@pytest.mark.thorough
def test_the_loss_gets_the_target_of_the_microbatch() -> None:
    seen = Log()
    target = [torch.arange(8), torch.tensor(3), "word"]

    def loss_fn(output: Tensor, target: Any) -> tuple[Tensor, int]:
        seen.append(target)
        return output.sum(), len(output)

    profiled(mlp(), torch.randn(8, 64), target=target, loss_fn=loss_fn, rows=2)
    assert all(one.equal(torch.arange(4)) and two == 3 and word == "word" for one, two, word in seen)


@pytest.mark.thorough
def test_a_loss_with_parameters_keeps_them() -> None:
    loss = nn.Linear(16, 1)
    log = Log()
    loss.register_forward_hook(lambda *_: log.append(1))
    given = copy.deepcopy(loss.state_dict())

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loss

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.inner(output) - target).square().mean()

    profiled(mlp(), torch.randn(8, 64), target=torch.randn(8, 1), loss_fn=Mean())
    assert loss.weight.grad is None and loss.weight.equal(given["weight"]) and not log


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.thorough
def test_nothing_of_the_callers_changes(rows: int) -> None:
    module = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 8), nn.ReLU(inplace=True), nn.Dropout())
    module[1].weight.grad = grad = torch.ones(8, 64)
    module.eval()
    x = torch.randn(8, 64, requires_grad=True)
    target = torch.randn(8, 8)
    before, sample, random = copy.deepcopy(module.state_dict()), x.detach().clone(), torch.get_rng_state()
    profiled(module, x, [1, 2], rows=rows, target=target, loss_fn=nn.MSELoss())
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert x.equal(sample) and x.grad is None and module[1].weight.grad is grad and grad.eq(1).all()
    assert torch.get_rng_state().equal(random) and not module.training


@pytest.mark.thorough
def test_numbers_of_threads_are_as_before() -> None:
    before = torch.get_num_threads(), in_new_thread(torch.get_num_threads)
    profiled(mlp(), torch.randn(8, 64), rows=3)
    assert (torch.get_num_threads(), in_new_thread(torch.get_num_threads)) == before


@pytest.mark.thorough
def test_chunks_that_a_layer_refuses_are_left_out() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert profiled(module, torch.randn(8, 4), [1, 4, 8]).chunks == [1, 4]


@pytest.mark.thorough
def test_chunks_that_memory_refuses_are_left_out_unless_all_are() -> None:
    most = 4

    def limited(x: Tensor) -> Tensor:
        if len(x) > most:
            raise torch.OutOfMemoryError("full")
        return x

    assert profiled(nn.Sequential(Apply(limited)), torch.randn(8, 4), [1, 2, 4]).chunks == [2, 4]
    most = 0
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        profiled(nn.Sequential(Apply(limited)), torch.randn(8, 4), [1, 2, 4])


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [1, 2])
def test_an_error_says_where_it_was_raised(rows: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    with pytest.raises(RuntimeError) as caught:
        profiled(module, torch.randn(8, 4), [2, 4], rows=rows)
    where = "layer 1 ('1', Linear), in a copy on cpu, with 2 chunks"
    assert f"Raised while profiling {where}" in caught.value.__notes__[-1]


@pytest.mark.thorough
def test_parameters_and_other_state_count_where_they_come_first() -> None:
    first, norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    found = profiled(nn.Sequential(first, norm, second), torch.randn(8, 4))
    assert [layer.parameters for layer in layers(found)] == [16 * FLOAT, 0, 0]
    assert [layer.state for layer in layers(found)] == [0, 4 * FLOAT * 2 + 8, 4 * FLOAT]
    assert found.tied == ((0, 2),)


def test_names_are_those_of_the_state_dict() -> None:
    module = nn.Sequential()
    module.add_module("encoder", nn.Linear(4, 4))
    module.add_module("decoder", nn.Linear(4, 4))
    assert profiled(module, torch.randn(8, 4)).names == ("encoder", "decoder")


@pytest.mark.thorough
def test_rows_of_one_cpu_are_one_kind_and_not_apart() -> None:
    found = profiled(mlp(), torch.randn(8, 64), rows=3)
    assert [device.kind for device in found.devices] == [0, 0, 0] and not found.own_compute
    assert profiled(mlp(), torch.randn(8, 64)).own_compute


@pytest.mark.thorough
def test_a_hop_between_rows_of_the_cpu_copies_nothing() -> None:
    link = profiled(mlp(), torch.randn(8, 64), rows=2).link
    assert link.latency >= 0 and link.bandwidth == math.inf


@pytest.mark.parametrize(("memory", "expected"), [(None, [math.inf] * 2), ([1, 2], [1, 2])])
def test_memory_is_what_was_given(memory: Any, expected: list[float]) -> None:
    found = profiled(mlp(), torch.randn(8, 64), rows=2, memory=memory)
    assert [device.memory for device in found.devices] == expected


@pytest.mark.thorough
def test_progress_is_told_before_each_layer() -> None:
    told: list[tuple[int, int, str]] = []
    profiled(mlp(), torch.randn(8, 64), [1, 2], seconds=0.0, progress=lambda *each: told.append(each))
    assert [done for done, _, _ in told] == [*range(6)] and {total for _, total, _ in told} == {6}
    assert told[4][2] == "layer 1 (Tanh), 2 chunks, cpu"


class Stop(BaseException):
    pass


def test_the_bar_is_gone_at_the_end() -> None:
    out = io.StringIO()
    with pytest.raises(Stop), bar(True, out) as progress:
        progress(7, 14, "layer 3 (Block), 8 chunks, cuda:0")
        raise Stop
    text = "profiling [######------] 7/14 layer 3 (Block), 8 chunks, cuda:0"
    assert out.getvalue() == f"\r{text}\r{' ' * len(text)}\r"


@pytest.mark.parametrize(("shown", "out"), [(None, io.StringIO()), (False, io.StringIO()), (None, None), (True, None)])
def test_without_a_terminal_or_a_standard_error_there_is_no_bar(
    shown: bool | None, out: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with bar(shown, out) as progress:
        progress(1, 2, "layer")
    assert out is None or not out.getvalue()


MIB = 2**20


#: What torch.accelerator, or the module of a kind of devices, tells of a device.
TOLD: dict[str, Any] = {
    "get_device_name": lambda device: "small" if device.index == 2 else "large",
    "get_memory_info": lambda device: (1000, 2000 + device.index // 2),
    "memory_reserved": lambda device: 0, "memory_allocated": lambda device: 0,
}
#: Most of what was taken is free again.
CACHING: dict[str, Any] = {**TOLD, "memory_reserved": lambda device: 600, "memory_allocated": lambda device: 100}


def places(*indices: int) -> list[Place]:
    return [Place(torch.device("cuda", index)) for index in indices]


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**TOLD))
    for name in "get_memory_info", "memory_reserved", "memory_allocated":
        monkeypatch.setattr(torch.accelerator, name, TOLD[name])


@pytest.mark.usefixtures("accelerators")
def test_accelerators_with_one_name_and_as_much_memory_are_one_kind() -> None:
    cpu = Place(torch.device("cpu"))
    assert machine.kinds_of([*places(0, 1, 2), cpu, cpu]) == {"large": [0, 1], "small": [2], "cpu": [3, 4]}
    assert machine.kinds_of(places(0, 3, 4)) == {"large": [0], "large (1)": [1], "large (2)": [2]}


@pytest.mark.usefixtures("accelerators")
def test_of_free_memory_rows_of_one_accelerator_have_a_part_each() -> None:
    assert machine.usable_bytes(mlp(), places(0, 1, 1), None) == [900, 450, 450]


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("whose", ["torch.accelerator", "the device's module"])
def test_what_the_allocator_keeps_for_later_is_free(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "memory_reserved", "memory_allocated":
        if whose == "torch.accelerator":
            monkeypatch.setattr(torch.accelerator, name, CACHING[name])
        else:
            monkeypatch.delattr(torch.accelerator, name)
            monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**CACHING))
    assert machine.usable_bytes(mlp(), places(0), None) == [0.9 * 1500]


@pytest.mark.parametrize("capability, config, expected", [
    ((9, 0), None, 33 * MIB), ((8, 0), None, 9 * MIB + 2**17), ((9, 0), ":4096:2:16:8", 9 * MIB + 2**17),
    ((9, 0), ":0:0", MIB),
])
def test_a_workspace_is_as_large_as_torch_makes_it(
    capability: tuple[int, int], config: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert machine.workspace(torch.device("cuda", 0)) == expected
    assert machine.workspace(torch.device("cpu")) == 0
