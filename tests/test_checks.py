"""Arguments that are taken as they are meant, or refused with what is wrong with them."""
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

CPU = Place(torch.device("cpu"))
EACH = {name: schedule.build(name, 1, 1).stages for name in schedule.names()}
NAMES = pytest.mark.parametrize("name", schedule.names())


class Plain(nn.Sequential):
    """A subclass that runs its layers as nn.Sequential does."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)

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


@pytest.mark.parametrize(("balance", "kind", "found"), [
    (None, TypeError, "balance is None: expected a list of ints"),
    ([], ValueError, r"balance \[\] sums to 0, but the module has 3 layers: expected at least one stage"),
    ([3, 0], ValueError, r"balance \[3, 0\] .* numbers above 0"),
    ([4], ValueError, r"balance \[4\] sums to 4, but the module has 3 layers"),
    (["a", 2, None], TypeError, r"balance is \['a', 2, None\]: expected a list of ints"),
])
def test_a_wrong_balance_says_what_is_wrong_and_how_to_get_one(balance: Any, kind: type[Exception], found: str) -> None:
    with pytest.raises(kind, match=rf"{found}.* splitpipe\.balance\.balance_by_time\(devices, module, sample\)"):
        verify_balance(balance, 3)


def test_devices_are_named_in_any_way(no_accelerator: None) -> None:
    assert verify_devices(None, 2) == [CPU, CPU]
    assert verify_devices(["cpu", torch.device("cpu")], 2) == [CPU, CPU]
    assert verify_devices(iter(["cpu:0", torch.device("cpu", 0), "cpu"]), 2) == [CPU, CPU]


@pytest.mark.parametrize(("devices", "texts"), [
    (["cpu", "cuda:0"], ["devices[1] is 'cuda:0'", "expected one of cpu."]),
    (["meta", "cpu"], ["devices[0] is 'meta'", "expected one of cpu."]),
    ([], ["0 devices (none) for 2 stages: expected 2"]),
    (["cpu"], ["1 device (cpu) for 2 stages: expected 2", "Give 2 (a device may be repeated)"]),
])
def test_wrong_devices_are_refused_by_number(no_accelerator: None, devices: Any, texts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        verify_devices(devices, 2)
    for text in texts:
        assert text in str(error.value)


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
    with pytest.raises(ValueError, match=r"devices\[0\] is 'cuda:2', which isn't available: expected one of cpu, "
                                         r"cuda:0, cuda:1"):
        verify_devices(["cuda:2", "xpu:0"], 2)


def test_devices_without_a_stage_are_warned_of_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Two(monkeypatch)
    given = complete("SplitPipe", Arguments(devices=["cuda:1", "cpu", "cuda:0", "cpu"], chunks=2))
    with pytest.warns(UserWarning, match=r"cuda:0, which won't be used, as .* stages \(2\): .*, or fewer devices"):
        assert len(options_of(given, 2).places) == 2
    options_of(given, 4)
    SplitPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu", "cpu"])  # The CPU is used.


def test_a_device_that_is_named_twice_while_others_are_idle_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    Two(monkeypatch)
    with pytest.warns(UserWarning, match=r"devices names 'cuda' twice, .*: expected indices, such as \['cuda:0'"):
        verify_devices(["cuda", torch.device("cuda")], 2)
    assert verify_devices(["cuda:1", "cuda:1", "cpu", "cpu"], 4)[0] == Place(torch.device("cuda", 1))


def test_a_class_is_no_loss_function() -> None:
    with pytest.raises(TypeError, match=r"loss_fn is <class .*: expected .* an instance, such as nn.MSELoss\(\)"):
        SplitPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"], schedule="1f1b", loss_fn=nn.MSELoss)


def test_a_first_stage_that_calls_no_module_is_warned_of_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.embed(x))
            return y

    model = SplitPipe(Net(), cuts=["embed", "head"], devices=["cpu"] * 3, chunks=2)
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


@NAMES
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_schedule_of_a_name_is_built_for_stages_devices_and_chunks(name: str, devices: int) -> None:
    found = resolve_schedule(name, devices * EACH[name], devices, 8)
    assert found == schedule.build(name, devices, 8) and found.name == name


@NAMES
def test_without_devices_there_are_as_many_as_the_stages_take(name: str) -> None:
    assert resolve_schedule(name, 4, None, 8).devices == 4 // EACH[name]


def test_interleaved_schedules_take_what_the_balance_has() -> None:
    for stages in (2, 4, 6, 8):
        found = resolve_schedule("interleaved-1f1b", stages, 2, 8)
        assert (found.stages, found.devices) == (stages, 2)


def test_a_schedule_of_the_users_own_is_taken_as_it_is() -> None:
    plan = schedule.build("v-half", 2, 6)
    assert resolve_schedule(plan, 4, 2, 6) is plan and resolve_schedule(plan, 4, None, 6) is plan
