"""SplitPipe as an nn.Module: arguments as they are meant or warned of, state, devices, hooks, exceptions."""
from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from splitpipe import SplitPipe, attach, schedule
from splitpipe.checks import resolve_schedule, verify_balance, verify_devices, verify_module
from splitpipe.core.stream import Place
from splitpipe.piped import Arguments, complete, options_of
from tests.helpers.faults import throws
from tests.helpers.twin import assert_same, assert_same_tensors, twins
from tests.promise.layers import Apply, first_of

CPU = ["cpu"] * 4


def mlp(width: int = 6, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) if k % 2 == 0 else nn.Tanh() for k in range(layers)])


@pytest.mark.parametrize("wrap", [SplitPipe, attach])
def test_an_argument_that_does_not_exist_is_named(wrap: Any) -> None:
    with pytest.raises(TypeError, match=rf"{wrap.__name__}\(\) got an unexpected keyword argument 'chunk'"):
        wrap(mlp(), devices=CPU, chunk=2)


def test_options_that_are_left_out_are_those_of_the_training_loop() -> None:
    model = SplitPipe(mlp(), [2, 2], devices=CPU, schedule=None)
    assert (model.checkpoint, model.schedule.name) == ("except_last", "gpipe") and "schedule" not in repr(model)


def test_packed_sequences_pass_between_stages_but_are_no_batch() -> None:
    pack = Apply(lambda xs: nn.utils.rnn.pack_padded_sequence(*xs, batch_first=True, enforce_sorted=False))
    recur = first_of(nn.GRU(6, 6, batch_first=True))
    unpack = Apply(lambda packed: nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=5)[0])
    plain, model = twins(nn.Sequential(pack, recur, unpack), [1, 1, 1], chunks=2, checkpoint="always")
    x = torch.rand(4, 5, 6), torch.tensor([5, 2, 3, 1])
    for m in (plain, model):
        y = m(x)
        y.square().sum().backward()
    assert_same(y.detach(), plain(x).detach(), "output")
    assert_same_tensors(model, plain)
    packed = nn.utils.rnn.pack_sequence([torch.rand(5, 6)])
    with pytest.raises(TypeError, match="the input holds tensors in a PackedSequence"):
        SplitPipe(nn.Sequential(recur, unpack), [1, 1], devices=CPU)(packed)
    with pytest.raises(ValueError, match="a PackedSequence and a PackedSequence as the output"):
        SplitPipe(nn.Sequential(pack, recur), [1, 1], devices=CPU)(x)


def test_an_empty_batch() -> None:
    plain, model = twins(mlp(), chunks=2)
    assert_same(model(torch.rand(0, 6)), plain(torch.rand(0, 6)), "output")


def test_state_dict_keys_are_the_unwrapped_modules_and_states_move_both_ways() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(OrderedDict(
            chunks=nn.Linear(3, 3), balance=nn.BatchNorm1d(3), devices=nn.Linear(3, 3), checkpoint=nn.Tanh()))

    plain, model = build(), SplitPipe(build(), [2, 2], devices=CPU, chunks=2)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    model.load_state_dict(plain.state_dict())
    assert_same(model.state_dict(), plain.state_dict(), "state")
    other = build()
    other.load_state_dict(model.state_dict())
    assert model.chunks == 2


def test_length_indexing_slicing_and_iteration() -> None:
    module = mlp()
    layers = list(module)
    model = SplitPipe(module, [1, 3], devices=CPU)
    assert len(model) == 4 and list(model) == layers
    assert [model[k] for k in range(-4, 4)] == [layers[k] for k in range(-4, 4)]
    for part in (slice(1, 3), slice(None, None, 2), slice(-2, None)):
        assert type(model[part]) is nn.Sequential
        assert list(model[part]) == layers[part]
    assert list(model[1:3].state_dict()) == list(nn.Sequential(*layers)[1:3].state_dict())
    for index in (4, -5):
        with pytest.raises(IndexError, match="out of range"):
            model[index]
    with pytest.raises(TypeError):
        model["0"]  # type: ignore[call-overload]


def test_direct_moves_between_devices_are_refused_and_a_parents_is_survived() -> None:
    model = SplitPipe(mlp(), [2, 2], devices=CPU)
    for move in (lambda: model.to("meta"), lambda: model.to(torch.device("meta")), lambda: model.to(device="meta"),
                 lambda: model.to(torch.rand(1, device="meta")), lambda: model.to("meta", torch.float64),
                 lambda: model.to_empty(device="meta")):
        with pytest.raises(TypeError, match="stay on cpu, cpu"):
            move()
    for stay in (lambda: model.to("cpu"), lambda: model.to(torch.rand(1)), model.cpu):
        assert stay() is model, "all stages are there"
    assert model.to(torch.float64)[0].weight.dtype == torch.float64
    assert model.half()[0].weight.dtype == torch.float16
    parent = nn.ModuleDict({"model": model}).to("meta", torch.float32)
    assert parent["model"] is model
    assert model[0].weight.dtype == torch.float32 and model[0].weight.device.type == "cpu"


def test_hooks_and_attributes_of_the_sequential_stay() -> None:
    module = mlp()
    seen: list[torch.Size] = []
    module.register_forward_hook(lambda m, args, output: seen.append(output.shape))
    module.register_buffer("table", torch.rand(3))
    module.eval()
    keys = list(module.state_dict())
    model = SplitPipe(module, [2, 2], devices=CPU, chunks=2)
    model(torch.rand(4, 6))
    assert seen == [torch.Size([4, 6])]
    assert not model.training and list(model.state_dict()) == keys


def test_an_exception_that_would_end_a_generator_arrives_as_it_is() -> None:
    error = StopIteration(1)
    with pytest.raises(StopIteration) as info:
        SplitPipe(nn.Sequential(nn.Linear(3, 3), Apply(throws(error))), [1, 1], devices=CPU, chunks=3)(torch.rand(6, 3))
    assert info.value is error and "layer '1' (Apply)" in " ".join(error.__notes__)


HOST = Place(torch.device("cpu"))


class Plain(nn.Sequential):
    """A subclass that runs its layers as nn.Sequential does."""

    def extra_repr(self) -> str:
        return "shown in its own way"

    def penalty(self) -> int:
        return 0

    def train(self, mode: bool = True) -> Plain:
        return super().train(False)


def test_subclasses_with_other_methods_are_welcome() -> None:
    verify_module(nn.Sequential())
    verify_module(Plain(nn.Tanh()))
    model = SplitPipe(Plain(nn.Linear(2, 2), nn.Dropout(0.5)), [1, 1], devices=["cpu", "cpu"], chunks=2).train()
    assert not model.training and model(torch.ones(4, 2)).ne(0).all()


@pytest.mark.parametrize("balance", [[2, 1], (2, 1), iter([2, 1]), numpy.array([2, 1])])
def test_a_balance_of_any_ints_is_taken(balance: Any) -> None:
    numbers = verify_balance(balance, 3)
    assert numbers == [2, 1] and all(type(number) is int for number in numbers)


def test_devices_are_named_in_any_way(no_accelerator: None) -> None:
    for given in None, ["cpu", torch.device("cpu")], iter(["cpu:0", torch.device("cpu", 0), "cpu"]):
        assert verify_devices(given, 2) == [HOST, HOST]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accelerators, of which the second is the current one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


def test_accelerators_are_the_default_and_a_bare_name_is_the_current_one(two: None) -> None:
    first, second = (Place(torch.device("cuda", index)) for index in range(2))
    assert verify_devices(None, 2) == [first, second]
    assert verify_devices(None, 1) == [first]
    assert verify_devices(["cuda", torch.device("cuda:0"), "cuda:1", "cpu"], 4) == [second, first, second, HOST]
    with pytest.raises(ValueError, match=r"devices\[0\] is 'cuda:2', which isn't available: expected one of cpu, "
                                         r"cuda:0, cuda:1"):
        verify_devices(["cuda:2", "xpu:0"], 2)


def test_devices_without_a_stage_are_warned_of_by_name(two: None) -> None:
    given = complete("SplitPipe", Arguments(devices=["cuda:1", "cpu", "cuda:0", "cpu"], chunks=2))
    with pytest.warns(UserWarning, match=r"cuda:0, which won't be used, as .* stages \(2\): .*, or fewer devices"):
        assert len(options_of(given, [1, 1]).places) == 2
    options_of(given, [1] * 4)
    SplitPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu", "cpu"])  # The CPU is used.


@pytest.mark.cuda
def test_a_stream_is_a_device_and_a_stream_to_compute_on() -> None:
    given = torch.Stream(device="cuda:0")
    one, other = verify_devices([given, 0], 2)
    assert one.device == torch.device("cuda:0") and other == Place(torch.device("cuda:0"))
    # A torch.cuda.Stream is equal to no torch.Stream.
    assert isinstance(one.stream, torch.cuda.Stream) and one.stream.stream_id == given.stream_id


def test_a_copied_place_has_the_device_and_not_the_stream() -> None:
    own: Any = object()
    for again in (way(Place(torch.device("cpu"), own)) for way in (copy.deepcopy, copy.copy)):
        assert (again.device, again.stream) == (torch.device("cpu"), None)


@pytest.mark.parametrize("name", schedule.names())
def test_a_schedule_of_a_name_is_built_for_stages_devices_and_chunks(name: str) -> None:
    each = schedule.build(name, 1, 1).stages
    for devices in (1, 2, 4):
        found = resolve_schedule(name, devices * each, devices, 8)
        assert found == schedule.build(name, devices, 8) and found.name == name
    assert resolve_schedule(name, 4, None, 8).devices == 4 // each, "as many as the stages take"
    for stages in (2, 4, 6, 8) if name == "interleaved-1f1b" else ():
        assert resolve_schedule(name, stages, 2, 8).stages == stages, "as many as the balance has"
    if name == "interleaved-1f1b":
        with pytest.raises(ValueError, match="3 stages for 2 devices.*a multiple of the number of devices"):
            resolve_schedule(name, 3, 2, 8)


def test_a_schedule_of_the_users_own_is_taken_as_it_is() -> None:
    plan = schedule.build("v-half", 2, 6)
    assert resolve_schedule(plan, 4, 2, 6) is plan and resolve_schedule(plan, 4, None, 6) is plan
