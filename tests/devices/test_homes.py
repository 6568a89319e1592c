"""Modules with cuts on several devices: where parameters and buffers live, also after moves and in copies."""
from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe
from tests.devices.cut import BOTH, DEVICES, batch, homes, trained, wrapped
from tests.devices.log import failing
from tests.devices.modules import WIDTH, Carried, Of, Tied, cuts
from tests.gpu.checks import assert_same_gradients

pytestmark = [pytest.mark.cuda, pytest.mark.devices(4), pytest.mark.thorough]


def counting(net: Any, x: Tensor) -> Tensor:
    """Draws, counts, notes."""
    net.calls, net.made = net.calls + 1, nn.Buffer(torch.rand(1))
    net.seen.add_(net.training)
    for block in net.blocks:
        x = F.dropout(block(x), 0.5)
    return x


def sequential() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


@pytest.mark.draws
def test_a_sample_leaves_no_trace() -> None:
    module = Of(counting, seen=torch.zeros(1))
    module.calls = 0
    before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, DEVICES)]
    state = copy.deepcopy(module.state_dict())
    model = wrapped(module, sample=batch())
    after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, DEVICES)]
    assert all(map(torch.equal, before, after))
    assert module.calls == 0 and not hasattr(module, "made")
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(x.cpu(), state[name]) for name, x in model.state_dict().items())
    assert homes(model) == {
        name: DEVICES[int(name.split(".")[1]) if name.startswith("blocks") else 0] for name in homes(model)
    }


@BOTH
def test_an_optimizer_made_before_the_first_call_keeps_its_parameters(way: dict[str, Any]) -> None:
    model = wrapped(Tied(3), **way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [*model.parameters()]
    trained(model)
    weight = model.last.weight.clone()
    optimizer.step()
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert model.last.weight is model.blocks[0].layer.weight and not torch.equal(model.last.weight, weight)


@pytest.mark.fake
def test_a_placement_without_memory_is_gone_on_with() -> None:
    def made() -> SplitPipe:
        return wrapped(Carried(2), cuts=cuts(2), devices=DEVICES[:2])

    expected = made()
    trained(expected)
    for number in itertools.count(2, 2):  # Every second allocation.
        model = made()
        model.load_state_dict(expected.state_dict())
        if failing(number, lambda model=model: trained(model)) is None:
            break
        model.zero_grad()
        trained(model)
        assert homes(model) == homes(expected)
        assert_same_gradients(model, expected)


def test_an_attached_module_stays_where_it_is() -> None:
    model = splitpipe.attach(Tied(3), cuts(3), devices=DEVICES)
    for called in False, True:
        before = homes(model)
        with pytest.warns(UserWarning, match=r"a pipeline, whose stages stay on cuda:0, .*: expected no .to\(device\)"):
            assert homes(model.cuda()) == before
        nn.ModuleList([model]).cuda()
        assert homes(model) == before and (called or torch.equal(first := model(batch()), first))
    told = {name: str(device) for name, device in model.hf_device_map.items()}
    assert told == {f"blocks.{stage}": device for stage, device in enumerate(DEVICES)} | {
        "last": DEVICES[2], "last.weight": DEVICES[0]}
    splitpipe.attach(model, cuts(3), devices=[DEVICES[0]] * 3).to(DEVICES[0])
    assert {*homes(model).values()} == {DEVICES[0]}
    with pytest.warns(UserWarning, match="a pipeline, whose stages stay"):
        assert torch.equal(model.cpu()(batch()), first.to(DEVICES[0]))


def saved(value: Any, **options: Any) -> Any:
    """What a file has of it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("called", [False, True])
def test_copies_pickles_and_states_are_whole(called: bool) -> None:
    model = wrapped(Tied(3))
    if called:
        trained(model)
        model.zero_grad()
    others = [copy.deepcopy(model), saved(model, weights_only=False)]
    for where in None, "cpu", "cuda:3":
        state = saved(model.state_dict(), map_location=where)
        assert where is None or {x.device for x in state.values()} == {torch.device(where)}
        others.append(wrapped(Tied(3)))
        others[-1].load_state_dict(state)
    for other in others:
        assert torch.equal(other(batch()), model(batch())) and homes(other) == homes(model)
        assert other.last.weight is other.blocks[0].layer.weight
        trained(other)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "cuda:1", None])
def test_what_is_detached_goes_to_one_device_or_stays(device: str | None) -> None:
    for model in (SplitPipe(sequential(), [2, 1, 2], devices=DEVICES), wrapped(Tied(3)),
                  splitpipe.attach(Tied(3), cuts(3), devices=DEVICES)):
        with torch.no_grad():  # Torch swaps tensors of such devices, and none that a graph has.
            expected = model(batch())
        before, tensors = homes(model), [*model.parameters()]
        plain = splitpipe.detach(model, device=device)
        assert homes(plain) == (before if device is None else dict.fromkeys(before, device))
        assert all(one is other for one, other in zip(plain.parameters(), tensors, strict=True))
        if device is not None:
            torch.testing.assert_close(plain(batch().to(device)).cpu(), expected.cpu())
