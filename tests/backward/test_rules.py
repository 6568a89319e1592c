"""What each rule defers, and what it leaves to autograd: the gradients of the module either way."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from splitpipe import SplitPipe
from splitpipe.backward import graph_walk, weight_gradients
from splitpipe.backward.graph_walk import walk
from tests.helpers.deferring import Call, deferred, drop_in, fused, in_more_ways, trained, tried
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.modules import module_of
from tests.helpers.scheduled import assert_transparent
from tests.helpers.twin import twins

#: A function of the input and weights, the shapes of these, and that of the input.
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[int, ...]]


def each(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function called sample by sample."""
    return lambda x, *weights: torch.stack([function(sample, *weights) for sample in x])


def numbers(x: Tensor) -> Tensor:
    """Of rows of a table, each of them in several microbatches."""
    return x.detach().abs().mul(5).long() % 11


LINEAR: dict[str, Case] = {
    "linear": (F.linear, ((4, 6), (4,)), (7, 6)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), ((6, 4), (4,)), (7, 6)),
    "four dimensions": (F.linear, ((4, 6), (4,)), (7, 2, 3, 6)),
    "many elements": (F.linear, ((400, 300), (400,)), (300, 300)),
    "no columns": (F.linear, ((4, 0), (4,)), (7, 3, 0)),
    "no bias": (F.linear, ((4, 6),), (7, 6)),
    "a bias for all columns": (F.linear, ((4, 6), (1,)), (7, 6)),
    ".mT": (lambda x, w: x @ w.mT, ((4, 6),), (7, 6)),
    "transposed twice": (lambda x, w: x @ w.mT.permute(1, 0), ((6, 6),), (7, 6)),
    "a matrix on the left of several": (lambda x, w: w @ x, ((4, 6),), (7, 6, 3)),
    "matmul, four dimensions": (torch.matmul, ((6, 4),), (7, 2, 3, 6)),
    "both ways round": (lambda x, w: x @ w @ w.t(), ((6, 4),), (7, 6)),
}
CONVOLUTION: dict[str, Case] = {
    "2d": (F.conv2d, ((6, 4, 3, 2), (6,)), (7, 4, 6, 5)),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=4), ((8, 1, 3, 3),), (7, 4, 5, 5)),
    "dilation": (lambda x, w, b: F.conv2d(x, w, b, dilation=(2, 3)), ((6, 4, 2, 2), (6,)), (7, 4, 6, 7)),
    "stride": (lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1)), ((6, 4, 3, 3), (6,)), (7, 4, 6, 5)),
    "padding": (lambda x, w, b: F.conv2d(x, w, b, padding=(2, 1)), ((6, 4, 3, 3), (6,)), (7, 4, 5, 4)),
    "transposed, 2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), ((4, 6, 3, 2), (6,)), (7, 4, 4, 3)),
    "transposed, output padding": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 0, (1, 0)), ((4, 6, 3, 3), (6,)),
                                   (7, 4, 4, 3)),
    # Of the same shapes, so that the microbatches of the one could be put together with those of the other.
    "geometries": (lambda x, w: F.conv1d(x, w, padding=1) + F.conv1d(x, w, padding=2, dilation=2), ((6, 4, 3),),
                   (7, 4, 9)),
    "sizes": (lambda x, w: F.conv1d(x, w).sum(2) + F.conv1d(x[..., 1:], w).sum(2), ((6, 4, 3),), (7, 4, 9)),
    "samples without a batch": (each(F.conv1d), ((6, 4, 3),), (7, 4, 9)),
}
EMBEDDING: dict[str, Case] = {
    "embedding": (lambda x, w: F.embedding(numbers(x), w) * x[..., None], ((11, 6),), (7, 5)),
    "padding_idx, negative": (lambda x, w: F.embedding(numbers(x), w, -11), ((11, 6),), (7, 5)),
    "with and without padding": (lambda x, w: F.embedding(numbers(x), w, 2) * F.embedding(numbers(x)[:, :1], w) + 3 *
                                 F.embedding(numbers(x), w, 5), ((11, 6),), (7, 5)),
    "renormalised": (lambda x, w: F.embedding(numbers(x), w, max_norm=0.5), ((11, 6),), (7, 5)),
}
RULES = {"linear": LINEAR, "convolution": CONVOLUTION, "embedding": EMBEDDING}
RULED = {f"{rule}: {name}": case for rule, cases in RULES.items() for name, case in cases.items()}


def layer_of(case: Case) -> tuple[Call, Tensor]:
    function, shapes, shape = case
    return Call(function, **{f"w{k}": torch.randn(own) / 2 for k, own in enumerate(shapes)}), torch.randn(shape)


@tried(RULED, [f"{rule}: {name}" for rule, cases in RULES.items() for name in [*cases][:2]])
def test_a_weight_is_deferred(name: str, way: dict[str, Any]) -> None:
    layer, x = layer_of(RULED[name])
    model = trained(layer, x, **way)
    assert deferred(model) == {f"1.w{k}": name.partition(":")[0] for k in range(len(layer._parameters))}


@tried(RULED, [f"{rule}: {name}" for rule, cases in RULES.items() for name in [*cases][:2]])
def test_a_weight_before_it_in_its_stage_gets_its_gradient(name: str, way: dict[str, Any]) -> None:
    """B follows the edges that the rule names."""
    function, shapes, shape = RULED[name]
    layer, x = layer_of((lambda x, scale, *weights: function(x * scale, *weights), ((), *shapes), shape))
    trained(layer, x, **way)


@pytest.mark.parametrize("name", RULED)
def test_b_follows_all_edges_but_those_to_the_weights(name: str) -> None:
    layer, x = layer_of(RULED[name])
    for node, found in walk([get_gradient_edge(layer(x.requires_grad_()))], [], True).weight_nodes.items():
        edges, behind = node.next_functions, graph_walk.RULES[type(node)][1]
        left = [graph_walk.leaf_of(after)[0] for after, _ in edges if after not in dict(edges[behind])]
        assert {*map(id, left)} - {id(None)} == {*map(id, found.weights)} - {id(None)}


MM, ADDMM, CONV, EMBED = (f"{name}Backward0: its rule doesn't take this call"
                          for name in ("Mm", "Addmm", "Convolution", "Embedding"))
#: Left to autograd, and why.
FUSED: dict[str, tuple[Any, ...]] = {
    "addmm, beta": ((lambda x, w, b: torch.addmm(b, x, w, beta=2), ((6, 4), (4,)), (7, 6)), ADDMM),
    "a batch of weights": ((torch.matmul, ((2, 6, 4),), (7, 2, 3, 6)), "ExpandBackward0 has no rule"),
    "a matrix on the left": ((lambda x, w: w.mm(x.t()).t(), ((4, 6),), (7, 6)), MM),
    "a matrix of biases": ((F.linear, ((4, 6), (1, 4)), (7, 6)), ADDMM),
    "a computed bias": ((lambda x, w, b: F.linear(x, w, b * 2), ((4, 6), (4,)), (7, 6)), ADDMM,
                        "MulBackward0 has no rule"),
    "a computed bias of a convolution": ((lambda x, w, b: F.conv1d(x, w, b * 2), ((6, 4, 3), (6,)), (7, 4, 9)), CONV,
                                         "MulBackward0 has no rule"),
    "a transposed table": ((lambda x, w: F.embedding(numbers(x) % 6, w.t()), ((6, 6),), (7, 5)), EMBED),
}


@tried(FUSED)
def test_what_a_rule_refuses_is_fused(name: str, way: dict[str, Any]) -> None:
    case, *why = FUSED[name]
    model = trained(*layer_of(case), **way)
    assert not deferred(model) and {*fused(model).values()} == {*why}


@in_more_ways
@pytest.mark.parametrize(("kind", "why"), [(nn.Linear, ADDMM), (lambda *sizes: nn.Conv1d(7, 6, 3), CONV)])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient(kind: Any, why: str, frozen: str, way: dict[str, Any]) -> None:
    """With a frozen weight, nothing is left that would pay to be deferred."""
    layer = kind(4, 6)
    layer.get_parameter(frozen).requires_grad_(False)
    model = trained(layer, torch.randn(6, 7, 4) if why == CONV else torch.randn(6, 4), **way)
    assert model[1].get_parameter(frozen).grad is None
    expected = {f"1.{frozen}": "it is frozen"} | ({"1.bias": why} if frozen == "weight" else {})
    assert fused(model) == expected and len(deferred(model)) == 2 - len(expected)


def swapped(p: nn.Parameter) -> None:
    p.data = p.data * 2


def written(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)


def written_behind(p: nn.Parameter) -> None:
    p.data.mul_(2)


@pytest.mark.parametrize("change", [swapped, written, written_behind])
@pytest.mark.parametrize("name", [f"{rule}: {name}" for rule, cases in RULES.items() for name in [*cases][:3]] + [
    "linear: .mT", "convolution: transposed, 2d"])
def test_weights_that_change_after_the_forward_are_those_that_autograd_would_read(name: str, change: Any) -> None:
    layer, x = layer_of(RULED[name])
    found: list[Any] = []
    for model in (copy.deepcopy(layer), SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2,
                                                  checkpoint="never")):
        given = x.clone().requires_grad_()
        y = model(given)
        for p in model.parameters():
            change(p)
        try:
            found.append(torch.autograd.grad(y.pow(2).sum(), [given, *model.parameters()], allow_unused=True))
        except RuntimeError as error:
            found.append(str(error).split(":")[0])
    assert type(found[1]) is type(found[0])
    if isinstance(found[0], str):
        assert found[1] == found[0]
    else:
        torch.testing.assert_close(found[1], found[0])


@drop_in
def test_a_table_that_counts_its_rows_is_fused(way: dict[str, Any]) -> None:
    plain, model = twins(nn.Sequential(nn.Embedding(11, 6, scale_grad_by_freq=True), nn.Tanh()), chunks=3, **way)
    x = torch.randint(0, 11, (7, 5))
    model(x).square().sum().backward()
    for part in x.chunk(3):
        plain(part).square().sum().backward()
    assert fused(model) == {"0.weight": EMBED}
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize(("layer", "shape", "chunks", "kernel", "together", "calls"), [
    # The pipeline's for the input and the weight, and the module's.
    (lambda: nn.Conv1d(4, 6, 3), (16, 4, 9), 8, "aten::convolution_backward", None, 8 + 1 + 1),
    (lambda: nn.Embedding(11, 6), (16, 4), 8, "aten::embedding_dense_backward", None, 1 + 1),
    # A microbatch has 4 * (8 + 48) bytes: two go together.
    (lambda: nn.Embedding(11, 6), (16, 4), 16, "aten::embedding_dense_backward", 500, 8 + 1),
])
def test_microbatches_share_a_kernel_that_is_not_too_large(layer, shape, chunks, kernel, together, calls, monkeypatch):
    if together is not None:
        monkeypatch.setattr(weight_gradients, "_TOGETHER", together)
    x = torch.randn(shape) if len(shape) == 3 else torch.randint(0, 11, shape)
    with torch.autograd.profiler.profile() as profile:
        assert_transparent(nn.Sequential(layer(), nn.Tanh()), x, steps=1, chunks=chunks, checkpoint="never",
                           stash_limit=2**20)
    assert {event.key: event.count for event in profile.key_averages()}[kernel] == calls


def test_a_convolution_that_does_not_pay_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(graph_walk, "_MANY", 2**10)
    layers = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.Tanh(), nn.Conv2d(4, 16, 3, bias=False))
    model = trained(layers, torch.randn(6, 3, 6, 6), checkpoint="never")
    assert deferred(model) == {"1.2.weight": "convolution"} and fused(model) == {"1.0.weight": CONV}


def test_a_transposed_weight_of_a_convolution_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_walk, "_MANY", 0)
    layer = module_of(lambda self, x: F.conv1d(x, self.w.transpose(0, 1)), w=nn.Parameter(torch.randn(4, 4, 3)))
    plain, model = twins(nn.Sequential(layer, nn.Tanh()), [1, 1], chunks=2)
    x = torch.randn(4, 4, 6)
    for each in (plain, model):
        each(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
