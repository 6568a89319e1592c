"""Where a module is cut that nobody has measured, and on which devices; models that accelerate has spread by hooks."""
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe
from splitpipe.partition.by_bytes import cuts_of_map, memory_of, parts_of
from tests.engine.models import Stack
from tests.helpers.modules import linears, module_of

A, B, C = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class Model(nn.Module):
    """An embedding, four layers, and a head that is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(("devices", "cuts", "found"), [
    ({"embed": A, "layers.0": A, "layers.1": A, "layers.2": B, "layers.3": B, "norm": B, "head": B},
     ["layers.2"], [A, B]),
    ({"embed": A, "layers.0": A, "layers.1": B, "layers.2": B, "layers.3": C, "norm": C, "head": A},
     ["layers.1", "layers.3"], [A, B, C]),  # A head that is tied goes back to the embedding.
    ({"embed": A, "layers": B, "norm": B, "head": B}, ["layers.0"], [A, B]),  # A list is never called.
    ({"layers.2": B, "embed.weight": B, "embed": A}, ["layers.2"], [A, B]),
    ({"": A}, [], []),
], ids=["halves", "back", "list", "order", "one"])
def test_a_stage_begins_where_the_map_has_a_new_device(devices, cuts, found):
    model = Model()
    model.hf_device_map = devices  # type: ignore[assignment]
    assert cuts_of_map(model) == (cuts, found)


def two_devices(test: Any) -> Any:
    """Marks a test that needs two CUDA devices."""
    return pytest.mark.cuda(pytest.mark.devices(2)(test))


def spread(model: nn.Module, devices: dict[str, int]) -> nn.Module:
    """The model with its blocks on these devices, and the map that says so."""
    for name, device in reversed(devices.items()):  # A tied weight is where its first name is.
        model.get_submodule(name).to(f"cuda:{device}")
    model.hf_device_map = devices  # type: ignore[assignment]
    return model


@two_devices
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_model_that_was_spread_trains_where_its_weights_are(checkpoint: str) -> None:
    plain, x = Stack(), torch.randn(6, 4)
    loss = plain(x)["y"].square().mean()
    loss.backward()
    model = Stack()
    model.load_state_dict(plain.state_dict())
    # Device 1 comes first, as where a display has memory of device 0.
    spread(model, {"first": 1, "layers.0": 1, "layers.1": 1, "layers.2": 0, "layers.3": 0, "last": 0})
    where = {name: (p.device, p.data_ptr()) for name, p in model.named_parameters()}
    splitpipe.attach(model, checkpoint=checkpoint)  # type: ignore[arg-type]
    for _ in range(2):
        model.zero_grad()
        again = model(x)["y"].square().mean()  # x comes from the CPU, as from a DataLoader.
        again.backward()
    torch.testing.assert_close(again.cpu(), loss)
    for mine, its in zip(model.parameters(), plain.parameters()):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), its.grad)
    assert {name: (p.device, p.data_ptr()) for name, p in model.named_parameters()} == where
    assert vars(model)["forward"].runtime.options.cuts == ("layers.2",)


@two_devices
def test_a_tied_head_is_loaded_to_the_device_of_its_weight() -> None:
    with torch.device("meta"):
        model = Stack()
    assert model.last.weight is model.first.weight
    found = splitpipe.device_map(model, ["cuda:0", "cuda:1"])
    assert found["layers.3"] == torch.device("cuda:1") and found["last"] == found["first"] == torch.device("cuda:0")
    assert set(found) == {"first", *(f"layers.{k}" for k in range(4)), "last"}


@two_devices
def test_a_device_with_less_memory_free_gets_less() -> None:
    layers = [nn.Linear(64, 64) for _ in range(12)]
    rooms = [memory_of(torch.device("cuda", index), nn.Sequential(*layers)) or 0 for index in range(2)]
    taken = torch.empty(int(rooms[1] * .5), dtype=torch.uint8, device="cuda:1")
    found = SplitPipe(nn.Sequential(*layers), devices=["cuda:0", "cuda:1"]).balance
    assert found == [8, 4]
    del taken
    torch.cuda.empty_cache()


class AlignDevicesHook:
    """Counts its calls, and has accelerate's name."""

    calls = 0

    def forward(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, as accelerate calls it."""
        self.calls += 1
        return part._old_forward(*args, **kwargs)  # type: ignore[operator]


def dispatched() -> tuple[nn.Module, dict[str, AlignDevicesHook]]:
    """A model whose blocks have hooks, and these."""
    model, hooks = Stack(), {}
    for name, part in model.named_modules():
        if name.count(".") == 1 or not name:
            hooks[name] = hook = AlignDevicesHook()
            vars(part).update(_hf_hook=hook, _old_forward=part.forward)
            vars(part)["forward"] = partial(hook.forward, part)
    return model, hooks


def test_hooks_are_taken_off_and_come_back() -> None:
    model, hooks = dispatched()
    x = torch.randn(4, 4)
    expected, before = model(x)["y"], {name: dict(vars(part)) for name, part in model.named_modules()}
    for hook in hooks.values():
        hook.calls = 0
    model.hf_device_map = {"layers.0": "cpu"}  # type: ignore[assignment]

    for cut in ("layers.1", "layers.2"):  # Attached again, it keeps the hooks for detach.
        splitpipe.attach(model, cuts=[cut], devices=["cpu", "cpu"], chunks=2)
    torch.testing.assert_close(model(x)["y"], expected)
    assert not any(hook.calls for hook in hooks.values())

    splitpipe.detach(model)
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == {
        name: {**own, "hf_device_map": {"layers.0": "cpu"}} if not name else own for name, own in before.items()
    }
    torch.testing.assert_close(model(x)["y"], expected)
    assert all(hook.calls == 1 for hook in hooks.values())


def test_a_sample_that_fails_leaves_hooks_where_they_were() -> None:
    model, _ = dispatched()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        splitpipe.attach(model, cuts=["layers.2"], devices=["cpu", "cpu"], sample=(torch.randn(4, 5),))
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before


def test_offloaded_parts_are_an_error_that_names_them() -> None:
    model, _ = dispatched()
    model.layers[2].to("meta")  # type: ignore[index, operator]
    model.hf_device_map = {"layers.0": 0, "layers.2": "disk"}  # type: ignore[assignment]
    before = dict(vars(model))
    for given in ({}, {"cuts": ["layers.2"], "devices": ["cpu", "cpu"]}):
        with pytest.raises(ValueError, match=r"'layers\.2\..* are on meta and have no data.*without device_map"):
            splitpipe.attach(model, **given)  # type: ignore[arg-type]
    assert vars(model) == before


def test_a_hook_of_another_kind_stays() -> None:
    class Other(AlignDevicesHook):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hook = Other()
    vars(model[0]).update(_hf_hook=hook, _old_forward=model[0].forward)
    vars(model[0])["forward"] = partial(hook.forward, model[0])
    splitpipe.attach(model, cuts=["1"], devices=["cpu", "cpu"], chunks=2)
    y: Tensor = model(torch.randn(4, 4))
    assert y.shape == (4, 4) and hook.calls


def test_a_sample_is_not_written_to_and_a_tied_weight_counts_once() -> None:
    given, net = torch.ones(4, 4), module_of(lambda net, x: net.b(net.a(x.mul_(2))), **linears("a", "b"))
    SplitPipe(net, cuts=["b"], devices=["cpu"] * 2, chunks=2, sample=given)
    assert torch.equal(given, torch.ones(4, 4))
    net.b.weight = net.a.weight
    assert [part.weights for part in parts_of(nn.Sequential(net.a, net.b), ["1"])] == [80, 16]
