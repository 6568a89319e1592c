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
from splitpipe.segments.walk import Walk
from tests.helpers.twin import assert_same_tensors

Forward = Callable[["Net", Tensor], Any]
WHOLE = "the graph of its stage can't be cut out of that around it"


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


def assert_steps(plain: nn.Module, model: nn.Module, steps: int = 3) -> None:
    """Takes steps with both, and compares gradients after each; on one device the first has one graph."""
    for _ in range(steps):
        x, found = rows(), []
        for each in (plain, model):
            each.zero_grad()
            own = x.clone().requires_grad_()
            loss = total(each(own))
            loss.backward()
            found.append((loss.detach(), own.grad))
        torch.testing.assert_close(*found)
        assert_same_tensors(model, plain)


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
    assert_steps(plain, model)
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


@pytest.mark.parametrize("forward", [views, one_weight, between, forces, remade, base, sparse, jagged])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_graph_that_can_not_be_cut_has_them_as_well(forward: Forward, chunks: int) -> None:
    plain, model = pair(forward, chunks=chunks)
    assert_steps(plain, model)


@pytest.mark.parametrize("twice", [False, True])
def test_the_callers_graph_may_lead_to_weights_of_the_module(twice: bool) -> None:
    """B asks for the gradient of one that has no rule, and would go the caller's way to it, too."""
    plain: Any
    model: Any
    plain, model = pair(scaled)
    for _ in range(3):
        x = rows()
        for each in (plain, model):
            each.zero_grad()
            y = each(each(x)) if twice else each(x + each.held.scale)
            y.square().sum().backward()
        assert_same_tensors(model, plain)


def test_a_forward_that_begins_to_write_to_what_it_has_views_of() -> None:
    """On one device. An error, once."""
    writes = [False]
    plain, model = pair(lambda net, x: (base if writes[0] else through)(net, x))
    assert_steps(plain, model)
    writes[0] = True
    with pytest.raises(RuntimeError, match="All stages have one graph from now on: repeat the step"):
        model(rows())
    assert_steps(plain, model)


def test_the_output_of_one_microbatch_has_the_gradient_of_all_that_comes_to_it() -> None:
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


def test_an_object_in_the_output_may_hold_a_tensor() -> None:
    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    plain, model = pair(lambda net, x: (y := through(net, x), Box(y * 2)), chunks=1)
    for _ in range(3):
        x = rows()
        for each in (plain, model):
            each.zero_grad()
            y, box = each(x)
            (y.square().sum() + box.x.tanh().sum()).backward()
        assert_same_tensors(model, plain)


def test_a_view_of_a_weight_from_before_the_call_has_its_hooks_called_once() -> None:
    turned: list[Tensor] = []

    def by_view(net: Net, x: Tensor) -> Tensor:
        return through(net, x @ turned[0])

    plain, model = pair(by_view)
    for _ in range(3):
        x = rows()
        for each in (plain, model):
            each.zero_grad()
            turned[:] = [each.get_parameter("blocks.0.weight").t()]
            turned[0].register_hook(lambda grad: grad.clamp(-0.1, 0.1))
            (each(x).square().sum() + turned[0].square().sum()).backward()
        assert_same_tensors(model, plain)


def test_computed_parameters_may_retain_their_gradients() -> None:
    plain, model = pair(through)
    for _ in range(3):
        x, found = rows(), []
        for each in (plain, model):
            given = {name: parameter.detach().requires_grad_() * 2 for name, parameter in each.named_parameters()}
            for parameter in given.values():
                parameter.retain_grad()
            torch.func.functional_call(each, given, x).square().sum().backward()
            found.append([parameter.grad for name, parameter in given.items() if "blocks" in name])
        torch.testing.assert_close(*found)


def test_the_report_says_that_a_graph_could_not_be_cut() -> None:
    plain, model = pair(views)
    assert_steps(plain, model)
    assert {row.why for row in model.deferral_report() if row.parameter.startswith("blocks")} == {WHOLE}


def test_a_weight_that_the_caller_has_computed() -> None:
    base = torch.rand(4, dtype=torch.float64, requires_grad=True)
    made: list[Tensor] = []

    def times(net: Net, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(x).tanh() * made[0]
        return x

    plain, model = pair(times)
    for _ in range(3):
        x, found = rows(), []
        for each in (plain, model):
            each.zero_grad()
            base.grad = None
            made[:] = [base.exp().square()]
            each(x).square().sum().backward()
            found.append(base.grad)
        torch.testing.assert_close(*found)
        assert_same_tensors(model, plain)


def test_weights_that_microbatches_have_in_common() -> None:
    """The first of them computes the weights for all."""
    plain: Any
    model: Any
    plain, model = pair(through)
    for each in (plain, model):
        for block in each.blocks:
            parametrizations.weight_norm(block)
    assert_steps(plain, model)
    for _ in range(3):
        x = rows()
        for each in (plain, model):
            each.zero_grad()
            with parametrize.cached():
                each(x).square().sum().backward()
        assert_same_tensors(model, plain)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_what_microbatches_have_in_common_may_have_any_number(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of nodes count by thread: that of another thread's may be one of this thread's by chance."""
    common: list[Tensor] = []

    def shared(net: Net, x: Tensor) -> Tensor:
        if not common:
            common.append(net.held.scale.exp())  # type: ignore[operator]
        return through(net, x * common[0])

    plain, model = pair(shared, checkpoint=checkpoint)
    maker = Walk.maker
    monkeypatch.setattr(
        Walk, "maker", lambda walk, node, likely=None:
        0 if type(node).__name__ == "ExpBackward0" else maker(walk, node, likely)
    )
    for _ in range(3):
        x = rows()
        for each in (plain, model):
            each.zero_grad()
            common.clear()
            each(x).square().sum().backward()
        assert_same_tensors(model, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_modules_own_checkpoints(reentrant: bool) -> None:
    def own(net: Net, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=reentrant)
        return x

    assert_steps(*pair(own))


def test_a_write_that_a_view_in_another_stage_tells_of() -> None:
    """On one device autograd knows of it."""
    def written(net: Net, x: Tensor) -> Tensor:
        a, b, c, d, e = net.blocks
        h = a(x) * 1
        view = h[:, :2]
        y = c(b(x))
        h.mul_(y.sigmoid())
        return e(d(y)) + view.sum(1, keepdim=True)

    assert_steps(*pair(written))


def test_an_output_may_be_written_to() -> None:
    plain, model = pair(lambda net, x: through(net, x) * 3)
    for _ in range(3):
        x = rows()
        for each in (plain, model):
            each.zero_grad()
            y = each(x)
            y.mul_(2)
            y.square().sum().backward()
        assert_same_tensors(model, plain)


def test_some_gradients_alone() -> None:
    plain, model = pair(skips)
    model(rows())
    for wanted in ("blocks.0.weight", "blocks.3.bias"):
        x, found = rows().requires_grad_(), []
        for each in (plain, model):
            weight = each.get_parameter(wanted)
            y = each(x).square().sum()
            found.append(torch.autograd.grad(y, [x, weight], retain_graph=True) + torch.autograd.grad(y, weight))
        torch.testing.assert_close(*found)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_backward_that_fails_leaves_the_model_usable() -> None:
    plain, model = pair(through)
    model(rows())

    def fail(grad: Tensor) -> None:
        raise KeyError("here")

    y = model(x := rows())
    handle = model.get_submodule("blocks.1").register_full_backward_hook(lambda *_: fail(x))
    with pytest.raises(KeyError, match="here"):
        model(x).sum().backward()
    handle.remove()
    y.sum().backward()
    model.zero_grad()
    assert_steps(plain, model)


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
@pytest.mark.parametrize("by_cuts", [False, True])
def test_hooks_of_parameters_that_nothing_uses_are_not_called(by_cuts: bool, checkpoint: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x).tanh()
            return y

    plain: Any = nn.Sequential(*[Half() for _ in range(3)]).double()
    module = copy.deepcopy(plain)
    if by_cuts:
        module.__class__ = type("Own", (nn.Sequential,), {})
    where: dict[str, Any] = {"cuts": ["2"]} if by_cuts else {"balance": [2, 1]}
    model = SplitPipe(module, devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint, **where)
    called: list[tuple[str, str]] = []
    for each in (plain, model):
        for name, parameter in each.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(("after", name)))
            parameter.register_hook(lambda _, name=name: called.append(("before", name)))
    assert assert_same_calls(plain, model, called) == 3 * 2 * 2


def test_the_report_follows_what_forwards_do() -> None:
    own: list[Forward] = [through]
    plain, model = pair(lambda net, x: own[0](net, x))
    for forward, why in ((through, "Linear"), (views, WHOLE), (through, "Linear")):
        own[0] = forward
        assert_steps(plain, model)
        assert {row.why for row in model.deferral_report() if row.parameter.startswith("blocks")} == {why}


def test_a_hook_may_take_the_gradient_before_the_next_one_is_called() -> None:
    plain, model = pair(through, checkpoint="always")
    called: list[str] = []
    for each in (plain, model):
        for name, parameter in each.named_parameters():
            def step(parameter: Tensor, name: str = name) -> None:
                called.append(name)
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    assert_same_calls(plain, model, called)


@pytest.mark.parametrize("options", [
    {}, {"chunks": 1}, {"backward": "autograd"}, {"schedule": "1f1b", "loss_fn": nn.MSELoss()},
], ids=["split", "one microbatch", "autograd", "1f1b"])
def test_a_write_to_an_argument_whose_memory_another_has_is_an_error(options: dict[str, Any]) -> None:
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

    with pytest.raises(RuntimeError, match="wrote in place to an argument whose memory another"):
        model(base := made(), base[:, :2], **target)
    model(made(), made()[:, :2], **target).sum().backward()
    Two.writes = False
    model(base := made(), base[:, :2], **target).sum().backward()


def test_a_weight_whose_input_was_written_to_may_lead_to_an_output_that_the_loss_does_not_use() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.layer(x)

    class Writes(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0].mul_(2), pair[1]

    for balance in [1, 1, 1], [2, 1]:
        module = nn.Sequential(nn.Linear(4, 4), Two(), Writes())
        plain = copy.deepcopy(module)
        model = SplitPipe(module, balance, devices=["cpu"] * len(balance), chunks=2, checkpoint="never")
        x = torch.rand(6, 4)
        for each in (plain, model):
            each(x)[0].square().sum().backward()
        assert_same_tensors(model, plain)


def test_what_a_layer_keeps_for_a_later_stage_has_its_gradient() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            kept[:] = [y.exp()]
            return y.tanh()

    class Uses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * kept[0]

    module = nn.Sequential(Keeps(4, 4), Uses(4, 4))
    plain = copy.deepcopy(module)
    # One microbatch: several would find each other's. Each stage's thread counts its nodes from the same number on.
    model = SplitPipe(module, [1, 1], devices=["cpu"] * 2, chunks=1, checkpoint="never")
    for _ in range(2):
        x = torch.rand(3, 4)
        for each in (plain, model):
            each(x).square().mean().backward()
        assert_same_tensors(model, plain)
