"""Checkpointing drops what autograd saves, and changes nothing else."""
from __future__ import annotations

import contextvars
import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitpipe import SplitPipe, is_checkpointing, is_recomputing
from splitpipe.engine import block_checkpoint
from tests.helpers.modules import linears, module_of, popping, stashing
from tests.helpers.scheduled import assert_steps, inside, loss_of, mean
from tests.helpers.twin import assert_same_tensors, twins
from tests.promise.layers import Apply


def mlp() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])


@pytest.mark.parametrize(("mode", "rows", "order"), [
    ("always", 4, "CCCC RB RB RB RB"), ("except_last", 4, "CCCP B RB RB RB"), ("never", 4, "PPPP B B B B"),
    ("except_last", 1, "P B"), ("always", 1, "C RB"),
])
def test_each_microbatch_is_recomputed_right_before_its_backward(mode: str, rows: int, order: str) -> None:
    log: list[str] = []

    def phase(x: Tensor) -> Any:
        log.append("C" if is_checkpointing() else "R" if is_recomputing() else "P")
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda _: log.append("B"))
        return y

    model = SplitPipe(nn.Sequential(Apply(phase)), [1], devices=["cpu"], chunks=4, checkpoint=mode)
    model(torch.rand(rows, 3, requires_grad=True)).sum().backward()
    assert "".join(log) == order.replace(" ", "")
    log.clear()
    with torch.no_grad():
        model(torch.rand(rows, 3))
    model.eval()(torch.rand(rows, 3, requires_grad=True)).sum().backward()
    assert "".join(log) == "P" * 2 * rows + "B" * rows and not is_checkpointing() and not is_recomputing()


def stepped(model: SplitPipe, *inputs: Tensor) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def frozen(model: SplitPipe, *inputs: Tensor) -> None:
    model.requires_grad_(False)


def first(model: SplitPipe, *inputs: Tensor) -> None:
    inputs[0].zero_()


def later(model: SplitPipe, *inputs: Tensor) -> None:
    inputs[-1].mul_(2)


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize(("change", "checkpoint", "words"), [
    (stepped, "always", "optimizer.step"), (stepped, "except_last", "optimizer.step|modified by an inplace"),
    (stepped, "never", "modified by an inplace"), (frozen, "always", "frozen or unfrozen"),
    (first, "always", r"stage 0 \(cpu\) .*was written to in place"),
    (first, "never", "modified (by an inplace|in place)"),
    (later, "always", r"stage 1 \(cpu\) .*was written to in place"),
])
def test_tensors_changed_between_forward_and_backward_are_an_error(change, checkpoint, words, backward):
    model = SplitPipe(mlp(), [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint, backward=backward)
    inputs = [x := torch.rand(4, 6)]
    model[1].register_forward_hook(lambda _, args, output: inputs.append(output))
    model(x).sum().backward()
    loss = model(x).square().sum()
    with torch.no_grad():
        change(model, *inputs)
    with pytest.raises(RuntimeError, match=words):
        loss.backward()
    model.requires_grad_().zero_grad()
    x = torch.rand(4, 6)
    model(x).square().sum().backward()
    expected = torch.autograd.grad(nn.Sequential(*model)(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))


def aside(x: Tensor, layer: nn.Module) -> Any:
    """Two values, of which the second shares memory with a skip."""
    y = x * 2
    return y.data[:, :3], (x.exp(), y)  # Which counts its versions apart.


def read(xs: tuple[Tensor, Tensor], scale: Tensor, part: Tensor) -> Tensor:
    return xs[0][:, :3] + xs[1][:, :3] + part.relu_()


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("how", [lambda y: (y, y), lambda y: (y, y[:, :3]), lambda y: (y[:, :3], y[:, 3:]),
                                 lambda y: (y, y.detach())])
def test_writing_to_memory_that_another_input_or_a_skip_has_is_an_error(how, checkpoint, backward):
    write = Apply(lambda xs: xs[0].relu_() + xs[1].sum(-1, keepdim=True))
    for layers in ([Apply(how), write], [Apply(how), nn.Identity(), write],
                   [stashing("part")(aside), popping("part")(read)]):
        model = SplitPipe(nn.Sequential(nn.Linear(6, 4), *layers), [2] + [1] * (len(layers) - 1), devices=["cpu"] * 3,
                          chunks=2, checkpoint=checkpoint, backward=backward)
        with pytest.raises(RuntimeError, match="shares memory with another"):
            model(torch.rand(4, 6))
    model = SplitPipe(nn.Sequential(write), [1], devices=["cpu"], chunks=2, checkpoint=checkpoint, backward=backward)
    x = torch.rand(4, 6)
    with pytest.raises(RuntimeError, match="shares memory with another"):
        model((x, x))


@pytest.mark.parametrize("by", ["balance", "cuts"])
@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_mode_that_changes_before_backward_is_that_of_the_forward_in_the_recomputation(backward, by):
    mode = module_of(lambda self, x: x.sin() * 2 if self.training else x.sin() * 3)
    plain, model = twins(nn.Sequential(nn.Linear(3, 3), mode, nn.Dropout(0.0)), [1, 2], by, chunks=2,
                         checkpoint="always", backward=backward)
    x = torch.rand(4, 3)
    for m in (plain, model):
        loss = m(x).square().sum()
        m.eval()
        loss.backward()
    assert not model[1].training
    assert_same_tensors(model, plain)


def test_a_block_within_autocast_is_recomputed_within_it() -> None:
    def mixed(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.two(self.one(x).tanh())

    block = module_of(lambda self, x: self.layer(x).float(), **linears("layer"))
    plain, x = module_of(mixed, one=nn.Linear(4, 4), two=block), torch.rand(4, 4)
    model = SplitPipe(copy.deepcopy(plain), cuts=["two"], devices=["cpu"] * 2, chunks=1, checkpoint="always")
    for m in (plain, model):
        m(x).square().sum().backward()
    assert_same_tensors(model, plain)


def test_what_one_block_returns_to_another_may_retain_its_gradient() -> None:
    def retaining(self: Any, x: Tensor) -> Any:
        kept.append(y := self.one(x))
        y.retain_grad()
        return self.three(self.two(y))

    kept, plain, x = list[Tensor](), module_of(retaining, **linears("one", "two", "three")), torch.rand(4, 4)
    model = SplitPipe(copy.deepcopy(plain), cuts=["three"], devices=["cpu"] * 2, chunks=1, checkpoint="always")
    for m in (plain, model):
        m(x).square().sum().backward()
    torch.testing.assert_close(kept[1].grad, kept[0].grad)


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}])
def test_tensors_that_functional_call_swaps_are_those_of_the_recomputation(options: dict[str, Any]) -> None:
    layers = mlp()
    layers[1].register_buffer("scale", torch.ones(6))
    layers[1].register_forward_hook(lambda module, _, y: y * module.scale)
    plain, model = twins(layers, chunks=2, checkpoint="always", **inside(options))
    x, found = torch.rand(4, 6), []
    target: dict[str, Any] = {"target": 0.25} if options else {}
    for each in plain, model:
        swapped = {name: (parameter.detach() * 2).requires_grad_() for name, parameter in plain.named_parameters()}
        tensors = {**swapped, "1.scale": torch.full((6,), 3.0)}
        out = functional_call(each, tensors, (x,), target if each is model else {})
        loss = out if target and each is model else mean(out, 0.25)
        loss.backward()
        found.append([parameter.grad for parameter in swapped.values()])
        assert all(parameter.grad is None for parameter in each.parameters())
    torch.testing.assert_close(found[1], found[0])


def test_a_stage_may_begin_to_write_to_its_input() -> None:
    begun: list[bool] = []
    later = Apply(lambda x: x.mul_(2) if begun else x * 2)
    plain, model = twins(nn.Sequential(nn.Linear(6, 6), later, nn.Tanh()), [1, 2], chunks=2, checkpoint="always")
    assert_steps(plain, model, torch.rand(4, 6), 1)
    begun.append(True)
    assert_steps(plain, model, torch.rand(4, 6), 2)


@pytest.mark.parametrize("by", ["balance", "cuts"])
@pytest.mark.parametrize("other", [lambda x: x.detach() * 1, lambda x: x[:1] * 1])
def test_another_output_in_the_recomputation_is_an_error_each_time(by: str, other: Any) -> None:
    armed: list[bool] = []
    layers = nn.Sequential(nn.Linear(6, 6), Apply(lambda x: other(x) if armed and is_recomputing() else x * 1))
    plain, model = twins(layers, [1, 1], by, chunks=2, checkpoint="always")
    for _ in range(2):
        assert_steps(plain, model, torch.rand(4, 6), 1)
        armed.append(True)
        with pytest.raises(RuntimeError, match="returned other outputs in its recomputation"):
            model(torch.rand(4, 6)).sum().backward()
        armed.clear()


def keeping(self: Any, x: Tensor) -> Tensor:
    """Keeps a loss of its own for outside."""
    y: Tensor = self.layer(x)
    self.loss = y.softmax(-1).square().mean()
    return y.tanh()


@pytest.mark.parametrize("options", [{}, {"backward": "autograd"}, {"schedule": "1f1b"}])
def test_a_loss_that_the_first_stage_keeps_is_warned_of_once(options: dict[str, Any]) -> None:
    """No error would follow: its input needs no gradient. What is computed from parameters again is fine."""
    layers = nn.Sequential(module_of(keeping, **linears("layer")), nn.utils.spectral_norm(nn.Linear(4, 4)))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, **inside(options))
    with pytest.warns(UserWarning, match=r"the forward left '0\.loss', a tensor.*of the last microbatch") as told:
        loss_of(model, torch.rand(4, 4))
    assert len(told) == 1
    loss_of(model, torch.rand(4, 4))


def test_a_stage_recomputes_before_its_gradient_arrives() -> None:
    again = threading.Event()

    def recomputed(x: Tensor) -> Tensor:
        if is_recomputing():
            again.set()
        return x * 1

    def waiting(x: Tensor) -> Tensor:
        x.register_hook(lambda _: None if again.wait(60) else pytest.fail("the stage before waits for this gradient"))
        return x * 1

    layers = nn.Sequential(Apply(recomputed), nn.Linear(4, 4), Apply(waiting), nn.Linear(4, 4))
    model = SplitPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=1, schedule="1f1b", loss_fn=mean, checkpoint="always")
    model(torch.randn(8, 4), target=0.25).backward()
    assert again.is_set()


def test_a_hook_that_removes_itself_in_the_forward_changes_nothing() -> None:
    layers = [nn.Linear(3, 3), nn.Tanh()]
    model = SplitPipe(nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    handle = layers[0].register_forward_hook(lambda *_: handle.remove())
    model(torch.rand(4, 3)).sum().backward()
    assert layers[0].weight.grad is not None


def test_a_leaf_that_a_recomputation_makes_gets_its_gradient() -> None:
    made: list[Tensor] = []

    def moved(x: Tensor) -> Tensor:
        made.append(torch.zeros_like(x, requires_grad=True))
        return x + made[-1]

    model = SplitPipe(nn.Sequential(nn.Linear(3, 3), Apply(moved)), [2], devices=["cpu"], chunks=2, checkpoint="always")
    model(torch.rand(4, 3)).sum().backward()
    assert [x.grad is not None for x in made] == [False, False, True, True]


@pytest.mark.filterwarnings("ignore")
def test_autograd_grad_adds_to_no_leaf_that_a_recomputation_makes() -> None:
    made: list[Tensor] = []

    def moved(x: Tensor) -> Tensor:
        made.append(torch.zeros_like(x, requires_grad=True))
        return x + made[-1]

    model = SplitPipe(nn.Sequential(nn.Linear(3, 3), Apply(moved)), [2], devices=["cpu"], chunks=2, checkpoint="always")
    torch.autograd.grad(model(torch.rand(4, 3)).sum(), [*model.parameters()])
    assert [x.grad for x in made] == [None] * 4


def test_each_recomputation_begins_with_the_context_of_the_forward() -> None:
    var, seen = contextvars.ContextVar("var", default=0), list[int]()

    def counts(x: Tensor) -> Tensor:
        seen.append(var.get())
        var.set(var.get() + 1)
        return x * 1

    model = SplitPipe(nn.Sequential(nn.Linear(3, 3), Apply(counts), nn.Linear(3, 3)), [3], devices=["cpu"], chunks=1,
                      checkpoint="always", backward="autograd")
    loss = model(torch.rand(4, 3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [0, 0, 0]


def test_a_chain_of_checkpointed_blocks_ends_at_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    chains, begin = list[Any](), block_checkpoint.BlockChain.__init__
    monkeypatch.setattr(block_checkpoint.BlockChain, "__init__", lambda *args: chains.append(1) or begin(*args))
    model = SplitPipe(module_of(lambda net, x: net.c(net.b(net.a(x))), **linears(*"abc")), cuts=["c"],
                      devices=["cpu"] * 2, chunks=2, checkpoint="always")
    for cap, blocks in ((2**30, 4), (1, 6)):
        monkeypatch.setattr(block_checkpoint, "_CAP", cap)
        chains.clear()
        model(torch.rand(4, 4)).sum().backward()
        assert len(chains) == blocks
