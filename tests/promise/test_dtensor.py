"""Tensor parallelism in the stages: two processes share each layer's weights, and their collectives go together."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.covering import graded, pairs
from tests.helpers.world import both
from tests.promise.layers import Apply


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    pytest.importorskip("torch.distributed.tensor.parallel", reason="needs DTensor, and this build of torch has none")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).tanh())


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Mlp(), Mlp(), nn.Linear(6, 6)).double()


def meshes(count: int) -> list[Any]:
    """Meshes of both processes, each with a group of its own. Torch takes meshes of the same names for one."""
    return [mesh(number) for number in range(count)]


@lru_cache(None)
def mesh(number: int) -> Any:
    """Made once a process: each group has a permanent thread, which looks for work a hundred times a second."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group([0, 1], timeout=timedelta(seconds=40))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"{number}",))


def apart(module: nn.Module) -> None:
    """Shards each Mlp over a mesh of its own."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mlps = [part for part in module.modules() if isinstance(part, Mlp)]
    for part, mesh in zip(mlps, meshes(len(mlps))):
        parallelize_module(part, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(module: nn.Module, between: bool = False) -> None:
    """Shards each Mlp over the processes; between two of them there may be a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    mlps = [part for part in module.modules() if isinstance(part, Mlp)]
    for number, part in enumerate(mlps):
        up, down = ColwiseParallel(), RowwiseParallel()
        if between and number > 0:
            up = ColwiseParallel(input_layouts=Shard(1))
        if between and number + 1 < len(mlps):
            down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        parallelize_module(part, mesh, {"up": up, "down": down})


def pair(module: nn.Sequential, balance: list[int], **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    """The module, and a pipeline of the same, sharded."""
    plain = copy.deepcopy(module)
    shard(module)
    return plain, SplitPipe(module, balance, devices=["cpu"] * len(balance), chunks=3, **options)


def batch() -> Tensor:
    return torch.randn(7, 6, dtype=torch.float64)


def whole(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def backward(module: nn.Module, x: Tensor) -> Tensor:
    output = module(x)
    output.square().sum().backward()
    return whole(output).detach()


def assert_alike(model: nn.Module, *others: nn.Module) -> None:
    """The same gradients, where the others are sharded in the same placements."""
    for other in others:
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None), name
            if q.grad is not None:
                found, expected = getattr(p.grad, "placements", None), getattr(q.grad, "placements", None)
                assert expected is None or found == expected, f"{name}: {found}, expected {expected}"
                torch.testing.assert_close(whole(p.grad), whole(q.grad), msg=f"{name} of {other}")


def assert_same(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """The same outputs and gradients."""
    torch.testing.assert_close(backward(model, x), backward(plain, x))
    assert_alike(model, plain)


#: Engine, checkpoint, and a schedule or none.
Setting = tuple[str, str, str | None]
Loss = Callable[[Any, Tensor], Any]


def pipeline(module: nn.Sequential, setting: Setting, loss_fn: Loss, balance: Sequence[int]) -> SplitPipe:
    engine, checkpoint, schedule = setting
    more: dict[str, Any] = {} if schedule is None else {"schedule": schedule, "loss_fn": loss_fn}
    devices = 2 if schedule == "zb-v" else len(balance)
    return SplitPipe(
        module, [*balance], devices=["cpu"] * devices, chunks=3, backward=engine, checkpoint=checkpoint, **more
    )


def step(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> Tensor:
    loss = scheduled.loss_of(model, x, y, loss_fn)
    (3 * loss).backward()
    return whole(loss).detach()


#: How layers are sharded: in one group, with local tensors between them or with DTensors; in a group for each.
AXES: dict[str, list[Any]] = {
    "how": ["local", "between", "apart"],
    "way": [(None, "split"), (None, "autograd"), ("1f1b", "split"), ("zb-h1", "split"), ("zb-v", "split"),
            ("zb-h1", "autograd")],
    "checkpoint": ["never", "always"],
    "balance": [(1, 3), (2, 2), (1, 1, 1, 1)],
}


@graded(AXES, essence=[["how"]], thorough=pairs([*AXES]),
        allowed=lambda way, balance, **_: way[0] != "zb-v" or len(balance) == 4)
@both
def test_sharded_layers_train_as_the_plain_module_and_gradients_keep_their_placements(
    rank: int, how: str, way: tuple[str | None, str], checkpoint: str, balance: tuple[int, ...]
) -> None:
    plain, module, (schedule, engine) = layers(), layers(), way
    module.load_state_dict(plain.state_dict())
    if how == "apart":
        apart(module)
    else:
        shard(module, how == "between")
    sharded = copy.deepcopy(module)
    model = pipeline(module, (engine, checkpoint, schedule), nn.functional.mse_loss, balance)
    models = model, plain, sharded
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in models]
    collectives: Callable[[], int] = torch._C._distributed_c10d._get_work_registry_size
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y, before = batch(), batch(), collectives()
        loss = step(model, nn.functional.mse_loss, x, y)
        assert collectives() == before, "one is left that was not waited for"
        torch.testing.assert_close(loss, step(plain, nn.functional.mse_loss, x, y))
        step(sharded, nn.functional.mse_loss, x, y)
        assert_alike(*models)
        for p, q in zip(model.parameters(), sharded.parameters()):
            assert type(p.grad) is type(q.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert sum(hasattr(parameter, "placements") for parameter in model.parameters()) == 8
    if how != "between":  # Of sharded layers, and of whole ones behind them; the schedule 1f1b has no W.
        assert {row.deferred for row in model.deferral_report()} == {engine == "split" and schedule != "1f1b"}


class Meeting:
    """Has process 0 ask for the collective of stage 0 first and process 1 for that of stage 1, if threads let them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.threads: dict[int, int] = {}
        self.asked = threading.Event()


class Meets(nn.Module):
    """A layer that meets another stage's in the second clock cycle of two microbatches."""

    def __init__(self, layer: nn.Module, stage: int, meeting: Meeting) -> None:
        super().__init__()
        self.layer = layer
        self.stage = stage
        self.meeting = meeting
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        meeting = self.meeting
        meeting.threads[self.stage] = threading.get_ident()
        meets = len(set(meeting.threads.values())) == 2 and self.calls % 2 == self.stage
        if meets and meeting.rank != self.stage:
            assert meeting.asked.wait(60)
        y: Tensor = self.layer(x)
        if meets and meeting.rank == self.stage:
            meeting.asked.set()
        return y


@pytest.mark.parametrize("how", ["one group", "a group per stage"])
@both
def test_every_process_asks_for_collectives_in_the_same_order(rank: int, how: str) -> None:
    module = nn.Sequential(Mlp(), Mlp()).double()
    plain = copy.deepcopy(module)
    (shard if how == "one group" else apart)(module)
    meeting = Meeting(rank)
    pair = nn.Sequential(*(Meets(layer, stage, meeting) for stage, layer in enumerate(module)))
    model = SplitPipe(pair, [1, 1], devices=["cpu"] * 2, chunks=2)
    for _ in range(2):
        x = batch()
        torch.testing.assert_close(model(x), plain(x))


def nodes(count: int) -> nn.Module:
    """Makes nodes of autograd that lead nowhere: the numbers of the thread's next ones are higher."""
    return Apply(lambda x: [x, *(torch.zeros((), requires_grad=True).sin() for _ in range(count))][0])


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@both
def test_backward_goes_in_one_order_though_a_process_makes_more_nodes(rank: int, checkpoint: str) -> None:
    module = nn.Sequential(nodes(300 * rank), Mlp(), Mlp(), nodes(300 - 300 * rank)).double()
    plain, model = pair(module, [2, 2], checkpoint=checkpoint)
    for _ in range(3):
        assert_same(model, plain, batch())


@both
def test_a_pipeline_is_sharded_after_its_first_forward(rank: int) -> None:
    plain = layers()
    model = SplitPipe(copy.deepcopy(plain), [2, 2], devices=["cpu"] * 2, chunks=3)
    assert_same(model, plain, batch())
    for module in (model, plain):
        module.zero_grad()
    shard(model)
    for _ in range(3):
        assert_same(model, plain, batch())


class Doubled(nn.Linear):
    """A linear layer whose weight is computed: one that is left to autograd if it is a DTensor."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 2, self.bias)


@both
def test_a_computed_weight_of_a_sharded_layer_is_left_to_autograd(rank: int) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Mlp()).double()
    module[1].up = Doubled(6, 8).double()
    plain, model = pair(module, [1, 1])
    assert_same(model, plain, batch())
    report = {row.parameter: row for row in model.deferral_report()}
    assert not report["1.up.weight"].deferred and report["1.down.weight"].deferred


class Parts(nn.Module):
    """A linear layer with whole weights, given a part of the rows: each process has a part of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(self.linear.weight, DTensor):
            return self.linear(x)
        mesh = self.linear.weight.device_mesh
        shared: Any = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
        return self.linear(shared).redistribute(mesh, [Replicate()]).to_local()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@both
def test_gradients_of_which_each_process_has_a_part_add_up(rank: int, checkpoint: str) -> None:
    from torch.distributed.tensor import distribute_module

    module = nn.Sequential(nn.Linear(6, 6), Parts(), Parts()).double()
    plain = copy.deepcopy(module)
    for part, mesh in zip(module[1:], meshes(2)):
        distribute_module(part.linear, mesh)
    sharded = copy.deepcopy(module)
    model = SplitPipe(module, [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    x = torch.randn(12, 6, dtype=torch.float64)
    backward(sharded, x)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        assert_same(model, plain, x)
    for p, q in zip(model[1].parameters(), sharded[1].parameters()):
        assert p.grad.placements == q.grad.placements, (p.grad, q.grad)
    assert all(row.deferred for row in model.deferral_report())


@both
def test_large_sharded_matrices_are_not_multiplied_by_kernels_that_take_none(rank: int) -> None:
    module = nn.Sequential(Mlp(), Mlp())
    for part in module:
        part.up, part.down = nn.Linear(256, 256), nn.Linear(256, 256)
    plain, model = pair(module, [1, 1])
    x = torch.randn(384, 256)
    for each in (model, plain):
        each(x).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(whole(p.grad), q.grad)


@both
def test_after_a_forward_a_sharded_pipeline_is_copied_wrapped_again_and_changes_its_type(rank: int) -> None:
    plain, model = pair(layers(), [2, 2], checkpoint="always")
    backward(model, batch())
    for each in (model, copy.deepcopy(model), SplitPipe(nn.Sequential(*model), [1, 3], devices=["cpu"] * 2, chunks=2)):
        each.zero_grad()
        plain.zero_grad()
        assert_same(each, plain, batch())
    for each in (model, plain):
        each.zero_grad()
        each.to(torch.float32)
    assert_same(model, plain, batch().float())


class Stays(nn.Linear):
    """A layer that can't be moved."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise RuntimeError("it stays")


@both
def test_sharded_layers_are_as_before_if_another_one_cannot_be_moved(rank: int) -> None:
    module = layers()
    plain = copy.deepcopy(module)
    shard(module)
    with pytest.raises(RuntimeError, match="it stays"):
        SplitPipe(nn.Sequential(*module, Stays(6, 6)), [3, 2], devices=["cpu"] * 2)
    assert_same(module, plain, batch())


class Block(nn.Module):
    """Of a transformer: between the layers, which share the columns and rows, they may share the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def words() -> nn.Sequential:
    """From numbers of words to scores of words."""
    return nn.Sequential(nn.Embedding(10, 6), Block(), Block(), nn.LayerNorm(6), nn.Linear(6, 10)).double()


def text() -> tuple[Tensor, Tensor]:
    return torch.randint(10, (7, 4)), torch.randint(10, (7, 4))


def entropy(scores: Any, y: Tensor) -> Any:
    return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def tied(module: nn.Sequential) -> None:
    """Gives it one weight for words that come and go, and one for all norms."""
    module[4].weight = module[0].weight
    module[2].norm.weight = module[3].weight = module[1].norm.weight


def in_sequence(module: nn.Module, local: bool = True) -> None:
    """Shards words, the sequence too; between layers there are local tensors, or DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    kept = {"use_local_output": local}
    plan: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **kept),
        "3": SequenceParallel(),
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for at in "12":
        plan[f"{at}.norm"] = SequenceParallel()
        plan[f"{at}.up"] = ColwiseParallel(input_layouts=Shard(1), **kept)
        plan[f"{at}.down"] = RowwiseParallel(output_layouts=Shard(1), **kept)
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)


def with_parted_scores(module: nn.Module) -> None:
    """Shards words, and of the scores each process has those of its words: as loss_parallel takes them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "4": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for at in "12":
        plan |= {f"{at}.up": ColwiseParallel(), f"{at}.down": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)


SETTINGS: list[Setting] = [
    ("split", "always", "zb-h1"), ("autograd", "always", None), ("split", "never", None),
    ("autograd", "never", "zb-h1"),
]


@pytest.mark.parametrize(("how", "setting"), [
    *zip(("DTensors", "tied") * 2, SETTINGS), *zip(("parted scores",) * 2, SETTINGS)])
@both
def test_words_are_sharded_in_sequences_and_scores(rank: int, how: str, setting: Setting) -> None:
    from torch.distributed.tensor.parallel import loss_parallel

    module, parted = words(), how == "parted scores"
    plain, sharded = copy.deepcopy(module), copy.deepcopy(module)
    for each in (sharded, module):
        with_parted_scores(each) if parted else in_sequence(each, local=how == "tied")
    if how == "tied":
        for each in (plain, sharded, module):
            tied(each)
    model = pipeline(module, setting, entropy, [2, 1, 1, 1] if how == "DTensors" else [2, 3])
    for _ in range(2):  # The second step's gradients are added.
        x, y = text()
        with loss_parallel() if parted else nullcontext():
            loss = step(model, entropy, x, y)
            step(sharded, entropy, x, y)
        torch.testing.assert_close(loss, step(plain, entropy, x, y))
        assert_alike(model, plain, sharded)


class Masked(Mlp):
    """With dropout of the columns that the process has."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        mask = nn.functional.dropout(torch.ones_like(hidden := self.up(x)))
        self.masks.append(mask)
        return self.down(hidden.tanh() * mask)


@pytest.mark.parametrize("setting", SETTINGS[:2])
@both
def test_a_recomputation_drops_the_same_columns(rank: int, setting: Setting) -> None:
    module = nn.Sequential(Masked(), Masked(), nn.Linear(6, 6)).double()
    shard(module)
    model = pipeline(module, setting, nn.functional.mse_loss, [1, 2])
    torch.manual_seed(rank)
    step(model, nn.functional.mse_loss, batch(), batch())
    for layer in module[:2]:
        counts = [sum(torch.equal(mask, other) for other in layer.masks) for mask in layer.masks]
        assert counts == ([1] * 3 if setting[1] == "never" else [2] * 6)
