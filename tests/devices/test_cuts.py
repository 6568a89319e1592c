"""Modules with cuts on several devices: gradients, what is refused, what a call leaves behind."""
from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices.cut import BOTH, DEVICES, batch, trained, wrapped
from tests.devices.modules import Carried, Module, Of, Tied, recomputing, spread
from tests.gpu.checks import assert_same_gradients

pytestmark = [pytest.mark.cuda, pytest.mark.devices(4), pytest.mark.thorough]


def weighed(net: Of, x: Tensor, weight: Tensor) -> Tensor:
    """The last stage alone uses the second argument."""
    for block in net.blocks:
        x = block(x)
    return x * weight


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


def sometimes(net: Of, x: Tensor) -> dict[str, Tensor]:
    """Calls its last block for some microbatches alone."""
    through, x = x.cpu()[0, 0] > 0, net.blocks[1](net.blocks[0](x))
    if through:
        x = net.blocks[2](x)
    return {"y": x, "loss": x.square().mean()}


@pytest.mark.filterwarnings("ignore:the loss")  # A condition of a microbatch may be another one for the batch.
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


def test_a_backward_of_a_retained_graph_has_no_gradients_of_an_earlier_one() -> None:
    plain = Of(spread)
    model = wrapped(copy.deepcopy(plain))
    for net, given in (plain, batch().cpu()), (model, batch()):
        for output in net(given):
            output.sum().backward(retain_graph=True)
    assert_same_gradients(model, plain)


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
    (Of(writing, count=torch.zeros(1)), "which is on cuda:0, was written to by a stage on cuda:1"),
    (Of(aliased), "another value from there shares its memory"),
    (Of(partial(recomputing, chance=0.5)), r"stage 1 \(cuda:1\) begins inside torch.utils.checkpoint"),
], ids=["a buffer written to elsewhere", "a view of what is written to", "a checkpoint that draws behind a border"])
def test_it_is_refused(module: Module, text: str, way: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=text):
        trained(wrapped(copy.deepcopy(module), checkpoint="never", **way))


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
