"""What can't be right in microbatches, or in stages with graphs of their own, is refused, never silently wrong."""
from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.engine.module import ModuleForward
from tests.helpers.covering import pairwise
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import assert_same, stages
from tests.promise.forwards import CUTS, Net, layered
from tests.promise.layers import Apply


def late(net: Net, x: Tensor) -> Tensor:
    """The whole is used a stage after that which has written to a view of it."""
    a, b, c, d, e = net.blocks
    h = b(a(x)) * 1
    view = h[:, :2]
    y = d(c(x))
    view.mul_(y[:, :2].sigmoid())
    return e(y) + view.sum(1, keepdim=True) + h  # type: ignore[no-any-return]


def remade(net: Net, x: Tensor) -> Tensor:
    """Of a view autograd makes the node again when it is next asked for, in another stage here."""
    a, b, c, d, e = net.blocks
    h = b(a(x))
    y = d(c(h + 1))
    view = h[:, :2]
    h.mul_(2)
    return e(y) + view.sum(1, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("forward", [late, remade])
def test_what_stages_would_mix_is_an_error_each_time(forward: Callable[[Net, Tensor], Any], schedule: str) -> None:
    model = SplitPipe(Net(forward), cuts=CUTS, devices=["cpu"] * 3, chunks=2,
                      **inside({"schedule": schedule, "checkpoint": "never"}))
    state = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was written to in place"):
            loss_of(model, torch.randn(8, 4)).backward()
    assert_same(dict(model.state_dict()), dict(state), "state")


def tied(net: Net, x: Tensor) -> Tensor:
    """Differentiates to a weight that an earlier stage has used, too: its part would be lost."""
    a, b, c, d, e = net.blocks
    y: Tensor = d(c(b(a(x)))) @ a.weight  # type: ignore[operator]
    return y + torch.autograd.grad(y.sum(), a.weight, create_graph=True)[0].sum()  # type: ignore[arg-type]


def test_a_derivative_to_a_parameter_between_blocks_of_a_later_stage_is_refused() -> None:
    model = SplitPipe(Net(tied), cuts=CUTS, devices=["cpu"] * 3, chunks=2, checkpoint="never")
    with pytest.raises(RuntimeError, match="to a parameter or a value of an earlier stage"):
        model(torch.randn(8, 4))


def test_a_split_point_is_looked_at_when_earlier_microbatches_have_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(self: ModuleForward, *args: Any, name: str, call: Any) -> None:
        order[self.i].append(name)
        call(self, *args)

    order: dict[int, list[str]] = {0: [], 1: []}
    for name in ("advance", "_verify_split_point"):
        monkeypatch.setattr(ModuleForward, name, partialmethod(called, name=name, call=getattr(ModuleForward, name)))
    SplitPipe(Net(lambda net, x: net.blocks[2](net.blocks[0](x))), cuts=CUTS[:1], devices=["cpu"] * 2, chunks=2)(
        torch.rand(4, 4))
    assert order == dict.fromkeys(order, ["advance", "_verify_split_point", "advance"])


#: A container of a tensor, and what a block does to it.
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], object]]] = {
    "list": (lambda x: [x * 2], lambda kept, y: kept.append(y)),
    "replaced": (lambda x: [x * 2], lambda kept, y: kept.__setitem__(0, kept[0] + y)),
    "dict": (lambda x: {"inner": {"of": [(x, None)]}}, lambda names, y: names["inner"]["of"].append((y, None))),
    "deque": (lambda x: deque([x, x * 2]), lambda given, y: given.append(y)),
}


@pairwise(kind=[*CONTAINERS], schedule=["gpipe", "1f1b", "zb-h1"], checkpoint=["never", "always"])
def test_a_block_that_changes_a_container_on_a_later_stage_or_checkpointed_is_an_error(kind, schedule, checkpoint):
    make, change = CONTAINERS[kind]

    def changing(self: Any, x: Tensor, given: Any) -> Tensor:
        y: Tensor = self.layer(x).tanh()
        change(given, y)
        return y

    def giving(net: Net, x: Tensor) -> Tensor:
        given = make(net.blocks[0].layer(x))  # type: ignore[union-attr, operator]
        for block in net.blocks:
            x = block(x, given)
        return x

    model = SplitPipe(Net(giving, layered(changing)), cuts=CUTS, devices=["cpu"] * 3, chunks=2,
                      **inside({"schedule": schedule, "checkpoint": checkpoint}))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a block changed a list or dict that it was given"):
            loss_of(model, torch.randn(6, 4))


@pytest.mark.parametrize("options", [
    {}, {"chunks": 1}, {"backward": "autograd"}, {"schedule": "1f1b", "loss_fn": nn.MSELoss()},
], ids=["split", "one microbatch", "autograd", "1f1b"])
def test_a_write_to_memory_that_arguments_share_is_an_error(options: dict[str, Any]) -> None:
    """Autograd would know of it; microbatches are tensors of their own."""
    writes = [True]

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if writes[0]:
            x.mul_(2)
        return self.two(self.one(x)) + y.sum(1, keepdim=True)  # type: ignore[no-any-return]

    def batch() -> Tensor:
        return torch.randn(6, 4, requires_grad=True) * 1

    model = SplitPipe(module_of(forward, **linears("one", "two")), cuts=["two"], devices=["cpu"] * 2,
                      **{"chunks": 3, "checkpoint": "never", **options})
    target = {"target": torch.randn(6, 4)} if "loss_fn" in options else {}
    for own in (lambda x: x, Tensor.detach):
        with pytest.raises(RuntimeError, match="an argument, was written to in place, and another value from there"):
            model(x := batch(), own(x)[:, :2], **target)
    model(batch(), batch()[:, :2], **target).sum().backward()
    writes[0] = False
    model(x := batch(), x[:, :2], **target).sum().backward()


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("by", ["balance", "cuts"])
@pytest.mark.filterwarnings("ignore:the forward left '1.loss'")
def test_a_loss_that_a_layer_keeps_and_code_outside_adds_is_an_error(by: str, checkpoint: str) -> None:
    def keeping(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        kept.append(y.softmax(-1).square().mean())
        return y.tanh()

    kept: list[Tensor] = []
    layers = nn.Sequential(nn.Linear(4, 4), module_of(keeping, **linears("layer")), nn.Linear(4, 4))
    module, where = stages(layers, [1, 2], by)
    model = SplitPipe(module, devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint, **where)
    for _ in range(2):
        kept.clear()
        loss = model(torch.rand(4, 4)).sum() + sum(kept)
        with pytest.raises(RuntimeError, match="a path that the pipeline doesn't know|through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("options", [
    {}, {"checkpoint": "always"}, {"schedule": "zb-h1"}, {"schedule": "zb-h1", "checkpoint": "always"}], ids=str)
def test_a_gradient_through_an_object_between_stages_is_an_error(options: dict[str, Any]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: ((y := x * 2) * 1, SimpleNamespace(x=y))),
                           Apply(lambda given: given[0] + given[1].x))
    plain, x = copy.deepcopy(layers), torch.randn(6, 4)
    model = SplitPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=2, **inside(options))
    with pytest.raises(RuntimeError, match="a path that the pipeline doesn't know|microbatches share a part"):
        loss_of(model, x).backward()
    model.zero_grad()
    for each in (nn.Sequential(*model), plain):
        loss_of(each, x).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")
