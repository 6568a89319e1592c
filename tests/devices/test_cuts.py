"""Modules with cuts on several devices: gradients, what is refused, what a call leaves behind."""
from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe.engine.run import CodeRun
from tests.devices.cut import BOTH, DEVICES, batch, trained, wrapped
from tests.devices.modules import WIDTH, Carried, Module, Of, Tied, recomputing
from tests.devices.subjects import mean
from tests.engine import test_parts as parts
from tests.gpu.checks import assert_same_gradients
from tests.helpers.twin import Note

pytestmark = [pytest.mark.cuda, pytest.mark.devices(4), pytest.mark.thorough]
ENGINES = pytest.mark.parametrize("backward", ["split", "autograd"])
CHECKPOINT = pytest.mark.parametrize("checkpoint", ["never", "always"])


def weighed(net: Of, x: Tensor, weight: Tensor) -> Tensor:
    """The last stage alone uses the second argument."""
    for block in net.blocks:
        x = block(x)
    return x * weight


@BOTH
@pytest.mark.parametrize(
    ("first", "second"), [*(("cuda:0", it) for it in DEVICES), ("cpu", "cpu"), ("cuda:3", "cuda:3")]
)
def test_arguments_may_be_on_a_later_stages_device_or_all_on_none_of_the_stages(
    first: str, second: str, way: dict[str, Any]
) -> None:
    plain = Of(weighed)
    model = wrapped(copy.deepcopy(plain), **way)
    # What is on a later stage's device may have no graph there.
    given = [torch.rand(4, WIDTH, requires_grad=True), torch.rand(4, WIDTH, requires_grad=first == second)]
    mean(plain(*given), 1.0).backward()
    own = [x.detach().to(device).requires_grad_(x.requires_grad) for x, device in zip(given, (first, second))]
    for _ in range(2):  # In the first call parameters go to their devices.
        for leaf in (*own, *model.parameters()):
            leaf.grad = None
        trained(model, *own, target=DEVICES[-1] if first == "cuda:0" else first)
    assert_same_gradients(model, plain)
    for leaf, other in zip(own, given):
        assert leaf.grad is None or leaf.grad.device == leaf.device
        torch.testing.assert_close(leaf.grad, other.grad, check_device=False)


def test_beside_others_a_tensor_on_the_cpu_stays() -> None:
    seen = []

    def lengths(net: Of, x: Tensor, lengths: Tensor) -> Tensor:
        seen.append(lengths.device.type)
        return weighed(net, x, torch.ones((), device=DEVICES[-1]))

    model = wrapped(Of(lengths))
    for device, where in ("cuda:0", "cpu"), ("cuda:3", "cpu"), ("cpu", "cuda"):
        seen.clear()
        assert str(model(batch().to(device), torch.ones(4)).device) == DEVICES[-1]
        assert {*seen} == {where}, device


def test_without_gradients_it_is_the_same() -> None:
    model = wrapped(Carried(3))
    for mode in torch.no_grad, torch.enable_grad:
        with mode():
            out = model(batch())
        with torch.no_grad():
            assert torch.equal(out.detach(), model(batch()))
    model.eval()
    assert torch.equal(out, model(batch()))


@BOTH
def test_a_parameter_of_several_stages_on_streams_is_an_error(way: dict[str, Any]) -> None:
    devices = [torch.Stream(device=f"cuda:{index // 2}") for index in range(3)]
    model = wrapped(Tied(3), **{**way, "devices": devices})
    with pytest.raises(ValueError, match=r"layer.weight' is used by stages 0 and 2, and devices names streams: with"):
        trained(model)


class Last(Module):
    """Code of the last stage uses a parameter of the module itself, which the first stage calls."""

    def __init__(self) -> None:
        super().__init__(3)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


@BOTH
def test_a_parameter_that_one_stage_uses_may_be_any_modules(way: dict[str, Any]) -> None:
    plain, devices = Last(), [torch.Stream(device="cuda:0") for _ in range(3)]
    model = wrapped(copy.deepcopy(plain), **{**way, "devices": devices})
    mean(plain(batch().cpu()), 1.0).backward()
    for _ in range(2):
        model.zero_grad()
        trained(model, target="cuda:0")
    assert_same_gradients(model, plain)


def sometimes(net: Of, x: Tensor) -> dict[str, Tensor]:
    """Calls its last block for some microbatches alone."""
    through, x = x.cpu()[0, 0] > 0, net.blocks[1](net.blocks[0](x))
    if through:
        x = net.blocks[2](x)
    return {"y": x, "loss": x.square().mean()}


@pytest.mark.parametrize("way", [{}, {"schedule": "1f1b"}], ids=["drop-in", "1f1b"])
def test_a_stage_that_some_microbatches_do_not_come_to_is_joined_all_the_same(way: dict[str, Any]) -> None:
    given, plain = batch(), Of(sometimes)
    model = wrapped(copy.deepcopy(plain), **way)
    found, each = model(given), [plain(x.cpu()) for x in given.chunk(2)]
    loss = torch.stack([part["loss"] for part in each]).mean()
    torch.testing.assert_close(found["y"].cpu(), torch.cat([part["y"] for part in each]))
    torch.testing.assert_close(found["loss"].cpu(), loss)
    loss.backward(), found["loss"].backward()
    assert_same_gradients(model, plain)


def summing(net: Of, x: Tensor) -> Tensor:
    """Code of every stage gives the buffer another value, on its own device."""
    for block in net.blocks:
        net.sums = net.sums + x.detach().sum(0)
        x = block(x)
    return x


@BOTH
def test_a_buffer_that_several_devices_give_a_value_loses_none(way: dict[str, Any]) -> None:
    plain, x = Of(summing, sums=torch.zeros(WIDTH)), batch().cpu()
    model = wrapped(copy.deepcopy(plain), **way)
    for _ in range(4):
        plain(x)
        trained(model)
    assert model._runtime._homes.in_turn  # Side by side a value is lost by chance alone.
    torch.testing.assert_close(model.sums.cpu(), plain.sums)


def writing(net: Of, x: Tensor) -> Tensor:
    """Every stage writes to the first one's buffer."""
    for block in net.blocks:
        x = block(x)
        net.count += 1
    return x


def aliased(net: Of, x: Tensor) -> Tensor:
    """Writes on a later stage to a value of which that stage has a view."""
    whole = x.sin()
    part = whole[:, :4]
    x = net.blocks[1](net.blocks[0](x))
    seen = part * 2
    whole.add_(1)
    return net.blocks[2](x) + seen.sum() + whole.sum()


@BOTH
@pytest.mark.parametrize(("module", "text"), [
    (Of(writing, count=torch.zeros(1)), "'count', which is on cuda:0, was written to by a stage on cuda:1"),
    (Of(aliased), "another value from there shares its memory"),
    (Of(partial(recomputing, chance=0.5)), r"stage 1 \(cuda:1\) begins inside torch.utils.checkpoint"),
], ids=["a buffer written to elsewhere", "a view of what is written to", "a checkpoint that draws behind a border"])
def test_it_is_refused(module: Module, text: str, way: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=text):
        trained(wrapped(copy.deepcopy(module), checkpoint="never", **way))


def test_a_graph_on_a_later_stages_device_is_refused() -> None:
    later = torch.ones(2, WIDTH, device=DEVICES[-1], requires_grad=True) * 2
    model = wrapped(Of(lambda net, x, weight: weighed(net, x * later, weight)), schedule="1f1b", loss_fn=mean)
    with pytest.raises(RuntimeError, match="with a graph on the device"):
        trained(model, batch(), torch.ones(4, 1, device=DEVICES[-1]))


@BOTH
@ENGINES
@CHECKPOINT
def test_a_tied_weight_is_copied_once_a_call_and_device(
    checkpoint: str, backward: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copied = wrapped(Tied(3), backward=backward, checkpoint=checkpoint, **way), list[int]()
    trained(model)
    copies = CodeRun.copied

    def counting(self: CodeRun, x: Tensor, stage: int, copy: Any) -> Tensor:
        return copies(self, x, stage, lambda x: (copied.append(id(x)), copy(x))[1])

    monkeypatch.setattr(CodeRun, "copied", counting)
    trained(model)
    layer = model.blocks[0].layer
    assert sorted(copied) == sorted([id(layer.weight), id(layer.bias)])


def allocated() -> list[int]:
    """Bytes on each device. Autograd's thread of each may hold something of the last pass until its next."""
    for device in DEVICES:
        torch.ones(1, device=device, requires_grad=True).sum().backward()
    return [torch.cuda.memory_allocated(device) for device in DEVICES]


@BOTH
def test_neither_a_call_nor_a_model_that_is_let_go_of_leaves_memory_behind(way: dict[str, Any]) -> None:
    gc.collect()  # Calls that have failed before left their tracebacks.
    gc.disable()
    try:
        for make in Tied, Carried:
            before = allocated()
            model, found = wrapped(make(3), **way), []
            for _ in range(4):
                trained(model)
                model.zero_grad()
                found.append(allocated())
            assert found[1:] == found[:-1] and found[0] != before
            del model
            assert allocated() == before
    finally:
        gc.enable()


@ENGINES
@CHECKPOINT
@pytest.mark.parametrize("devices", [DEVICES, ["cuda:0"] * 3, ["cpu"] * 3], ids=["three", "one", "cpu"])
def test_a_device_goes_backward_through_one_microbatch_after_another(
    devices: list[str], checkpoint: str, backward: str
) -> None:
    log: list[tuple[int, int]] = []

    def noted(net: Of, x: Tensor) -> Tensor:
        number = int(x[0, 0].detach().cpu())
        for stage, block in enumerate(net.blocks):
            x = block(x)
            for _ in range(3):
                x = Note.apply(x * 2, log, (stage, number))
        return x

    x = torch.arange(4.0).reshape(4, 1).expand(4, WIDTH).to(devices[0])
    model = wrapped(Of(noted), chunks=4, devices=devices, checkpoint=checkpoint, backward=backward)
    for _ in range(2):
        log.clear()
        mean(model(x), 1.0).backward()
        for stage in range(3):
            assert [number for at, number in log if at == stage] == [3] * 3 + [2] * 3 + [1] * 3 + [0] * 3


def used_by_all(net: parts.Net, x: Tensor) -> Tensor:
    """Copies of a weight, and the weight itself."""
    for block in net.blocks:
        x = block(x).tanh() + net.held.scale
    return x


@pytest.mark.parametrize("forward", [
    parts.through, parts.skips, parts.several, parts.given_again, parts.between, parts.in_place, parts.hooked,
    parts.without, parts.views, parts.one_weight, parts.forces, parts.remade, parts.scaled, used_by_all,
])
def test_the_parts_of_a_graph_have_the_modules_gradients(forward: parts.Forward) -> None:
    ways: list[dict[str, Any]] = [
        {}, {"chunks": 1}, {"checkpoint": "except_last"}, {"backward": "autograd"},
        {"devices": ["cuda:0", "cuda:1", "cuda:0"]}, {"devices": ["cuda:0", "cuda:1", "cuda:1"]},
    ]
    for options in ways:
        if forward is parts.forces and "checkpoint" in options:  # It differentiates through its blocks.
            continue
        plain, model = parts.pair(forward, **{"devices": DEVICES, **options})
        plain.to(DEVICES[0])
        for device in DEVICES[:2] * 2:
            x = parts.rows()
            torch.testing.assert_close(step(model, x.to(device)), step(plain, x.to(DEVICES[0])))
            assert_same_gradients(model, plain)


def step(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the input."""
    module.zero_grad()
    made = module(x.requires_grad_())
    loss = torch.stack([y.square().sum().to(DEVICES[0]) for y in ([made] if isinstance(made, Tensor) else made)]).sum()
    loss.backward()
    return loss.detach().cpu(), x.grad.cpu()
