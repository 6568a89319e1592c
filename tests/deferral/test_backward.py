"""The split engine inside an ordinary backward: autograd, and who uses it, can't tell the difference."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.covering import pairwise
from tests.helpers.deferring import double as double
from tests.helpers.twin import Failing, assert_same, assert_same_tensors, twins
from tests.promise.layers import Apply

CHECKPOINT = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
BY = pytest.mark.parametrize("by", ["balance", "cuts"])
def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def pair(**options: Any) -> tuple[nn.Sequential, SplitPipe]:
    return twins(layers(), [2, 3], chunks=3, **options)


def both(plain: nn.Module, model: nn.Module, work: Callable[[nn.Module, Tensor], Any], x: Tensor | None = None) -> None:
    """Does the same with either, and compares what it gives and every gradient."""
    given = torch.randn(7, 4) if x is None else x
    found, expected = (work(m, given.clone().requires_grad_()) for m in (model, plain))
    assert_same(found, expected, "result")
    assert_same_tensors(model, plain)


@pairwise(
    checkpoint=["never", "except_last", "always"], stash_limit=[None, 0, 500],
    chosen=[["0.weight"], ["4.bias"], ["2.bias", "0.weight"], ["4.weight", "0.bias"]],
)
def test_gradients_of_some_parameters(checkpoint: str, stash_limit: Any, chosen: list[str]) -> None:
    def work(model: nn.Module, x: Tensor) -> list[Tensor]:
        parameters = dict(model.named_parameters())
        loss = model(x).square().sum()
        found = torch.autograd.grad(loss, [parameters[name] for name in chosen], retain_graph=True)
        loss.backward(inputs=[x, parameters["2.weight"]], retain_graph=True)
        loss.backward()
        return [*found, x.grad]

    both(*pair(checkpoint=checkpoint, stash_limit=stash_limit), work)


@CHECKPOINT
@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt()])
def test_a_failed_backward_leaves_nothing_to_the_next(checkpoint: str, error: BaseException) -> None:
    failures: list[BaseException] = []
    own = layers()
    model = SplitPipe(nn.Sequential(own[0], Failing(failures), *own[2:]), [2, 3], devices=["cpu"] * 2, chunks=3,
                      checkpoint=checkpoint)
    plain = copy.deepcopy(nn.Sequential(*model))
    x = torch.randn(7, 4)
    loss = model(x).square().sum()
    failures.append(error)
    with pytest.raises(type(error)):
        loss.backward(retain_graph=True)
    model.zero_grad()  # The gradients of layers behind the failure may be there already.
    loss.backward()
    plain(x).square().sum().backward()
    assert_same_tensors(model, plain)


@CHECKPOINT
@BY
def test_second_derivatives(by: str, checkpoint: str) -> None:
    def work(model: nn.Module, x: Tensor) -> list[Tensor]:
        parameters = list(model.parameters())
        loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        penalty = loss + torch.stack([grad.square().sum() for grad in grads]).sum()
        penalty.backward(retain_graph=True)
        return list(torch.autograd.grad(penalty, [x, *parameters]))

    both(*pair(by=by, checkpoint=checkpoint, backward="autograd"), work)


@pairwise(by=["balance", "cuts"], checkpoint=["never", "except_last", "always"], stash_limit=[None, 0, 500])
def test_second_derivatives_of_a_split_backward_are_an_error(by: str, checkpoint: str, stash_limit: Any) -> None:
    plain, model = pair(by=by, checkpoint=checkpoint, stash_limit=stash_limit)
    given = torch.randn(7, 4)
    x = given.clone().requires_grad_()
    model(x)  # By cuts, on one device, the first forward is one graph.
    for wanted in [x], list(model.parameters()):
        with pytest.raises(RuntimeError, match="backward='autograd'"):
            torch.autograd.grad(model(x).square().sum(), wanted, create_graph=True)
    for module, leaf in (model, given), (plain, given):  # What it has left behind is nothing.
        module(leaf).square().sum().backward()
    assert_same_tensors(model, plain)


@CHECKPOINT
@pytest.mark.parametrize("stash_limit", [None, 0])
def test_autocast_casts_nothing_in_backward(checkpoint: str, stash_limit: Any) -> None:
    model = SplitPipe(layers().float(), [2, 3], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint,
                      stash_limit=stash_limit)
    loss = model(torch.randn(7, 4, dtype=torch.float32)).square().sum()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert_same([parameter.grad for parameter in parameters], list(expected), "gradients")


@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_backward_within_a_backward_has_a_stash_of_its_own(backward: Any) -> None:
    run: list[Callable[[], object]] = []  # Once, when the gradient passes.

    def between(x: Tensor) -> Tensor:
        x.register_hook(lambda _: run.pop()() and None if run else None)
        return x * 1

    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    layers = copy.deepcopy(plain)
    piped = nn.Sequential(layers[0], layers[1], Apply(between), layers[2])
    model = SplitPipe(piped, [4], devices=["cpu"], chunks=3, checkpoint="never", backward=backward)
    x = torch.rand(6, 4, dtype=torch.float64)
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))

    loss = model(x).square().sum()
    inner: list[Tensor] = []
    run.append(lambda: inner.extend(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)))
    loss.backward(retain_graph=True)
    for wanted, found, within in zip(expected, [p.grad for p in model.parameters()], inner, strict=True):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(within, wanted)


@pairwise(retained=[False, True], checkpoint=["never", "except_last", "always"], stash_limit=[None, 0, 500])
def test_backward_in_inference_mode(stash_limit: int | None, checkpoint: str, retained: bool) -> None:
    plain, model = pair(stash_limit=stash_limit, checkpoint=checkpoint)
    x = torch.randn(7, 4)
    for each in (plain, model):
        loss = each(x).square().mean()
        if retained:
            loss.backward(retain_graph=True)
        with torch.inference_mode():
            loss.backward()
    assert_same_tensors(model, plain)
    assert [p.grad.is_inference() for p in model.parameters() if p.grad is not None] == [not retained] * 6
