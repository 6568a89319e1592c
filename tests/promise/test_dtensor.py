"""Tensor parallelism in the stages: two processes share each layer's weights, and their collectives go together."""
from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.covering import graded, pairs
from tests.helpers.world import both

parallel = pytest.importorskip("torch.distributed.tensor.parallel", reason="this build of torch has no DTensor")
tensor = torch.distributed.tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).tanh())


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Mlp(), Mlp(), nn.Linear(6, 6)).double()


@lru_cache(None)
def mesh(number: int) -> Any:
    """Made once a process: each group has a permanent thread, which looks for work a hundred times a second."""
    group = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=40))
    return torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"{number}",))


def shard(module: nn.Module) -> None:
    """Shards each Mlp, with local tensors between them."""
    for part in module.modules():
        if isinstance(part, Mlp):
            plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
            parallel.parallelize_module(part, mesh(0), plan)


class Parts(nn.Module):
    """A linear layer with whole weights, given a part of the rows: each process has a part of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        if not isinstance(self.linear.weight, tensor.DTensor):
            return self.linear(x)
        mesh = self.linear.weight.device_mesh
        shared: Any = tensor.DTensor.from_local(x, mesh, [tensor.Replicate()]).redistribute(mesh, [tensor.Shard(0)])
        return self.linear(shared).redistribute(mesh, [tensor.Replicate()]).to_local()


def in_parts(module: nn.Module) -> None:
    for number, part in enumerate(each for each in module.modules() if isinstance(each, Parts)):
        tensor.distribute_module(part.linear, mesh(number))


class Block(nn.Module):
    """Of a transformer: between the layers, which share the columns and rows, they may share the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def words() -> nn.Sequential:
    """From numbers of words to scores of words."""
    return nn.Sequential(nn.Embedding(10, 6), Block(), Block(), nn.LayerNorm(6), nn.Linear(6, 10)).double()


def in_sequence(module: nn.Module) -> None:
    """Shards words, the sequence too; between layers there are DTensors."""
    plan: dict[str, Any] = {
        "0": parallel.RowwiseParallel(
            input_layouts=tensor.Replicate(), output_layouts=tensor.Shard(1), use_local_output=False),
        "3": parallel.SequenceParallel(),
        "4": parallel.ColwiseParallel(input_layouts=tensor.Shard(1), output_layouts=tensor.Replicate()),
    }
    for at in "12":
        plan[f"{at}.norm"] = parallel.SequenceParallel()
        plan[f"{at}.up"] = parallel.ColwiseParallel(input_layouts=tensor.Shard(1), use_local_output=False)
        plan[f"{at}.down"] = parallel.RowwiseParallel(output_layouts=tensor.Shard(1), use_local_output=False)
    parallel.parallelize_module(module, mesh(0), plan)


def with_parted_scores(module: nn.Module) -> None:
    """Shards words, and of the scores each process has those of its words: as loss_parallel takes them."""
    plan: dict[str, Any] = {"0": parallel.RowwiseParallel(input_layouts=tensor.Replicate()),
                            "4": parallel.ColwiseParallel(output_layouts=tensor.Shard(-1), use_local_output=False)}
    for at in "12":
        plan |= {f"{at}.up": parallel.ColwiseParallel(), f"{at}.down": parallel.RowwiseParallel()}
    parallel.parallelize_module(module, mesh(0), plan)


def entropy(scores: Any, y: Tensor) -> Any:
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def numbers() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 12, 6, dtype=torch.float64)
    return x, y


def text() -> tuple[Tensor, Tensor]:
    return torch.randint(10, (7, 4)), torch.randint(10, (7, 4))


class Model(NamedTuple):
    """A module, how it is sharded, its batches and loss, and what is around its steps."""

    make: Callable[[], nn.Sequential]
    shard: Callable[[nn.Module], None]
    batch: Callable[[], tuple[Tensor, Tensor]] = numbers
    loss_fn: Callable[[Any, Tensor], Any] = F.mse_loss
    around: Callable[[], AbstractContextManager[None]] = nullcontext


#: Layers with local tensors between them; gradients of which each process has a part, in groups of their own; words,
#: with DTensors between layers; and scores of which each process has a part.
MODELS = {"local": Model(layers, shard),
          "parts": Model(lambda: nn.Sequential(nn.Linear(6, 6), nn.Identity(), Parts(), Parts()).double(), in_parts),
          "words": Model(words, in_sequence, text, entropy),
          "parted scores": Model(words, with_parted_scores, text, entropy, around=lambda: parallel.loss_parallel())}
AXES: dict[str, list[Any]] = {
    "name": [*MODELS],
    "way": [(None, "split"), (None, "autograd"), ("1f1b", "split"), ("zb-h1", "split"), ("zb-v", "split"),
            ("zb-h1", "autograd")],
    "checkpoint": ["never", "always"],
    "cuts": [(1,), (2,), (1, 2, 3)],
}


def pipeline(module: nn.Sequential, way: tuple[str | None, str] = (None, "split"), cuts: tuple[int, ...] = (2,),
             loss_fn: Any = F.mse_loss, **options: Any) -> SplitPipe:
    schedule, engine = way
    more: dict[str, Any] = {} if schedule is None else {"schedule": schedule, "loss_fn": loss_fn}
    balance = [end - start for start, end in zip((0, *cuts), (*cuts, len(module)))]
    devices = 2 if schedule == "zb-v" else len(balance)
    return SplitPipe(module, balance, devices=["cpu"] * devices, chunks=3, backward=engine,  # type: ignore[arg-type]
                     **more, **options)


def whole(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def step(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Any = F.mse_loss) -> Tensor:
    loss = scheduled.loss_of(model, x, y, loss_fn)
    (3 * loss).backward()
    return whole(loss).detach()


def assert_same_gradients(model: nn.Module, *others: nn.Module) -> None:
    """The same ones, where the others are sharded in the same placements."""
    for other in others:
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None), name
            if q.grad is not None:
                found, expected = getattr(p.grad, "placements", None), getattr(q.grad, "placements", None)
                assert expected is None or found == expected, f"{name}: {found}, expected {expected}"
                torch.testing.assert_close(whole(p.grad), whole(q.grad), msg=f"{name} of {other}")


@graded(AXES, essence=[["name"]], thorough=pairs([*AXES]),
        allowed=lambda way, cuts, **_: way[0] != "zb-v" or len(cuts) == 3)
@both
def test_sharded_layers_train_as_the_plain_module_and_gradients_keep_placements(rank, name, way, checkpoint, cuts):
    its = MODELS[name]
    plain = its.make()
    module, sharded = copy.deepcopy(plain), copy.deepcopy(plain)
    for each in (module, sharded):
        its.shard(each)
    model = pipeline(module, way, cuts, its.loss_fn, checkpoint=checkpoint)
    collectives: Callable[[], int] = torch._C._distributed_c10d._get_work_registry_size
    for _ in range(2):  # The second step's gradients are added.
        (x, y), before = its.batch(), collectives()
        with its.around():
            loss = step(model, x, y, its.loss_fn)
            assert collectives() == before, "one is left that was not waited for"
            step(sharded, x, y, its.loss_fn)
        torch.testing.assert_close(loss, step(plain, x, y, its.loss_fn))
        assert_same_gradients(model, plain, sharded)
        assert all(type(p.grad) is type(q.grad) for p, q in zip(model.parameters(), sharded.parameters()))
    rows = {row.parameter: row.deferred for row in splitpipe.deferral_report(model)}
    sharded_names = {name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")}
    assert sharded_names and not any(rows[name] for name in sharded_names)
    assert "0.weight" in sharded_names or rows["0.weight"] is (way[1] == "split")


class Masked(Mlp):
    """With dropout of the columns that the process has."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        mask = F.dropout(torch.ones_like(hidden := self.up(x)))
        self.masks.append(mask)
        return self.down(hidden.tanh() * mask)


@pytest.mark.parametrize("way", [(None, "autograd"), ("zb-h1", "split")])
@both
def test_a_recomputation_drops_the_same_columns(rank: int, way: tuple[str | None, str]) -> None:
    module = nn.Sequential(Masked(), Masked(), nn.Linear(6, 6)).double()
    shard(module)
    model = pipeline(module, way, (1,), checkpoint="always")
    torch.manual_seed(rank)
    step(model, *numbers())
    for layer in module[:2]:
        assert [sum(torch.equal(mask, other) for other in layer.masks) for mask in layer.masks] == [2] * 6
