"""Random numbers: masks agree with recomputation, seeded steps repeat to the last bit, and generators go on."""
from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.covering import pairwise
from tests.helpers.twin import Looped
from tests.promise.layers import Apply

pytestmark = pytest.mark.draws
CHECKPOINTS = ["always", "except_last", "never"]


def piped(*layers: nn.Module, by: str = "balance", schedule: str = "gpipe", **options: Any) -> SplitPipe:
    """A layer a stage; between layers by cuts code may draw, too."""
    if schedule != "gpipe":
        options |= {"schedule": schedule, "loss_fn": lambda y, _: y.mean()}
    options = {"devices": ["cpu"] * len(layers), "chunks": 3, "checkpoint": "always", **options}
    if by == "balance":
        return SplitPipe(nn.Sequential(*layers), [1] * len(layers), **options)
    module = Between(*layers) if by == "between" else Looped(*layers)
    return SplitPipe(module, cuts=[str(k) for k in range(1, len(layers))], **options)


class Between(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = F.dropout(layer(x), 0.1)
        return x


def stepped(model: SplitPipe, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a step, and the gradient of its input."""
    x = x.clone().requires_grad_()
    loss = model(x, target=torch.zeros(len(x))) if model.schedule.name != "gpipe" else model(x).mean()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def gradient(model: SplitPipe, x: Tensor) -> Tensor:
    """That of the input of a step."""
    return stepped(model, x)[1]


@pairwise(by=["balance", "cuts", "between"], schedule=["gpipe", "1f1b", "zb-h1"], backward=["split", "autograd"])
def test_the_step_of_any_checkpoint_mode_is_that_of_another_the_first_one_too(by, schedule, backward):
    """A linear function: the gradients of all entries, times the entries, sum to the loss, whatever the masks are."""
    x, found = torch.rand(6, 32), []
    for checkpoint in CHECKPOINTS:
        model = piped(nn.Dropout(0.5), nn.Dropout(0.3), nn.Dropout(0.2), by=by, checkpoint=checkpoint,
                      schedule=schedule, backward=backward)
        for _ in range(2):
            torch.manual_seed(3)
            loss, grad = stepped(model, x)
            torch.testing.assert_close((grad * x).sum(), loss)
            found.append(grad)
    assert all(found[0].equal(grad) for grad in found)
    assert (found[0] == 0).any() and len({*map(str, found[0].chunk(3))}) == 3, "microbatches draw different masks"


@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_no_stage_draws_for_a_microbatch_what_another_draws_for_any(by: str) -> None:
    drawn: list[float] = []
    layers = [Apply(lambda x: drawn.append(torch.rand(()).item()) or x * 1) for _ in range(2)]
    piped(*layers, by=by)(torch.ones(6, 4))
    assert len(drawn) == len({*drawn}) == 6


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_layer_that_begins_to_draw_is_an_error_once(schedule: str) -> None:
    begun: list[bool] = []
    later = Apply(lambda x: F.dropout(x, 0.5) if begun else x * 1)
    draw = partial(torch.rand, 1, generator=torch.Generator())  # As the error says, of a thread: it isn't noticed.
    beside = Apply(lambda x: (thread := threading.Thread(target=draw)).start() or thread.join() or x * 1)
    model, x = piped(nn.Sequential(beside, later), nn.Tanh(), schedule=schedule), torch.ones(6, 32)
    gradient(model, x)
    begun.append(True)
    with pytest.raises(RuntimeError, match="drew random numbers.*Repeat the step"):
        gradient(model, x)
    # The gradient of each entry is that of its own mask.
    grad = gradient(model, x)
    right = 2 * (1 - torch.tanh(torch.tensor(2.0)) ** 2) / x.numel()
    torch.testing.assert_close(grad, right * (grad != 0))
    for draws in (False, True):  # It may draw in some steps only.
        begun[:] = [True] * draws
        gradient(model, x)


def test_a_model_that_draws_in_training_only_goes_back_and_forth() -> None:
    model, x = piped(nn.Dropout(0.5), nn.Tanh()), torch.ones(6, 32)
    for training in (False, True, False, True):
        model.train(training)
        state = torch.default_generator.get_state()
        grad = gradient(model, x)
        assert bool((grad == 0).any()) is training
        assert torch.default_generator.get_state().equal(state) is not training


@pytest.mark.parametrize("draws", [True, False])
def test_ops_of_a_model_that_draws_run_one_after_another_and_others_beside_each_other(draws: bool) -> None:
    threads: set[threading.Thread] = set()
    layer = Apply(lambda x: (threads.add(threading.current_thread()), F.dropout(x, 0.5) if draws else x * 1)[1])
    model = piped(layer, layer, checkpoint="never", chunks=4)
    for _ in range(2):
        threads.clear()
        gradient(model, torch.ones(8, 4))
    assert threads == {threading.current_thread()} if draws else len(threads) == 2
