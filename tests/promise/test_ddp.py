"""DistributedDataParallel around a pipeline: two processes train as one would on the data of both."""
from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers import scheduled, twin
from tests.helpers.compiling import EAGER
from tests.helpers.modules import module_of
from tests.helpers.world import SIZE, both

#: A schedule or none, and options.
Way = tuple[str | None, dict[str, Any]]
WAYS: dict[str, Way] = {
    "always": (None, {"checkpoint": "always"}),
    "never, autograd": (None, {"checkpoint": "never", "backward": "autograd"}),
    "cuts": (None, {"by": "cuts"}),
    "1f1b": ("1f1b", {}),
    "zb-h1, always": ("zb-h1", {"checkpoint": "always"}),
    "zb-h1, cuts": ("zb-h1", {"by": "cuts"}),
    "zb-v": ("zb-v", {}),
    "v-half, autograd": ("v-half", {"backward": "autograd"}),
    "compiled": (None, {"checkpoint": "never", "compile": EAGER}),
    "zb-h1, always, compiled": ("zb-h1", {"checkpoint": "always", "compile": EAGER}),
}
ways = pytest.mark.parametrize("way", [
    pytest.param(way, id=name, marks=[pytest.mark.compiles] * ("compiled" in name)) for name, way in WAYS.items()
])


def sparing(self: Any, x: Tensor) -> Tensor:
    """A linear layer, and one that only some processes use."""
    y: Tensor = self.layer(x)
    return y + self.spare(x).sin() if self.rank in self.users else y


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), *more, nn.Linear(6, 3)).double()


def data(rank: int, rows: tuple[int, ...] = (5, 7)) -> Tensor:
    """A batch of the process, of another size than the other's, which three microbatches do not divide."""
    generator = torch.Generator().manual_seed(int(torch.randint(1000, ())) + rank)
    return torch.randn(rows[rank], 6, dtype=torch.float64, generator=generator)


def square(output: Tensor, target: Any) -> Tensor:
    return F.mse_loss(output, torch.full_like(output, target))


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return scheduled.loss_of(module, x, loss_fn=square)


def twins(module: nn.Sequential, way: Way, balance: list[int] | None = None,
          **more: Any) -> tuple[nn.Sequential, SplitPipe]:
    name, options = way[0], {"chunks": 3, **way[1], **more}
    if "compile" in options:
        warnings.filterwarnings("ignore", "The .grad attribute")  # Torch's, which it hides from users.
        torch._dynamo.reset()
    return scheduled.twins(module, name, 2, balance or ([2, len(module) - 2] if name is None else None),
                           loss_fn=square, **options)


def train(rank: int, plain: nn.Sequential, model: SplitPipe, wrap: dict[str, Any], batches: int = 1,
          rows: tuple[int, ...] = (5, 7)) -> None:
    """Trains both for some steps of that many batches, and compares after each backward that communicates."""
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model, **wrap)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (parallel, plain)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in range(batches):
            seed = int(torch.randint(1000, ()))
            for process in range(SIZE):
                at(plain, process)
                torch.manual_seed(seed)
                (loss_of(plain, data(process, rows)) / SIZE).backward()
            at(model, rank)
            torch.manual_seed(seed)
            with nullcontext() if batch + 1 == batches else parallel.no_sync():
                loss_of(parallel, data(rank, rows)).backward()
        twin.assert_same_tensors(model, plain)
        for optimizer in optimizers:
            optimizer.step()


def at(module: nn.Module, rank: int) -> None:
    for part in module.modules():
        if hasattr(part, "rank"):
            part.rank = rank  # type: ignore[assignment]


@ways
@pytest.mark.parametrize(("wrap", "batches", "rows"), [
    ({}, 1, (5, 7)), ({}, 3, (5, 7)), ({}, 1, (1, 8)), ({"static_graph": True}, 1, (5, 7)),
    ({"gradient_as_bucket_view": True}, 2, (5, 7)),
], ids=["plainly", "without sync", "fewer microbatches", "a static graph", "views of buckets"])
@both
def test_two_processes_train_as_one_on_the_data_of_both(rank, way, wrap, batches, rows):
    train(rank, *twins(layers(), way), wrap, batches, rows)


@ways
@pytest.mark.parametrize("users", [(1,), ()])
@both
def test_parameters_that_some_process_does_not_use(rank: int, way: Way, users: tuple[int, ...]) -> None:
    layer = module_of(sparing, layer=nn.Linear(6, 6), spare=nn.Linear(6, 6), users=users, rank=0)
    train(rank, *twins(layers(layer), way), {"find_unused_parameters": True})


@ways
@both
def test_hooks_after_accumulation_are_called_once_in_the_callers_backward_and_each_gradient_is_sent_once(rank, way):
    from torch.nn.parallel import DistributedDataParallel

    model = twins(layers(), way)[1]
    calls, sizes = Counter[str](), list[int]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().numel())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, hook)
    loss = loss_of(parallel, data(rank))
    assert not calls
    loss.backward()
    assert calls == Counter(dict(model.named_parameters()).keys())
    assert sum(sizes) == sum(parameter.numel() for parameter in model.parameters())


@ways
@both
def test_every_forward_starts_from_the_buffers_of_the_first_process(rank: int, way: Way) -> None:
    from torch.nn.parallel import DistributedDataParallel

    module = nn.Sequential(nn.BatchNorm1d(6), *layers()).double()
    with torch.no_grad():
        module.get_buffer("0.running_mean").add_(rank)  # Those of the first process count.
    plain, model = twins(module, way, deferred_batch_norm=True)
    alone, parallel = DistributedDataParallel(plain), DistributedDataParallel(model)
    for _ in range(3):
        x = torch.randn(SIZE, 9, 6, dtype=torch.float64)[rank]
        loss_of(parallel, x).backward()
        alone(x).sum().backward()
        found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
        for name in "0.running_mean", "0.running_var", "0.num_batches_tracked":
            torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize(("way", "where"), [("always", "forward"), ("1f1b", "backward")])
@both
def test_an_exception_in_one_process_is_an_error_in_the_other(rank: int, way: str, where: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def fail(*_: Any) -> None:
        raise ValueError("it is faulty")

    model = twins(layers(nn.Identity()), WAYS[way])[1]
    dist.barrier()  # From here on both are quick, and the group's time is short.
    parallel = DistributedDataParallel(model, process_group=dist.new_group(timeout=timedelta(seconds=5)))
    if rank == 1:
        model[3].register_forward_hook(fail if where == "forward" else lambda _, __, y: y.register_hook(fail) and None)
    with pytest.raises(ValueError, match="it is faulty") if rank == 1 else pytest.raises(RuntimeError):
        loss_of(parallel, torch.randn(6, 6, dtype=torch.float64)).backward()
