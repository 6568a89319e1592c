"""Arguments that are taken as they are meant, or warned of. Those that are refused stand in helpers/wrong.py."""
from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn

from splitpipe import SplitPipe, schedule
from splitpipe.checks import resolve_schedule, verify_balance, verify_devices, verify_module
from splitpipe.core.stream import Place
from splitpipe.piped import Arguments, complete, options_of
from tests.helpers.twin import Looped

CPU = Place(torch.device("cpu"))


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


@pytest.mark.parametrize("balance", [[2, 1], (2, 1), iter([2, 1]), numpy.array([2, 1]), torch.tensor([2, 1])])
def test_a_balance_of_any_ints_is_taken(balance: Any) -> None:
    numbers = verify_balance(balance, 3)
    assert numbers == [2, 1] and all(type(number) is int for number in numbers)


def test_devices_are_named_in_any_way(no_accelerator: None) -> None:
    for given in None, ["cpu", torch.device("cpu")], iter(["cpu:0", torch.device("cpu", 0), "cpu"]):
        assert verify_devices(given, 2) == [CPU, CPU]


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
    assert verify_devices(["cuda", torch.device("cuda:0"), "cuda:1", "cpu"], 4) == [second, first, second, CPU]
    with pytest.raises(ValueError, match=r"devices\[0\] is 'cuda:2', which isn't available: expected one of cpu, "
                                         r"cuda:0, cuda:1"):
        verify_devices(["cuda:2", "xpu:0"], 2)


def test_devices_without_a_stage_are_warned_of_by_name(two: None) -> None:
    given = complete("SplitPipe", Arguments(devices=["cuda:1", "cpu", "cuda:0", "cpu"], chunks=2))
    with pytest.warns(UserWarning, match=r"cuda:0, which won't be used, as .* stages \(2\): .*, or fewer devices"):
        assert len(options_of(given, [1, 1]).places) == 2
    options_of(given, [1] * 4)
    SplitPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu", "cpu"])  # The CPU is used.


def test_a_device_that_is_named_twice_while_others_are_idle_is_warned_of(two: None) -> None:
    with pytest.warns(UserWarning, match=r"devices names 'cuda' twice, .*: expected indices, such as \['cuda:0'"):
        verify_devices(["cuda", torch.device("cuda")], 2)
    assert verify_devices(["cuda:1", "cuda:1", "cpu", "cpu"], 4)[0] == Place(torch.device("cuda", 1))


def test_a_first_stage_that_calls_no_module_is_warned_of_once() -> None:
    module = Looped(nn.Linear(4, 4), nn.Linear(4, 4))
    model = SplitPipe(module, cuts=["0", "1"], devices=["cpu"] * 3, chunks=2)
    with pytest.warns(UserWarning, match=r"stage 0 calls no module, so its device is idle: expected cuts= without"):
        model(torch.randn(4, 4))
    model(torch.randn(4, 4))


@pytest.mark.cuda
def test_a_stream_is_a_device_and_a_stream_to_compute_on() -> None:
    given = torch.Stream(device="cuda:0")
    one, other = verify_devices([given, 0], 2)
    assert one.device == torch.device("cuda:0") and other == Place(torch.device("cuda:0"))
    # A torch.cuda.Stream is equal to no torch.Stream.
    assert isinstance(one.stream, torch.cuda.Stream) and one.stream.stream_id == given.stream_id


@pytest.mark.parametrize("name", schedule.names())
def test_a_schedule_of_a_name_is_built_for_stages_devices_and_chunks(name: str) -> None:
    each = schedule.build(name, 1, 1).stages
    for devices in (1, 2, 4):
        found = resolve_schedule(name, devices * each, devices, 8)
        assert found == schedule.build(name, devices, 8) and found.name == name
    assert resolve_schedule(name, 4, None, 8).devices == 4 // each, "as many as the stages take"
    for stages in (2, 4, 6, 8) if name == "interleaved-1f1b" else ():
        assert resolve_schedule(name, stages, 2, 8).stages == stages, "as many as the balance has"


def test_a_schedule_of_the_users_own_is_taken_as_it_is() -> None:
    plan = schedule.build("v-half", 2, 6)
    assert resolve_schedule(plan, 4, 2, 6) is plan and resolve_schedule(plan, 4, None, 6) is plan
