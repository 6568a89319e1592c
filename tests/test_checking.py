"""``splitpipe.check``: it finds what is silently different in microbatches, is quiet otherwise, and changes nothing."""
from __future__ import annotations

import copy
import math
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe, check
from splitpipe.checking.check import Check
from tests.helpers.faults import throws
from tests.helpers.modules import module_of

CPUS = ["cpu", "cpu"]
ROWS, WIDTH = 16, 6


class Net(nn.Module):
    """Two layers, with ``between`` in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls, self.state = 0, SimpleNamespace(calls=0)
        self.teacher = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.ones(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.between(self.first(x))
        return self.last(y) if y.dtype == x.dtype else y

    def between(self, x: Tensor) -> Tensor:
        return x.tanh()


def _divides(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda grad: grad / grad.norm())
    return y


def _counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * (1 + self.calls)


def _counts_in_an_object(self: Any, x: Tensor) -> Tensor:
    self.state.calls += 1
    return x * (1 + self.state.calls)


def _counts_unused(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x


def _averages(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x


def _queues(self: Any, x: Tensor) -> Tensor:
    y = x + self.queue.mean(0)
    self.queue = torch.cat([self.queue, x.detach()])[-4:]
    return y


def _teaches(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.teacher.mul_(0.9).add_(self.first.weight, alpha=0.1)
    return x


def _fills(self: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[0] = x.sum(0)
    return y


#: What a forward does between two stages that is silently different in microbatches.
SILENT = {
    "mean over rows": lambda self, x: x - x.mean(0),
    "sorted rows": lambda self, x: x.sort(0).values,
    "positions of rows": lambda self, x: x + torch.arange(len(x), dtype=x.dtype)[:, None],
    "the last row": lambda self, x: x + x[-1],
    "number of rows": lambda self, x: x * len(x),
    "pairs of rows": lambda self, x: x + x.view(2, -1, WIDTH).flip(0).view(-1, WIDTH),
    "a sum in one row": _fills,
    "a backward over the batch": _divides,
    "a counter": _counts,
    "a counter in an object": _counts_in_an_object,
    "a counter that nothing uses": _counts_unused,
    "a moving average": _averages,
    "a queue of rows": _queues,
    "an average of parameters": _teaches,
    "numbers of rows": lambda self, x: torch.arange(len(x)) + 100000,
    "nothing finite": lambda self, x: (x - x.mean(0)) * math.nan,
    "imaginary parts": lambda self, x: torch.complex(x, (x - x.mean(0)).detach()),
}


@pytest.mark.filterwarnings("ignore:the loss")
@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("how", [
    {}, {"checkpoint": "never"}, {"checkpoint": "always"}, {"schedule": "1f1b", "loss_fn": F.mse_loss},
], ids=["drop-in", "never", "always", "1f1b"])
def test_what_microbatches_compute_otherwise_is_found(name: str, how: dict[str, Any]) -> None:
    net = type("Net", (Net,), {"between": SILENT[name]})()
    model = SplitPipe(net, cuts=["last"], devices=CPUS, chunks=4, **how)
    target = {"target": torch.randn(ROWS, WIDTH)} if "schedule" in how else {}
    if target and name in ("numbers of rows", "imaginary parts", "nothing finite"):
        return  # These have no loss.
    for _ in range(2):
        found = check(model, torch.randn(ROWS, WIDTH), **target)
        assert not found, str(found)
        assert name != "a counter that nothing uses" or "different: calls" in str(found)
        with pytest.raises(RuntimeError, match=r"Not the same(.|\n)*(See docs/limits.md|finite .*concluded)"):
            found.raise_if_different()


@pytest.mark.parametrize("loss_fn", [
    lambda y, t: F.cross_entropy(y @ t.T, torch.arange(len(y))), lambda y, t: F.mse_loss(y, t) * len(y) ** 0.5,
], ids=["contrastive", "a root of the rows"])
@pytest.mark.filterwarnings("ignore:the loss")
def test_a_loss_over_the_whole_batch_is_found(loss_fn: Any) -> None:
    model = SplitPipe(Net(), cuts=["last"], devices=CPUS, chunks=4, schedule="zb-h1", loss_fn=loss_fn)
    found = check(model, torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, WIDTH))
    assert [*found.different] == ["loss", "gradients", "state"]
    assert found.different["loss"] and "reduction=" in str(found)


def _layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), *more, nn.Dropout(), nn.Linear(8, 3))


class Encoder(nn.Module):
    """Attention and dropout, with the loss in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(8, 9)
        self.drop_path = 0.5

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = F.dropout(self.embed(ids), self.drop_path, self.training)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return {"logits": logits} if labels is None else {
            "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits
        }


@pytest.mark.parametrize("how", [{}, {"checkpoint": "always"}, {"backward": "autograd"}, {"schedule": "1f1b"},
                                 {"schedule": "zb-h1"}], ids=lambda how: "-".join(map(str, how.values())) or "drop-in")
def test_it_is_quiet_where_rows_are_independent(how: dict[str, Any]) -> None:
    own = {**how, "loss_fn": F.cross_entropy} if "schedule" in how else how
    x, y = torch.randn(11, WIDTH), torch.randint(3, (11,))
    target: dict[str, Any] = {"target": y} if "schedule" in how else {"loss": lambda output: F.cross_entropy(output, y)}
    for more in [nn.BatchNorm1d(8)], [nn.LayerNorm(8), nn.GELU()]:
        model = SplitPipe(_layers(*more), devices=CPUS, chunks=4, **own)
        found = check(model, x, **target)
        assert found, str(found)
    net = splitpipe.attach(Encoder(), cuts=["blocks.1"], devices=CPUS, chunks=3, **how)
    ids = torch.randint(9, (7, 5))
    found = check(net, ids, labels=ids)
    assert found and "The same." in str(found), str(found)
    assert {*found.different} == {"outputs", "loss", "gradients"}


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_mean_of_two_losses_is_not_taken_for_one_of_two_rows(schedule: str | None) -> None:
    class Answers(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            first, last = super().forward(x).chunk(2, 1)
            assert len(labels.shape) == 1
            return {"loss": (F.cross_entropy(first, labels) + F.cross_entropy(last, labels)) / 2}

    labels = torch.randint(WIDTH // 2, (ROWS,))
    labels[[0, 4, 5]] = -100
    model = SplitPipe(Answers(), cuts=["last"], devices=CPUS, chunks=4, schedule=schedule)
    assert check(model, torch.randn(ROWS, WIDTH), labels)


@pytest.mark.draws
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("numbers", [None, torch.Generator()], ids=["the default", "a generator of its own"])
def test_a_module_that_draws_is_compared_in_eval_mode_and_not_blamed_if_it_draws_there(numbers, always):
    class Noisy(Net):
        def between(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape, generator=self.numbers) if always or self.training else x

    net = Noisy()
    net.numbers = numbers  # type: ignore[assignment]
    model = SplitPipe(net, cuts=["last"], devices=CPUS, chunks=4)
    found = check(model, torch.randn(ROWS, WIDTH))
    assert "eval mode, since" in str(found) and model.training and bool(found) is not always
    assert not always or "nothing can be concluded" in str(found) and "Rows meet" not in str(found)


@pytest.mark.draws
@pytest.mark.filterwarnings("ignore:the loss")
def test_a_schedule_runs_though_a_part_draws() -> None:
    class Balanced(Net):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x)
            return {"loss": ((x > 0).float().mean(0) * y.mean(0)).sum()}  # averaged with a schedule, else exact

    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (torch.rand([]) >= 0) if self.training else x)  # as a layer is dropped

    net = Balanced()
    net.first = Drawing(WIDTH, WIDTH)
    model = splitpipe.attach(net, cuts=["last"], devices=CPUS, chunks=4, schedule="zb-h1")
    found = check(model, torch.randn(ROWS, WIDTH))
    assert "eval mode, since" in str(found) and found.different["gradients"]


def test_each_run_gets_the_batch_as_it_is() -> None:
    model = SplitPipe(nn.Sequential(nn.ReLU(inplace=True), *_layers()), [2, 2], devices=CPUS, chunks=4)
    x = torch.randn(8, WIDTH)
    before = x.clone()
    assert check(model, x, loss=lambda output: output.sum()) and torch.equal(x, before)


def test_it_compares_with_another_module() -> None:
    plain = _layers()
    model = SplitPipe(copy.deepcopy(plain), [2, 1], devices=CPUS, chunks=4)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(3, (ROWS,))
    assert check(model, x, against=plain)
    with torch.no_grad():
        plain[0].bias.add_(1)
    found = check(model, x, against=plain, rows=6)
    assert not found and str(found).startswith("6 rows through Sequential, and in 3")
    model = SplitPipe(copy.deepcopy(plain), [2, 1], devices=CPUS, chunks=4, schedule="1f1b", loss_fn=F.cross_entropy)
    assert check(model, x, target=y, against=plain) and check(model, x, y)
    plain[0].bias.requires_grad_(False)
    assert check(model, x, target=y, against=plain).different["gradients"] == ["0.bias"]


@pytest.mark.parametrize(("output", "name"), [
    (lambda y, x: {"y": y, "n": float(len(x))}, "n"),
    (lambda y, x: (y + y.detach().mean(0)).masked_fill(x < 0, -1e9), "the output"),
], ids=["no tensor", "a large fill"])
def test_what_an_output_holds_is_compared(output: Any, name: str) -> None:
    net = type("Net", (Net,), {"forward": lambda self, x: output(Net.forward(self, x), x)})()
    found = check(SplitPipe(net, cuts=["last"], devices=CPUS, chunks=4), torch.randn(ROWS, WIDTH))
    assert found.different["outputs"] == [name]


def test_a_pipeline_whose_forward_was_wrapped_is_compared_all_the_same() -> None:
    net = type("Net", (Net,), {"between": SILENT["mean over rows"]})()
    model = SplitPipe(net, cuts=["last"], devices=CPUS, chunks=4)
    forward = model.forward
    model.forward = lambda *args: forward(*args)  # type: ignore[method-assign, assignment]
    assert not check(model, torch.randn(ROWS, WIDTH))


@pytest.mark.filterwarnings("ignore:argument 'mask' has the shape")
@pytest.mark.parametrize("size", [8, 16])
def test_with_fewer_rows_an_argument_is_treated_as_with_all(size: int) -> None:
    class Masked(Net):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * mask.sum()

    model = SplitPipe(Masked(), cuts=["last"], devices=CPUS, chunks=4)
    found = check(model, torch.randn(32, WIDTH), torch.randn(size, size))
    assert found, str(found)


def test_what_is_rounding_and_what_rows_do_to_attributes_is_no_difference() -> None:
    class Sized(Net):
        def between(self, x: Tensor) -> Tensor:
            self.rows, self.norm = len(x), x.norm().item()
            return x

    assert check(SplitPipe(Sized(), cuts=["last"], devices=CPUS, chunks=4), torch.randn(ROWS, WIDTH))
    convolutions = [layer for k in range(4) for layer in (nn.Conv2d(16 if k else 3, 16, 3, padding=1), nn.ReLU())]
    layers = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    model, y = SplitPipe(layers, [5, 6], devices=CPUS, chunks=4), torch.randint(5, (8,))
    found = check(model, torch.randn(8, 3, 32, 32), loss=lambda output: F.cross_entropy(output, y))
    assert found, str(found)


@pytest.mark.draws
@pytest.mark.parametrize("options", [{}, {"checkpoint": "never"}, {"schedule": "1f1b", "loss_fn": F.mse_loss}])
def test_microbatches_surely_overwrite_an_attribute_that_they_share_before_any_call(options: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.mean = x.mean(1, keepdim=True)
        return self.last(self.first(x - self.mean)) + self.mean

    model = module_of(forward, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH))
    splitpipe.attach(model, cuts=["last"], devices=CPUS, chunks=4, **options)
    x = torch.randn(ROWS, WIDTH)
    assert not check(model, x, **({"target": x} if "schedule" in options else {}))


def test_sparse_buffers_and_gradients_are_compared_too() -> None:
    net = module_of(lambda net, x: net.last(net.first(x)), first=nn.Embedding(9, WIDTH, sparse=True),
                    last=nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    net.register_buffer("heads", torch.eye(3).to_sparse())
    found = check(splitpipe.attach(net, devices=CPUS, chunks=4), torch.randint(9, (ROWS,)))
    assert found, str(found)


def test_differences_that_a_cast_may_have_made_are_said_to_be_that() -> None:
    net = type("Casting", (Net,), {"between": lambda net, x: F.linear(x.float(), net.first.weight.float()).double()})()
    model = SplitPipe(net.double(), cuts=["last"], devices=CPUS, chunks=4)
    found = check(model, x := torch.randn(ROWS, WIDTH).double())
    assert not found and "this may be rounding" in str(found) and check(model, x, tolerance=1e-3)


def centring(self: Any, y: Tensor, target: Tensor) -> Tensor:
    """A loss with a buffer."""
    self.centre.data.mul_(0.9).add_(y.detach().mean(0))
    return F.mse_loss(y, target)


class Writing(Net):
    """Writes to whatever a forward can write to."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen, self.kinds = torch.zeros(()), deque([1]), Counter(a=1)
        self.generator = torch.Generator()
        with torch.inference_mode():
            self.register_buffer("fixed", torch.ones(2))

    def between(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        self.count += 1
        self.seen.append(x.detach())
        self.kinds["b"] += 1
        random.random(), numpy.random.rand(), torch.rand(1, generator=self.generator)
        return _queues(self, _counts(self, x))


def test_nothing_is_changed_whatever_a_run_writes_and_if_it_fails() -> None:
    def state() -> list[Any]:
        values = [x.tolist() for x in (*net.state_dict().values(), net.count, loss_fn.centre)]
        drawn = [random.getstate(), numpy.random.get_state()[1].tolist()]
        drawn += [torch.get_rng_state().tolist(), net.generator.get_state().tolist()]
        return [*values, *drawn, net.calls, [*net.seen], {**net.kinds}, [part.training for part in net.modules()]]

    net, loss_fn, hooked = Writing(), module_of(centring, centre=nn.Buffer(torch.zeros(WIDTH))), list[Tensor]()
    model = SplitPipe(net, cuts=["last"], devices=CPUS, chunks=4, schedule="1f1b", loss_fn=loss_fn)
    net.first.register_forward_hook(lambda layer, args, output: net.seen.append(output.detach()))
    for x in [*net.first.parameters(), *net.last.parameters()]:
        x.register_post_accumulate_grad_hook(hooked.append)
        x.grad = torch.ones_like(x)
    before, runtime, grads = state(), vars(model)["_runtime"], [x.grad for x in net.parameters()]
    given = torch.randn(2, ROWS, WIDTH, generator=torch.Generator())
    assert not check(model, given[0], target=given[1]) and state() == before
    net.last.bias.register_hook(throws(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        check(model, given[0], target=given[1])
    assert state() == before and not hooked and all(x.grad is grad for x, grad in zip(net.parameters(), grads))
    assert all(grad is None or grad.eq(1).all() for grad in grads)
    assert vars(model)["_runtime"] is runtime is vars(model)["forward"].runtime


def test_a_hook_that_the_first_call_sets_is_not_set_twice() -> None:
    class Recording(Net):
        recorded = False

        def between(self, x: Tensor) -> Tensor:
            if not self.recorded:
                self.recorded = True
                self.last.register_forward_hook(lambda layer, args, output: output * 2)
            return x

    model = SplitPipe(Recording(), cuts=["last"], devices=CPUS, chunks=4)
    assert check(model, torch.randn(ROWS, WIDTH)) and not model.last._forward_hooks and not model.recorded


@pytest.mark.draws
def test_what_cannot_be_compared_is_an_error() -> None:
    model, x = SplitPipe(_layers(), [2, 1], devices=CPUS, chunks=4), torch.randn(8, WIDTH)
    assert isinstance(check(model, x[:2]), Check)
    net = splitpipe.attach(Net(), cuts=["last"], devices=CPUS, chunks=4)
    wrong: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
        ((model, x[:1]), ValueError, "one microbatch", {}), ((model,), TypeError, "positional argument: 'input'", {}),
        ((model, x), TypeError, "loss returned a float", {"loss": lambda output: output.sum().item()}),
        ((model, x), ValueError, "both loss and target", {"target": x, "loss": lambda output: output.sum()}),
        ((model, x), TypeError, "unexpected keyword argument 'target'", {"target": x}),
        ((net, x), TypeError, "against is a Net: expected an nn.Module that isn't a pipeline", {"against": net}),
    ]
    for args, error, message, options in wrong:
        with pytest.raises(error, match=message):
            check(*args, **options)
