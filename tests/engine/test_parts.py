"""Drop-in, by cuts: each stage's part of a microbatch's graph is one node, if the graph can be cut."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from splitpipe import SplitPipe
from tests.helpers.covering import few
from tests.helpers.scheduled import assert_steps
from tests.helpers.twin import twins

Forward = Callable[["Net", Tensor], Any]
WHOLE = "the graph of its stage can't be cut out of the surrounding graph"


class Net(nn.Module):
    """Five linear layers; what is between them is a test's own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.held = nn.Module()
        self.held.scale = nn.Parameter(torch.tensor([1.0, 1.5, 2.0, 0.5]))
        self.own = forward

    def forward(self, x: Tensor) -> Any:
        return self.own(self, x)


def through(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x).tanh()
    return x


def pair(forward: Forward, **options: Any) -> tuple[Net, SplitPipe]:
    """A module, and a copy in three stages, the first and the second of two layers each."""
    plain = Net(forward).double()
    options = {"devices": ["cpu"] * 3, "chunks": 3, "checkpoint": "never", **options}
    return plain, SplitPipe(copy.deepcopy(plain), cuts=["blocks.2", "blocks.4"], **options)


def rows() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64)


def total(output: Any) -> Tensor:
    """A number of which each row has its part."""
    leaves = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return torch.stack([x.square().sum() for x in leaves]).sum()


def loss_of(module: Any, x: Tensor) -> Tensor:
    return total(module(x))


def nodes(output: Tensor) -> int:
    """The number of nodes of stages in a graph."""
    seen, stack = set(), [output.grad_fn]
    while stack:
        node: Any = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [after for after, _ in node.next_functions]
    return sum([type(node).__name__ == "BlockNodeBackward" for node in seen])


def skips(net: Net, x: Tensor) -> Tensor:
    kept = []
    for block in net.blocks:
        x = block(x).tanh()
        kept.append(x)
    return x + kept[0] * kept[2] + kept[1]


def several(net: Net, x: Tensor) -> tuple[Tensor, ...]:
    a, b, c, d, e = net.blocks
    first = a(x)
    second = b(first).tanh()
    third = c(first * second)
    fourth = d(third + first)
    return e(fourth) * first, first, second


def given_again(net: Net, x: Tensor) -> Tensor:
    y = x
    for block in net.blocks:
        y = block(y + x).tanh()
    return y


def between(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x) * net.held.scale
    return x


def in_place(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
        x.mul_(2).add_(1)
    return x


def hooked(net: Net, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 3)
    for block in net.blocks:
        x = block(x).tanh()
        x.register_hook(lambda grad: grad * 2)
    return x


def without(net: Net, x: Tensor) -> Tensor:
    for k, block in enumerate(net.blocks):
        with torch.set_grad_enabled(k != 1):
            y = block(x).tanh()
        x = x + y
    return x.detach() * x


def remade(net: Net, x: Tensor) -> Tensor:
    """Of a view autograd makes the node again when it is next asked for, in another stage here."""
    a, b, c, d, e = net.blocks
    h = b(a(x))
    y = d(c(h + 1))
    view = h[:, :2]
    h.mul_(2)
    return e(y) + view.sum(1, keepdim=True)


def base(net: Net, x: Tensor) -> Tensor:
    """The whole is used in the stage that has written to a view of it."""
    a, b, c, d, e = net.blocks
    h = b(a(x))
    view = h[:, :2]
    y = d(c(h + 1))
    view.mul_(2)
    return e(y + h)


def late(net: Net, x: Tensor) -> Tensor:
    """The whole is used a stage after that which has written to a view of it."""
    a, b, c, d, e = net.blocks
    h = b(a(x)) * 1
    view = h[:, :2]
    y = d(c(x))
    view.mul_(y[:, :2].sigmoid())
    return e(y) + view.sum(1, keepdim=True) + h


def scaled(net: Net, x: Tensor) -> Tensor:
    return through(net, x * net.held.scale)


def sparse(net: Net, x: Tensor) -> Tensor:
    a, b, c, d, e = net.blocks
    h = b(a(x)).to_sparse()
    return e(d(c(x))) + h.to_dense()


def jagged(net: Net, x: Tensor) -> Tensor:
    return through(net, torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)).values()


def forces(net: Net, x: Tensor) -> Tensor:
    h = net.blocks[0](x).tanh()
    y = h
    for block in net.blocks[1:]:
        y = block(y).tanh()
    (force,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
    return y + force


@pytest.mark.parametrize("forward", [
    through, scaled, skips, several, given_again, in_place, hooked, without,
])
@pytest.mark.parametrize("options", [
    {}, {"chunks": 1}, {"checkpoint": "except_last"}, {"stash_limit": 0},
], ids=["never", "one microbatch", "except_last", "stash_limit"])
def test_a_graph_that_is_cut_has_the_modules_gradients(forward: Forward, options: dict[str, Any]) -> None:
    plain, model = pair(forward, **options)
    assert_steps(plain, model, rows, loss_of=loss_of)
    if forward is several and options == {"chunks": 1}:  # Hooks of its outputs are given all that comes to them.
        return
    found = {row.why for row in model.deferral_report() if row.parameter.startswith("blocks")}
    assert "Linear" in found and WHOLE not in found
    output = model(rows().requires_grad_())
    assert nodes(output[0] if isinstance(output, tuple) else output) >= (9 if options == {} else 3)


def test_a_stage_is_one_node_for_each_microbatch() -> None:
    _, model = pair(through)
    for expected in (0, 3 * 3, 3 * 3):
        assert nodes(model(rows())) == expected


def views(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    y = through(net, x)
    return y, y[:, :2]


def one_weight(net: Net, x: Tensor) -> Tensor:
    a, b, c, d, e = net.blocks
    return e(d(c(b(a(x) * net.held.scale).tanh()).tanh() * net.held.scale))


def written(net: Net, x: Tensor) -> Tensor:
    """A view in another stage tells of a write."""
    a, b, c, d, e = net.blocks
    h = a(x) * 1
    view = h[:, :2]
    y = c(b(x))
    h.mul_(y.sigmoid())
    return e(d(y)) + view.sum(1, keepdim=True)


def checkpointed(net: Net, x: Tensor, reentrant: bool = False) -> Tensor:
    for block in net.blocks:
        x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=reentrant)
    return x


def reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpointed(net, x, True)


@pytest.mark.parametrize("forward", few(6, [
    views, one_weight, between, forces, late, written, remade, base, sparse, jagged, checkpointed, reentrant,
]))
def test_a_graph_that_can_not_be_cut_has_them_as_well(forward: Forward) -> None:
    for options in ({}, {"chunks": 1}, {"backward": "autograd"}):
        assert_steps(*pair(forward, **options), rows, loss_of=loss_of)


@pytest.mark.thorough
def test_a_forward_that_begins_to_write_to_what_it_has_views_of() -> None:
    """On one device. An error, once."""
    writes = [False]
    plain, model = pair(lambda net, x: (base if writes[0] else through)(net, x))
    assert_steps(plain, model, rows, loss_of=loss_of)
    writes[0] = True
    with pytest.raises(RuntimeError, match="All stages now share one graph: repeat the step"):
        model(rows())
    assert_steps(plain, model, rows, loss_of=loss_of)


def test_the_output_of_one_microbatch_retains_all_its_gradient() -> None:
    def with_loss(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        y = through(net, x)
        return y.square().mean(), y

    plain, model = pair(with_loss, chunks=1)
    for _ in range(3):
        x, found = rows(), []
        for each in (plain, model):
            loss, y = each(x)
            y.retain_grad()
            (loss + y.sum()).backward()
            found.append(y.grad)
        torch.testing.assert_close(*found)


def test_hooks_of_a_view_from_before_the_call_are_called_once() -> None:
    turned: list[Tensor] = []

    def with_turned(each: Any, x: Tensor) -> Tensor:
        turned[:] = [each.get_parameter("blocks.0.weight").t()]
        turned[0].register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return each(x).square().sum() + turned[0].square().sum()

    assert_steps(*pair(lambda net, x: through(net, x @ turned[0])), rows, loss_of=with_turned)


def cached(each: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return each(x).square().sum()


def test_weights_that_microbatches_have_in_common() -> None:
    """The first of them computes the weights for all."""
    plain, model = pair(through)
    for each in (plain, model):
        for block in each.blocks:  # type: ignore[union-attr]
            parametrizations.weight_norm(block)
    assert_steps(plain, model, rows, loss_of=loss_of)
    assert_steps(plain, model, rows, loss_of=cached)


def assert_same_calls(plain: nn.Module, model: nn.Module, called: list[Any]) -> int:
    """Compares the calls that steps of both have noted; gives how many."""
    for _ in range(3):
        x, found = rows(), []
        for each in (plain, model):
            called.clear()
            each(x).sum().backward()
            found.append(sorted(called))
        assert found[0] == found[1]
    return len(called)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_hooks_of_parameters_that_nothing_uses_are_not_called(by: str, checkpoint: str) -> None:
    class Half(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.unused = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    plain, model = twins(nn.Sequential(*[Half() for _ in range(3)]).double(), [2, 1], by=by, chunks=3,
                         checkpoint=checkpoint)
    called: list[tuple[str, str]] = []
    for each in (plain, model):
        for name, parameter in each.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(("after", name)))
            parameter.register_hook(lambda _, name=name: called.append(("before", name)))
    assert assert_same_calls(plain, model, called) == 3 * 2 * 2


@pytest.mark.thorough
def test_the_report_follows_what_forwards_do() -> None:
    own: list[Forward] = [through]
    plain, model = pair(lambda net, x: own[0](net, x))
    for forward, why in ((through, "Linear"), (views, WHOLE), (through, "Linear")):
        own[0] = forward
        assert_steps(plain, model, rows, loss_of=loss_of)
        assert {row.why for row in model.deferral_report() if row.parameter.startswith("blocks")} == {why}


@pytest.mark.parametrize("options", [
    {}, {"chunks": 1}, {"backward": "autograd"}, {"schedule": "1f1b", "loss_fn": nn.MSELoss()},
], ids=["split", "one microbatch", "autograd", "1f1b"])
def test_a_write_to_shared_arguments_is_an_error(options: dict[str, Any]) -> None:
    """Autograd would know of it; microbatches are tensors of their own."""
    class Two(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            if self.writes:
                x.mul_(2)
            return through(self, x) + y.sum(1, keepdim=True)

        writes = True

    plain, target = Two(through).double(), {"target": rows()} if "loss_fn" in options else {}
    options = {"chunks": 3, "checkpoint": "never", **options}
    model = SplitPipe(copy.deepcopy(plain), cuts=["blocks.2", "blocks.4"], devices=["cpu"] * 3, **options)

    def made() -> Tensor:
        return rows().requires_grad_() * 1

    with pytest.raises(RuntimeError, match="wrote in place to an argument that shares its memory"):
        model(base := made(), base[:, :2], **target)
    model(made(), made()[:, :2], **target).sum().backward()
    Two.writes = False
    model(base := made(), base[:, :2], **target).sum().backward()
