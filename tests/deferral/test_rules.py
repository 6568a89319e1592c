"""Rules for nodes of a graph: by a schedule the gradients are those of the module, and W computes them."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from splitpipe import SplitFunction, SplitPipe
from splitpipe.deferral import owners, rules
from splitpipe.training import capture
from tests.deferral import test_convolution, test_linear
from tests.helpers.deferring import Call, Scale, deferred, left
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same_tensors

Make = Callable[[], nn.Module]


def squares(x: Tensor, target: Any) -> Tensor:
    return x.square().flatten(1).mean(1).mean()


def trained(layer: nn.Module, value: Tensor, steps: int = 2, **options: Any) -> SplitPipe:
    """The layer as the second of two stages, after steps by zb-h1 that are its module's."""
    plain = copy.deepcopy(layer)
    layers = nn.Sequential(nn.Identity(), layer)
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=3, schedule="zb-h1", loss_fn=squares, **options)
    for _ in range(steps):
        own, other = (
            value.clone().requires_grad_() if value.is_floating_point() or value.is_complex() else value
            for _ in range(2)
        )
        model(own, target=0).backward()
        squares(plain(other), 0).backward()
        assert_same_tensors(layer, plain)
        if own.requires_grad:
            torch.testing.assert_close(own.grad, other.grad)
    return model


#: Of the tables by which rules are tried.
FEW: dict[str, tuple[Make, tuple[int, ...]]] = {
    **{name: test_linear.LINEAR[name] for name in ("two dimensions", "four dimensions", "transposed", "bilinear form")},
    **{name: test_linear.RIGHT[name] for name in ("@", "addmm")}, ".t()": test_linear.TURNED[".t()"],
    **{name: test_convolution.LAYERS[name] for name in ("2d", "groups", "stride", "transposed, 2d")},
}


@pytest.mark.parametrize("name", FEW)
def test_a_schedule_defers_under_autocast(name: str) -> None:
    make, shape = FEW[name]
    value, layer = torch.randn(shape).float(), make().float()
    plain = copy.deepcopy(layer)
    model = SplitPipe(nn.Sequential(nn.Identity(), layer), [1, 1], devices=["cpu"] * 2, chunks=3, schedule="zb-h1",
                      loss_fn=lambda x, _: squares(x.float(), 0))
    with torch.autocast("cpu", torch.bfloat16):
        model(value, target=0).backward()
        squares(plain(value).float(), 0).backward()
    pairs = [(own.grad, other.grad) for own, other in zip(layer.parameters(), plain.parameters())]
    # A sum that is nearly 0 has the roundings of its terms, which are as large as other gradients.
    scale = max(float(expected.abs().max()) for _, expected in pairs if expected is not None)
    for found, expected in pairs:
        assert found is not None and expected is not None and found.dtype is torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * scale)
    assert deferred(model)


OTHER: dict[str, tuple[Make, Tensor]] = {
    "complex": (lambda: Call(lambda x, w, b: torch.view_as_real(F.linear(torch.complex(x, x), w, b)).flatten(1),
                             w=torch.randn(4, 6, dtype=torch.cdouble), b=torch.randn(4, dtype=torch.cdouble)),
                torch.randn(7, 6, dtype=torch.double)),
    "attention": (lambda: Attends(), torch.randn(7, 3, 6, dtype=torch.double)),
    "a transformer layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True),
                            torch.randn(7, 3, 6, dtype=torch.double)),
    "lstm": (lambda: Recurrent(), torch.randn(7, 3, 6, dtype=torch.double)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), torch.randn(7, 6, dtype=torch.double)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 4)), torch.randn(7, 6, dtype=torch.double)),
    "norms and scales": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(2, 6), nn.PReLU(6), nn.InstanceNorm1d(
        6, affine=True)), torch.randn(7, 4, 9, dtype=torch.double)),
    "a bag of rows": (lambda: nn.EmbeddingBag(11, 6), torch.randint(0, 11, (7, 5))),
    "bilinear": (lambda: Call(lambda x, w: F.bilinear(x, x, w), w=torch.randn(3, 6, 6)),
                 torch.randn(7, 6, dtype=torch.double)),
}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_stage_that_begins_by_writing_to_its_input(checkpoint: Any) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))
    plain, x = copy.deepcopy(layers), torch.randn(7, 6)
    model = SplitPipe(layers, [1, 3], devices=["cpu"] * 2, chunks=3, schedule="zb-h1", loss_fn=squares,
                      checkpoint=checkpoint)
    for _ in range(2):
        model(x, target=0).backward()
        squares(plain(x), 0).backward()
        assert_same_tensors(layers, plain)
    assert len(deferred(model)) == 4


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", OTHER)
def test_other_layers_have_their_gradients(name: str, checkpoint: Any) -> None:
    make, value = OTHER[name]
    trained(make(), value, checkpoint=checkpoint)


# Weights by way of views, and used by several nodes


def test_a_hook_of_a_view_sees_the_gradient_of_the_batch() -> None:
    seen: dict[str, list[Tensor]] = {"pipe": [], "plain": []}

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.whose = nn.Parameter(torch.randn(4, 6)), "plain"

        def forward(self, x: Tensor) -> Tensor:
            turned = self.weight.t()
            turned.register_hook(seen[self.whose].append)
            return x @ turned

    layer = Hooked()
    plain, x = copy.deepcopy(layer), torch.randn(6, 6)
    layer.whose = "pipe"
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, schedule="zb-h1", loss_fn=squares)
    model(x, target=0).backward()
    squares(plain(x), 0).backward()
    assert deferred(model)
    torch.testing.assert_close(torch.stack(seen["pipe"]).sum(0), seen["plain"][0])


def test_several_products_of_one_weight_are_one_sum() -> None:
    layer = Call(lambda x, w: F.linear(x, w) + x @ w + x @ w.t() + F.linear(x, w.t()), w=torch.randn(6, 6))
    assert deferred(trained(layer, torch.randn(7, 6))) == {"1.w": "Linear, MatMul"}


# What a rule can't have


def test_a_node_of_another_name_loses_deferral_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, "AddmmBackward99", rules.RULES.pop("AddmmBackward0"))
    try:
        model = trained(nn.Linear(6, 4), torch.randn(7, 6))
        assert left(model) == {"1.weight": "addmm has no rule", "1.bias": "addmm has no rule"}
    finally:
        rules.RULES["AddmmBackward0"] = rules.RULES["AddmmBackward99"]


def test_so_does_one_that_saves_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "AddmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0":
        rule: Any = rules.RULES[name]
        monkeypatch.setattr(rule, "_names", (*rule._names, "_saved_under_another_name"))
    for layer, value in (
        (nn.Linear(6, 4), torch.randn(7, 6)), (nn.Conv1d(4, 6, 3), torch.randn(7, 4, 9)),
        (nn.Embedding(11, 6), torch.randint(0, 11, (7, 5))),
    ):
        why = left(trained(layer, value))["1.weight"]
        assert why.endswith("this version of torch saves other things for it")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_torchs_in_a_layer(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.b(torch_checkpoint(self.a, x, use_reentrant=reentrant))

    with pytest.raises(RuntimeError, match="use_reentrant=False") if reentrant else nullcontext():
        assert set(deferred(trained(Again(), torch.randn(7, 6)))) == {"1.b.weight", "1.b.bias"}


def test_a_subclass_of_tensor_as_a_weight_is_bs() -> None:
    class Own(Tensor):
        pass

    weight, x, grads = torch.randn(4, 6), torch.randn(7, 6), []
    for piped in False, True:
        layer = nn.Linear(6, 4, bias=False)
        layer.weight = nn.Parameter(weight.as_subclass(Own))  # type: ignore[arg-type]
        if piped:
            model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, schedule="zb-h1", loss_fn=squares)
            model(x, target=0).backward()
            assert "has a custom class" in left(model)["0.weight"]
        else:
            squares(layer(x), 0).backward()
        grads.append(layer.weight.grad)
    torch.testing.assert_close(*grads)


def test_a_parameter_as_an_input_is_bs() -> None:
    layer = Call(lambda x, a, b: x + a @ b, a=torch.randn(1, 6), b=torch.randn(6, 6))
    plain = copy.deepcopy(layer)
    x = torch.randn(6, 6)
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, schedule="zb-h1", loss_fn=squares)
    model(x, target=0).backward()
    squares(plain(x), 0).backward()
    assert_same_tensors(layer, plain)
    assert not deferred(model)


class Product(SplitFunction):
    """x @ w"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        (w,) = weights
        assert w is not None
        ctx.save_for_input(w)
        ctx.save_for_weight(x)
        return x @ w

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        (w,) = ctx.saved_for_input
        return grad_output @ w.t()

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_for_weight
        return (x.t() @ grad_output,)


def test_a_split_function_leaves_what_its_two_halves_say() -> None:
    halves: list[str] = []

    class Noted(Scale):
        @staticmethod
        def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
            halves.append("input")
            ctx.own = 3
            return Scale.backward_input(ctx, grad_output)

        @staticmethod
        def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
            halves.append("weight")
            assert ctx.own == 3
            return Scale.backward_weight(ctx, grad_output)

    layer = Call(lambda x, w: Noted.apply(x, w), w=torch.randn(6))
    model = trained(layer, torch.randn(6, 6), steps=1)
    assert deferred(model) == {"1.w": "Noted"}
    assert sorted(halves) == ["input"] * 4 + ["weight"] * 4  # The module's own, too.


def test_a_split_function_may_be_given_a_transpose() -> None:
    """Its gradient is that of the transpose; the matrix is square, so that no shape tells."""

    def turned(x: Tensor, w: Tensor) -> Tensor:
        return Product.apply(x, w.t())

    model = trained(Call(turned, w=torch.randn(6, 6)), torch.randn(7, 6))
    assert set(deferred(model)) >= {"1.w"}


def test_a_walk_says_where_each_gradient_is_computed() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    y = layer(torch.randn(2, 4))
    notes: list[tuple[str, bool, str]] = []
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    found = owners.survey([(y.grad_fn, 0)], (), range(2**62), {}, None,
                          note=lambda leaf, late, why: notes.append((names[id(leaf)], late, why)))
    assert {id(leaf) for leaf in found.leaves} == set(names)
    assert not found.owners and not found.others and not found.custom
    assert sorted(notes) == [
        ("0.bias", False, "addmm has no rule"), ("0.weight", False, "addmm has no rule"),
        ("1.bias", False, "layer_norm has no rule"), ("1.weight", False, "layer_norm has no rule"),
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_large_weights_of_two_stages_at_once(schedule: str, backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_LARGE", 2**14)
    shared = nn.Linear(80, 80)  # Its gradient is added as it comes, from two stages side by side.
    last = Call(lambda x, w: x + w.sin(), w=torch.randn(80))
    layers = nn.Sequential(shared, nn.Tanh(), nn.LayerNorm([80]), shared, last)
    plain, x = copy.deepcopy(layers), torch.randn(8, 80)
    seen: dict[str, list[Tensor]] = {"pipe": [], "plain": []}
    for name, module in ("pipe", layers), ("plain", plain):
        module[0].weight.register_hook(seen[name].append)  # type: ignore[union-attr,operator]
    model = SplitPipe(layers, [2, 3], devices=["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=squares,
                      backward=backward)
    for _ in range(2):
        model(x, target=0).backward()
        squares(plain(x), 0).backward()
        assert_same_tensors(layers, plain)
    torch.testing.assert_close(seen["pipe"], seen["plain"])
    assert len(shared.weight._backward_hooks or ()) == 1


class Meet(torch.autograd.Function):
    """The tensor; a backward of a certain number waits for that of another stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: tuple[threading.Barrier, list[int], int]) -> Tensor:
        ctx.meeting = meeting
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        barrier, calls, number = ctx.meeting
        calls.append(len(calls))
        if calls[-1] == number:
            barrier.wait(30)
        return grad, None


def test_two_stages_sum_gradients_of_one_leaf_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_LARGE", 2**14)
    barrier = threading.Barrier(2)
    first, second = ((barrier, list[int](), number) for number in range(2))
    leaf, x = torch.randn(100, 100, requires_grad=True), torch.randn(8, 100)
    # The second stage's second backward is at work while the first stage's first one is.
    layers = nn.Sequential(Call(lambda x: Meet.apply(x @ leaf, first)), Call(lambda x: Meet.apply(x @ leaf, second)))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, schedule="1f1b", loss_fn=squares)
    model(x, target=0).backward()
    found, leaf.grad = leaf.grad, None
    squares(x @ leaf @ leaf, 0).backward()
    assert found is not None and leaf.grad is not None
    torch.testing.assert_close(found, leaf.grad)
