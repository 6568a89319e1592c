"""What can't be right in microbatches, or in stages with graphs of their own, is refused, never silently wrong."""
from __future__ import annotations

import copy
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

from splitpipe import SplitPipe
from splitpipe.balance import balance_by_time
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


def replaced(net: Net, x: Tensor) -> Tensor:
    """Calls a block with other weights."""
    weights = {name: 2 * x for name, x in net.blocks[2].named_parameters()}
    y = net.blocks[1](net.blocks[0](x))
    y = torch.func.functional_call(net.blocks[2], weights, (y,))
    return net.blocks[4](net.blocks[3](y))  # type: ignore[no-any-return]


def overwritten(net: Net, x: Tensor) -> Tensor:
    """Writes to what a checkpointed block was given."""
    a, b, c, d, e = net.blocks
    x = a(x) * 1
    y = b(x)
    x.mul_(2)
    return e(d(c(y + x)))  # type: ignore[no-any-return]


def penalised(net: Net, x: Tensor) -> Tensor:
    """Differentiates through a block of the same stage."""
    a, b, c, d, e = net.blocks
    h = a(x) * 1
    y = b(h)
    [grad] = torch.autograd.grad(y.square().sum(), h, create_graph=True)
    return e(d(c(y + grad)))  # type: ignore[no-any-return]


#: A forward; the error and its words; whether its blocks are checkpointed.
FORWARDS: dict[str, tuple[Callable[[Net, Tensor], Any], type[Exception], str, str]] = {
    **{each.__name__: (each, RuntimeError, "was written to in place", "never") for each in (late, remade)},
    "replaced": (replaced, ValueError, "was called while other tensors replace its parameters", "never"),
    "overwritten": (overwritten, RuntimeError, "was written to in place after its forward", "always"),
    "penalised": (penalised, RuntimeError, "was run backward before its stage was.*checkpoint='never'", "always"),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", FORWARDS)
def test_what_stages_would_mix_or_lose_is_an_error_each_time(name: str, schedule: str) -> None:
    forward, error, words, checkpoint = FORWARDS[name]
    model = SplitPipe(Net(forward), cuts=CUTS, devices=["cpu"] * 3, chunks=2,
                      **inside({"schedule": schedule, "checkpoint": checkpoint}))
    state = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(error, match=words):
            loss_of(model, torch.randn(8, 4)).backward()
    assert_same(dict(model.state_dict()), dict(state), "state")


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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_weights_that_microbatches_have_in_common_are_an_error_that_names_the_way_out(by: str, schedule: str) -> None:
    layers = nn.Sequential(*[parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(3)])
    module, where = stages(layers, [2, 1], by)
    model = SplitPipe(module, devices=["cpu"] * 2, chunks=2, **where, **inside({"schedule": schedule}))
    loss_of(model, torch.rand(4, 4)).backward()
    with parametrize.cached(), pytest.raises(RuntimeError, match="graph.*backward='autograd', checkpoint='never'"):
        loss_of(model, torch.rand(4, 4)).backward()
    model.zero_grad()
    plain, x = copy.deepcopy(layers), torch.rand(4, 4)
    model = SplitPipe(module, devices=["cpu"] * 2, chunks=2, backward="autograd", checkpoint="never", **where)
    for each in (model, plain):
        with parametrize.cached():
            loss_of(each, x).backward()
    assert_same([p.grad for p in layers.parameters()], [p.grad for p in plain.parameters()], "gradients")


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


X = torch.arange(28.0).view(7, 4).sin()
KEPT: list[Tensor] = []


def chain(self: Any, x: Tensor) -> Any:
    return self.two(self.one(x).tanh())


def keeping(self: Any, x: Tensor) -> Any:
    h = self.one(x).tanh()
    KEPT.append(h.square().mean())
    return self.two(h)


def leaving(self: Any, x: Tensor) -> Any:
    self.h = self.one(x).tanh()
    return self.two(self.h)


def steep(self: Any, x: Tensor) -> Any:
    y = self.two(h := self.one(x))
    return y + torch.autograd.grad(y.square().sum(), h, create_graph=True)[0]


def squared(model: Any) -> Tensor:
    return sum([y.square().mean() for y in tree_leaves(model(X))])  # type: ignore[return-value]


def with_kept(model: Any) -> Tensor:
    KEPT.clear()
    return squared(model) + sum(KEPT)


def penalty(model: Any) -> Tensor:
    [grad] = torch.autograd.grad(squared(model), [*model.parameters()][:1], create_graph=True)
    return grad.square().sum()


class Use(NamedTuple):
    """A forward, a loss that is run backward, and the pipeline's options."""

    forward: Callable[..., Any]
    loss: Callable[[Any], Tensor] = squared
    options: Mapping[str, Any] = {}


both = Use(lambda self, x: (self.two(h := self.one(x).tanh()), h))
#: What is an error or a warning, its words, and what it says is to be written.
ADVICE = {
    "a second derivative": (Use(chain, penalty), r"model\(x\), with SplitPipe\(..., backward='autograd'\)",
                            Use(chain, penalty, {"backward": "autograd"})),
    "a loss that is kept": (Use(keeping, with_kept), "path that the pipeline doesn't know|a second time", both),
    "a graph in an attribute": (Use(leaving), "left 'h'.*or return it", both),
    "rows in another dimension": (Use(lambda self, x: chain(self, x).T), "expected the batch first", Use(chain)),
    "other widths": (Use(lambda self, x: chain(self, x)[:, :len(x) + 1]), "pad it", Use(chain)),
    "a write": (Use(lambda self, x: self.two(h := self.one(x)) + h.mul_(2), squared, {"checkpoint": "always"}),
                r"Write to a copy \(x.clone", Use(lambda self, x: self.two(h := self.one(x)) + h.clone().mul_(2))),
    "a derivative between blocks": (Use(steep), "backward='autograd'", Use(steep, squared, {"backward": "autograd"})),
    "a number": (Use(lambda self, x: (chain(self, x), int((x > 0).sum()))), "such as mask.sum",
                 Use(lambda self, x: (chain(self, x), (x > 0).sum() * 1.0))),
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_an_error_or_a_warning_says_to_write_is_right(name: str) -> None:
    wrong, words, right = ADVICE[name]
    plain = module_of(right.forward, **linears("one", "two"))
    given = {"cuts": ["two"], "devices": ["cpu"] * 2, "chunks": 3}
    faulty, model = (SplitPipe(module, **given, **use.options) for module, use in (
        (module_of(wrong.forward, **linears("one", "two")), wrong), (copy.deepcopy(plain), right)))
    with warnings.catch_warnings(), pytest.raises((RuntimeError, ValueError, UserWarning)) as caught:
        warnings.simplefilter("error")
        wrong.loss(faulty).backward()
    assert re.search(words, str(caught.value) + "".join(getattr(caught.value, "__notes__", ())))
    for each in (model, plain):
        right.loss(each).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")


def test_what_the_errors_of_a_sequential_say_to_write_is_right() -> None:
    layers, mask = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.rand(7, 1)
    first = Apply(lambda given: given[0] * given[1] if isinstance(given, tuple) else given)
    model = SplitPipe(nn.Sequential(first, *layers), [3, 2], devices=["cpu"] * 2, chunks=2)
    with pytest.raises(ValueError, match=r"expected model\(\(x, mask\)\), one tuple"):
        model(X, mask)
    assert_same(model((X, mask)), layers(X * mask), "output")
    with pytest.raises(TypeError, match=r"Convert it first \(to_dense"):
        model(X.to_sparse())
    with pytest.raises(ValueError, match=r"balance_by_time\(stages, module, sample\)"):
        SplitPipe(layers, [3], devices=["cpu"])
    balance = balance_by_time(2, layers, X, timeout=0.01)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": 2, "schedule": "zb-v", "loss_fn": nn.MSELoss()}
    with pytest.raises(ValueError, match="Give a balance of 4 numbers or 3 cuts"):
        SplitPipe(layers, balance, **options)
    SplitPipe(layers, [1] * 4, **options)(X, target=X).backward()
