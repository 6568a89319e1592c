"""A loss of the user's own is compared once with that of its halves: sums are refused, what is no mean warned of."""
from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from splitpipe import SplitPipe
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import flat, mlp, twins
from tests.helpers.twin import assert_same_tensors

Loss = Callable[[Tensor, Any], Any]


def model_of(loss_fn: Loss, name: str = "1f1b", **options: Any) -> SplitPipe:
    return twins(mlp(4), name, 2, loss_fn=loss_fn, **{"chunks": 2, **options})[1]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.arange(rows) % 4


class Counted:
    """Counts calls of a loss."""

    def __init__(self, loss_fn: Loss) -> None:
        self.loss_fn = loss_fn
        self.calls = 0

    def __call__(self, output: Tensor, target: Any) -> Any:
        self.calls += 1
        return self.loss_fn(output, target)

    def method(self, output: Tensor, target: Any) -> Any:
        return self(output, target)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.unsqueeze(1)).square().mean()


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.unsqueeze(1)).square().sum()


def rooted(output: Tensor, target: Tensor) -> Tensor:
    return mean(output, target).sqrt()


@pytest.mark.parametrize("rows", [8, 7, 5, 2])
@pytest.mark.parametrize("way", ["schedule", "gpipe", "checkpointed", "no grad", "autocast"])
def test_a_sum_is_refused_in_every_call_and_told_how_to_be_one(rows: int, way: str) -> None:
    model = model_of(total, **{"gpipe": {"name": "gpipe"}, "checkpointed": {"checkpoint": "always"}}.get(way, {}))
    x, y = batch(rows)
    for _ in range(2):
        with torch.set_grad_enabled(way != "no grad"), torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            with pytest.raises(ValueError, match=r"gives a sum over the rows.*Return \(total, len\(output\)\)") as info:
                model(x, target=y)
        assert "layer 'loss_fn'" in " ".join(info.value.__notes__)


def test_a_sum_is_shown_with_the_rows_that_it_was_of() -> None:
    model = model_of(lambda output, target: (output - output.detach() + 1).sum() / 4, chunks=1)
    with pytest.raises(ValueError, match=re.escape("(5 for 5 rows; 2 for 2 of them, 3 for the other 3)")):
        model(*batch(5))


def test_an_output_of_a_number_of_rows_of_its_own_is_not_compared() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[1:]

    loss = lambda output, target: output.square().mean() + target.float().mean()  # noqa: E731
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), Drops()), "1f1b", 2, loss_fn=loss, chunks=1)
    x, y = batch(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model(x, target=y), loss(plain(x), y))


def test_the_pair_that_the_error_shows_is_right() -> None:
    x, y = batch(7)
    for count, expected in (lambda output: len(output), "mean"), (lambda output: len(output) / 7, "sum"):
        loss_fn = lambda output, target: (total(output, target), count(output))  # noqa: B023, E731
        plain, model = twins(mlp(4), "1f1b", 2, loss_fn=loss_fn, chunks=3)
        whole = total(plain(x), y) / (7 if expected == "mean" else 1)
        torch.testing.assert_close(model(x, target=y), whole)


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


@pytest.mark.parametrize(("loss_fn", "zeros"), [(rooted, 0), (ignoring, 2), (ignoring, 3)])
def test_what_is_no_mean_is_warned_of_once_a_model(loss_fn: Loss, zeros: int) -> None:
    model = model_of(loss_fn)
    x, y = batch()
    y[:zeros] = 0
    with pytest.warns(UserWarning, match=r"no mean over the rows of a microbatch.*Return a pair") as found:
        model(x, target=y)
    assert len(found) == 1
    model(x, target=y)
    model.eval()(x, target=y)
    with pytest.warns(UserWarning, match="no mean"):
        copy.deepcopy(model)(x, target=y)


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_rows_that_are_each_others_negatives_are_warned_of(chunks: int) -> None:
    def contrastive(output: Tensor, target: Tensor) -> Tensor:  # Of a single row it is 0, and so is any sum of those.
        return F.cross_entropy(output @ output.t().roll(1, 0), torch.arange(len(output)))

    with pytest.warns(UserWarning, match="no mean over the rows"):
        model_of(contrastive, chunks=chunks)(*batch()[:1], target=batch()[1])


@pytest.mark.parametrize("kind", ["function", "object", "method", "lambda", "module"])
def test_a_mean_is_compared_in_the_first_call_alone(kind: str) -> None:
    counted = Counted(mean)

    class Module(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Any:
            return counted(output, target)

    loss_fn: Any = {"function": counted.__call__, "object": counted, "method": counted.method,
                    "lambda": lambda output, target: counted(output, target), "module": Module()}[kind]
    model = model_of(loss_fn)
    calls = []
    for step in range(3):
        model.train(step != 1)(*batch()[:1], target=batch()[1])
        calls.append(counted.calls)
    assert calls == [4, 6, 8]


def test_a_single_row_tells_a_sum_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="gives a sum over the rows .*for 1 of them, as often again"):
        model_of(total, chunks=8)(*batch()[:1], target=batch()[1])
    model = model_of(rooted, chunks=8)
    model(*batch()[:1], target=batch()[1])
    with pytest.warns(UserWarning, match="no mean"):
        model(torch.randn(16, 4), target=torch.arange(16))


def test_what_can_not_be_decided_is_looked_at_in_the_next_call() -> None:
    scale = [0.0]
    model = model_of(lambda output, target: total(output, target) * scale[0])
    for now in (0.0, float("nan"), float("inf"), 0.0):
        scale[0] = now
        model(*batch()[:1], target=batch()[1])
    scale[0] = 1.0
    with pytest.raises(ValueError, match="gives a sum"):
        model(*batch()[:1], target=batch()[1])
    plain = Counted(lambda output, target: output.sum() * 0)
    model = model_of(plain)
    for _ in range(12):
        model(*batch()[:1], target=batch()[1])
    assert plain.calls == 12 * 2 + 10 * 2, "not forever: each look waits for the device"


def test_a_half_that_counts_nothing_makes_no_sum_of_a_mean() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        used = target != 0
        return (F.cross_entropy(output, target, reduction="none") * used).sum() / used.sum().clamp(min=1)

    model = model_of(loss_fn)
    x, _ = batch()
    model(x, target=torch.tensor([0, 0, 1, 2, 1, 2, 3, 0]))
    with pytest.warns(UserWarning, match="no mean"):
        model(x, target=torch.tensor([0, 3, 1, 2, 1, 2, 3, 0]))


def test_parts_that_cancel_out_are_no_reason_to_warn() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:  # Single precision has rounded 1e4 to a thousandth.
        return (output.float() + torch.tensor([1e4, -1e4, 0, 0])).mean()

    model = model_of(loss_fn)
    model(*batch()[:1], target=batch()[1])


class Noisy(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.own = how, torch.Generator().manual_seed(3)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.how == "dropout":
            return F.dropout(output, 0.5).square().sum()
        return (output * torch.rand(output.shape, generator=self.own)).sum()


@pytest.mark.parametrize("how", ["dropout", "generator"])
def test_what_draws_is_not_believed_and_draws_what_it_would_have(how: str) -> None:
    found = []
    for settled in (False, True):
        torch.manual_seed(0)
        model = model_of(Noisy(how))
        model._runtime._mean_check.settled = settled
        losses = [model(*batch()[:1], target=batch()[1]) for _ in range(2)]
        found.append((torch.stack(losses), torch.get_rng_state(), model._loss_fn.own.get_state()))
    for one, two in zip(*found):
        torch.testing.assert_close(one, two)


class Stateful(nn.Module):
    """Counts, in place and with another tensor, and has its rows in a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.last = output.detach().mean()
        return self.norm(output).square().sum() + output.sum()


def test_buffers_of_a_loss_are_those_of_its_own_calls() -> None:
    found = []
    for settled in (False, True):
        torch.manual_seed(0)
        loss_fn = Stateful()
        model = model_of(loss_fn)
        model._runtime._mean_check.settled = settled
        model(*batch()[:1], target=batch()[1])
        found.append({name: x.clone() for name, x in loss_fn.state_dict().items()})
    torch.testing.assert_close(*found)
    assert found[0]["calls"] == 2


class Alpha(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(2.0))
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return total(output, target) * self.alpha * self.scale


def test_a_module_with_buffers_and_parameters_is_compared() -> None:
    with pytest.raises(ValueError, match="gives a sum"):
        model_of(Alpha())(*batch()[:1], target=batch()[1])


def test_casts_that_autocast_keeps_go_the_way_back_all_the_same() -> None:
    loss_fn = nn.Sequential(nn.Linear(4, 4)).float()

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = loss_fn

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.head(output), target)

    model = SplitPipe(mlp(2).float(), [1, 1], devices=["cpu"] * 2, schedule="1f1b", loss_fn=Head())
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, 4).float(), target=batch()[1]).backward()
    weight: Any = loss_fn[0].weight
    assert weight.grad is not None and weight.grad.any()


def test_hooks_modes_and_compilers_notice_no_more_calls() -> None:
    class Module(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return rooted(output, target)

    loss_fn, seen = Module(), []
    loss_fn.register_forward_hook(lambda *_: seen.append(1))
    model_of(loss_fn)(*batch()[:1], target=batch()[1])
    assert len(seen) == 2
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        model_of(rooted)(*batch()[:1], target=batch()[1])
    finally:
        handle.remove()

    class Modes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def saw(func: Any) -> int:
        return sum(each is func for each in seen)

    with Modes(), pytest.warns(UserWarning, match="no mean"):
        model_of(rooted)(*batch()[:1], target=batch()[1])
    assert saw(Tensor.sqrt) == 2
    with Dispatches():
        model_of(rooted)(*batch()[:1], target=batch()[1])
    assert saw(torch.ops.aten.sqrt.default) == 2
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(1) or x, lambda x: x):
        with pytest.warns(UserWarning, match="no mean"):
            model_of(rooted)(*batch()[:1], target=batch()[1])


def test_a_default_device_holds_for_the_comparison() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert torch.empty(()).device.type == "meta"
        return total(output, target)

    model = model_of(loss_fn)
    x, y = batch()
    with torch.device("meta"), pytest.raises(ValueError, match="gives a sum"):
        model(x, target=y)


def test_a_loss_that_takes_no_half_is_not_compared() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if len(output) < 4:
            raise RuntimeError("too few")
        return total(output, target)

    model = model_of(loss_fn)
    model(*batch()[:1], target=batch()[1]).backward()


def test_a_loss_that_writes_to_its_output_writes_to_its_own() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.mul_(2).square().mean()

    losses = []
    for settled in (False, True):
        torch.manual_seed(0)
        model = model_of(loss_fn)
        model._runtime._mean_check.settled = settled
        losses.append(model(*batch()[:1], target=batch()[1]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("rows", [8, 7])
def test_words_are_rows_of_the_output_where_sentences_are_of_the_target(rows: int) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.flatten(), reduction="sum")

    layers = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1))
    _, model = twins(layers, "1f1b", 2, loss_fn=loss_fn, chunks=2)
    with pytest.raises(ValueError, match="gives a sum"):
        model(torch.randn(rows, 3, 4), target=torch.randint(4, (rows, 3)))


def test_outputs_and_targets_may_be_nested() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, {"twice": x * 2, "name": "pair"}

    def loss_fn(output: Any, target: Any) -> Tensor:
        assert output[1]["name"] == "pair" and target[1] == 3
        return (output[0] * output[1]["twice"] - target[0][:, None]).square().sum()

    _, model = twins(nn.Sequential(*mlp(3), Pair()), "1f1b", 2, loss_fn=loss_fn, chunks=2)
    with pytest.raises(ValueError, match="gives a sum"):
        model(*batch()[:1], target=(batch()[1], 3))


def test_a_model_that_was_pickled_looks_again_and_leaks_nothing() -> None:
    model = model_of(rooted)
    x, y = batch()
    with pytest.warns(UserWarning, match="no mean"):
        model(x, target=y)
    with pytest.warns(UserWarning, match="no mean"):
        pickle.loads(pickle.dumps(model))(x, target=y)

    def again() -> None:
        model._runtime._mean_check.settled = False
        model._runtime._mean_check._left = 10
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(x, target=y).backward()

    assert flat(again)


@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_that_the_loss_makes_is_made_by_the_loss_itself(fails: bool) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", None)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            if self.rows is None:
                self.rows = torch.tensor(len(output))
            if fails and len(output) < 8:
                raise ValueError("too few")
            return (output - target).square().mean()

    loss_fn = Lazy()
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [1, 1], devices=["cpu"] * 2, schedule="1f1b",
                      loss_fn=loss_fn)
    model(torch.randn(8, 4), target=torch.randn(8, 4))
    assert loss_fn.rows is not None and int(loss_fn.rows) == 8


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_loss_that_enables_grad_mode_saves_nothing_for_the_comparison(checkpoint: Any) -> None:
    critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            x = target.detach().requires_grad_()
            slope, = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return F.mse_loss(output, target) + slope.square().sum(1).mean()

    plain, model = twins(mlp(4), "1f1b", loss_fn=penalised, chunks=4, checkpoint=checkpoint)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model(x, target=y).backward()
    penalised(plain(x), y).backward()
    assert_same_tensors(model, plain)
