"""The second half of a drop-in call inside a backward: autograd, and who uses it, can't tell the difference."""
from __future__ import annotations

import _thread
import copy
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.covering import pairwise
from tests.helpers.deferring import Call, Scale, scale
from tests.helpers.deferring import double as double
from tests.helpers.twin import Failing, assert_same, assert_same_tensors, twins
from tests.promise.layers import Apply

CHECKPOINTS = ["never", "except_last", "always"]
CHECKPOINT = pytest.mark.parametrize("checkpoint", CHECKPOINTS)
LIMITS = [None, 0, 500]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), scale(6), nn.Linear(6, 3))


def pair(**options: Any) -> tuple[nn.Sequential, SplitPipe]:
    return twins(layers(), [2, 3], chunks=3, **options)


def gradients(module: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in module.parameters()]


@pairwise(checkpoint=CHECKPOINTS, stash_limit=LIMITS, by=["balance", "cuts"],
          chosen=[["0.weight"], ["4.bias"], ["2.bias", "0.weight"], ["4.weight", "0.bias"], ["input"]])
def test_gradients_of_some_parameters_and_of_all_of_a_retained_graph(checkpoint, stash_limit, by, chosen):
    plain, model = pair(checkpoint=checkpoint, stash_limit=stash_limit, by=by)
    given, found = torch.randn(7, 4), []
    for each in (plain, model):
        x = given.clone().requires_grad_()
        leaves, loss = {**dict(each.named_parameters()), "input": x}, each(x).square().sum()
        grads = torch.autograd.grad(loss, [leaves[name] for name in chosen], retain_graph=True)
        loss.backward(inputs=[x, leaves["2.weight"]], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time.*retain_graph=True"):
            loss.backward()
        found.append([*grads, x.grad])
    assert_same(found[1], found[0], "gradients")
    assert_same_tensors(model, plain)


@CHECKPOINT
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_a_backward_of_a_retained_graph_has_no_gradients_of_an_earlier_one(by: str, checkpoint: str) -> None:
    layer = Call(lambda x, w: (Scale.apply(x[:, 0], w), x[:, 1].exp()), w=torch.randn(3))
    plain, model = twins(nn.Sequential(layer, nn.Identity()), by=by, chunks=2, checkpoint=checkpoint)
    x, found = torch.randn(4, 2, 3).requires_grad_(), []
    for each in (model, plain):
        for y, wanted in zip(each(x), ([x], [x, *each.parameters()])):
            found.append(torch.autograd.grad(y.sum(), wanted, retain_graph=True, allow_unused=True))
    assert_same(found[:2], found[2:], "gradients")


@CHECKPOINT
@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt()])
def test_a_failed_backward_of_a_retained_graph_may_be_run_again(checkpoint: str, error: BaseException) -> None:
    failures, fired, own = list[BaseException](), list[None](), layers()
    model = SplitPipe(nn.Sequential(own[0], Failing(failures), *own[2:]), [2, 3], devices=["cpu"] * 2, chunks=3,
                      checkpoint=checkpoint)
    plain, x = copy.deepcopy(nn.Sequential(*model)), torch.randn(7, 4)
    model[0].weight.register_hook(lambda grad: fired.append(None))
    loss = model(x).square().sum()
    failures.append(error)
    with pytest.raises(type(error)):
        loss.backward(retain_graph=True)
    model.zero_grad()
    assert not fired
    loss.backward()
    plain(x).square().sum().backward()
    assert_same_tensors(model, plain)
    assert fired == [None]


def default_device() -> AbstractContextManager[Any]:
    return torch.device("meta")


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pairwise(around=[torch.inference_mode, default_device, autocast], retained=[False, True], checkpoint=CHECKPOINTS,
          stash_limit=LIMITS)
def test_backward_in_another_mode(around: Any, stash_limit: int | None, checkpoint: str, retained: bool) -> None:
    plain, model = pair(stash_limit=stash_limit, checkpoint=checkpoint)
    x = torch.randn(7, 4)
    if around is autocast:  # It casts no doubles.
        plain, model, x = plain.float(), model.float(), x.float()
    for each in (plain, model):
        loss = each(x).square().mean()
        if retained:
            loss.backward(retain_graph=True)
        grad = torch.ones_like(loss)
        with nullcontext() if each is plain and around is autocast else around():  # It casts in a plain backward.
            loss.backward(grad)
    assert_same_tensors(model, plain)


def test_a_backward_within_a_backward_of_the_same_call_is_an_error() -> None:
    armed = [1]
    again = Apply(lambda x: x.register_hook(
        lambda _: loss.backward(retain_graph=True) if armed and armed.pop() else None) and x * 1)
    model = SplitPipe(nn.Sequential(nn.Linear(4, 5), again, nn.Linear(5, 3)), [3], devices=["cpu"], chunks=3,
                      checkpoint="never")
    loss = model(torch.rand(6, 4)).square().sum()
    with pytest.raises(RuntimeError, match="one at a time, or SplitPipe.*backward='autograd'"):
        loss.backward(retain_graph=True)
    loss.backward()


def test_in_a_thread_that_python_did_not_start_all_ops_run_in_turn() -> None:
    """Autograd's device threads are such: workers whose B needs one of these would wait for it, and it for them."""
    threads: list[int] = []
    between = Apply(lambda x: x.register_hook(lambda _: threads.append(threading.get_ident())) and x * 1)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = SplitPipe(nn.Sequential(plain[0], between, plain[1], between), [2, 2], devices=["cpu"] * 2, chunks=3)
    plain = copy.deepcopy(plain)
    x, ended = torch.randn(7, 4), threading.Event()
    loss = model(x).square().sum()

    def backward() -> None:
        threads.append(threading.get_ident())
        loss.backward()
        ended.set()

    _thread.start_new_thread(backward, ())
    assert ended.wait(30) and len(threads) == 7 and len({*threads}) == 1
    plain(x).square().sum().backward()
    assert_same(gradients(model), gradients(plain), "gradients")


@pytest.mark.draws
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("draws", [True, False])
def test_a_backward_of_an_earlier_call_inside_a_stage_does_not_wait_for_it(draws: bool, checkpoint: str) -> None:
    """Of a model that draws as this one does, or of this one, whose threads it needs."""
    earlier: list[Tensor] = []
    run = Apply(lambda x: x.register_hook(lambda _: earlier.pop().backward() and None if earlier else None) and x * 1)
    inner, outer = (SplitPipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5 * draws), each, nn.Tanh()), balance=[3, 1],
                              devices=["cpu", "cpu"], chunks=2, checkpoint=checkpoint)
                    for each in (nn.Linear(4, 4), run))
    model, x = inner if draws else outer, torch.rand(4, 4)
    for _ in range(2):
        earlier[:] = [model(x).sum()]
        outer(x).sum().backward()
        assert not earlier
    assert None not in gradients(model)
