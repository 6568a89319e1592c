"""Balance, cuts, devices and chunks that are left out are chosen."""
from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from splitpipe.balance import balance_by_time, balances
from splitpipe.balance.rig import Layer
from splitpipe.core.stream import Place
from splitpipe.schedule import build
from tests.engine.models import Stack
from tests.helpers.covering import few

pytestmark = pytest.mark.filterwarnings("ignore:no accelerator is available")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none."""
    monkeypatch.setattr(balances.checks, "accelerators", list[Place])


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in a tenth of a second."""
    monkeypatch.setattr(balances, "balance_by_time", partial(balance_by_time, timeout=0.1))


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def roomy(monkeypatch: pytest.MonkeyPatch, *rooms: float) -> None:
    """Has the first device seen have so many bytes, and so on."""
    free = iter(rooms)
    monkeypatch.setattr(balances, "memory_of", lambda device, module: next(free))


def test_one_device_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balances.checks, "accelerators", lambda: [Place(CPU)])
    with pytest.warns(UserWarning, match="one device: a pipeline of one stage, slower than the module"):
        splitpipe.attach(Stack())


def test_attach_needs_no_other_argument() -> None:
    model, x = Stack(), torch.randn(6, 4)
    loss = model(x)["y"].square().mean()
    expected = torch.autograd.grad(loss, [*model.parameters()])
    with pytest.warns(UserWarning, match="no accelerator is available: using 2 stages on the CPU"):
        assert splitpipe.attach(model) is model
    runtime = vars(model)["forward"].runtime
    assert runtime.options.chunks == 8 and [place.device for place in runtime.options.places] == [CPU, CPU]
    again = model(x)["y"].square().mean()
    again.backward()
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close([p.grad for p in model.parameters()], [*expected])


def test_what_was_chosen_is_said_in_a_form_to_paste(said: list[str]) -> None:
    model = SplitPipe(layers())
    assert said == ["chosen: balance=[2, 2], devices=['cpu', 'cpu']", "chosen: chunks=8"]
    assert "balance=[2, 2], devices=[cpu, cpu], chunks=8" in repr(model)
    inner = SplitPipe(Stack(), chunks=2)
    assert said[2:] == [f"chosen: cuts={inner.cuts}, devices=['cpu', 'cpu']"]


def test_what_is_given_stays() -> None:
    model = SplitPipe(layers(), [1, 3])
    assert (model.balance, model.devices, model.chunks) == ([1, 3], [CPU, CPU], 8)
    model = SplitPipe(layers(), devices=["cpu"] * 3, chunks=5)
    assert (len(model.balance), model.chunks) == (3, 5)
    for cuts in (["layers.1"], iter(["layers.1"])):
        inner = SplitPipe(Stack(), cuts=cuts)
        assert inner.cuts == ["layers.1"] and inner.chunks == 8


@pytest.mark.parametrize(("schedule", "devices", "stages", "chunks"),
                         [("1f1b", None, 2, 8), ("zb-v", None, 4, 8), ("interleaved-1f1b", ["cpu"] * 2, 4, 8),
                          (build("zb-h1", 3, 5), None, 3, 5)],
                         ids=["1f1b", "zb-v", "interleaved", "given"])
def test_a_schedule_says_how_many_stages_there_are(schedule: Any, devices: Any, stages: int, chunks: int) -> None:
    model = SplitPipe(layers(6), devices=devices, schedule=schedule, loss_fn=nn.functional.mse_loss)
    assert len(model.balance) == len(model.devices) == stages
    assert model.chunks == chunks
    x = torch.randn(10, 4)
    model(x, target=x).backward()


def test_with_fewer_layers_than_devices_some_are_left_out() -> None:
    assert SplitPipe(layers(2), devices=["cpu"] * 3).balance == [1, 1]
    with pytest.raises(ValueError, match="the model has 2 stages for 3 devices: schedule '1f1b' expects"):
        SplitPipe(layers(2), devices=["cpu"] * 3, schedule="1f1b", loss_fn=nn.functional.mse_loss)


SAMPLES = pytest.mark.parametrize("sample", few(1, [(torch.zeros(4, 4),), torch.zeros(4, 4)]),
                                  ids=["the arguments", "a tensor"])


@SAMPLES
def test_a_sample_has_stages_take_the_same_time(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balances, "measure", lambda *_, **__: [Layer(9, 9, 9), *[Layer(1, 1, 1)] * 5])
    assert SplitPipe(layers(6), sample=sample).balance == [1, 5]


@SAMPLES
@pytest.mark.parametrize(("make", "cuts"), [
    (Stack, r"layers\.[123]|last"),  # Which of them, a loaded machine may measure in any way.
    (lambda: layers(2), "1"),
])
def test_a_sample_of_a_module_gives_cuts_by_time(make: Any, cuts: str, sample: Any, said: list[str]) -> None:
    splitpipe.attach(make(), sample=sample)
    assert re.match(rf"chosen: cuts=\['({cuts})'\]", said[0])


def test_unequal_devices_get_unequal_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch, 3e6)  # Both names are one device: halves of its memory.
    assert SplitPipe(layers(6), devices=["cpu", "cpu"]).balance == [3, 3]
    sizes = {"meta": 2e6, "cpu": 1e6}
    monkeypatch.setattr(balances, "memory_of", lambda device, module: sizes[device.type])
    found, _ = balances._by_bytes(layers(6), [Place(torch.device("meta")), Place(CPU)], list("012345"))
    assert found == ["4"]


def test_a_model_that_devices_cant_hold_is_an_error_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    before = dict(vars(model))
    weights = sum(x.nbytes for x in model.parameters())
    roomy(monkeypatch, weights * .9)
    with pytest.raises(ValueError, match=r"weights take 0\.0 GiB, and.*don't have enough free memory.*fewer bits"):
        splitpipe.attach(model, devices=["cpu", "cpu"])
    assert vars(model) == before


def test_devices_and_cuts_are_those_of_the_map_that_a_model_was_loaded_by() -> None:
    # Devices that are not there are an error of theirs: the map was looked at.
    model = Stack()
    model.hf_device_map = {"layers.0": "cuda:7", "layers.1": "cuda:7", "layers.2": "cuda:9", "layers.3": "cuda:9"}
    with pytest.raises(ValueError, match="index=7"):
        splitpipe.attach(model)
    with pytest.raises(ValueError, match="index=7"):
        splitpipe.attach(model, cuts=["layers.1"])
    splitpipe.attach(model, cuts=["layers.1", "layers.2"])  # Three stages: not those of the map.
    splitpipe.detach(model)
    assert len(model.hf_device_map) == 4
    splitpipe.attach(model, devices=["cpu", "cpu"])


def test_a_map_to_load_by() -> None:
    with torch.device("meta"):
        model = Stack()
    found = splitpipe.device_map(model, ["cpu", "cpu"])
    assert set(found.values()) == {CPU}
    for name, _ in model.named_parameters():
        assert any(name == own or name.startswith(own + ".") for own in found)
