"""The same Sequential, balance, chunks and schedule over several processes: equal to the module without a pipeline."""
from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import schedule
from splitpipe.distributed.boundary import Part
from splitpipe.skip import pop, skippable, stash
from tests.world import SIZE, World, opened

CHUNKS = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with opened(tmp_path_factory.mktemp("world")) as found:
        yield found


def layers() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(),
                           nn.Linear(8, 8), nn.Linear(8, 2))
    return module.double()


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip.sin()


class Two(nn.Module):
    """Gives a tuple, or takes one."""

    def forward(self, x: Any) -> Any:
        return x[0] * x[1] if isinstance(x, tuple) else (x.sin(), x.cos())


def assert_trained_alike(
    rank: int, module: nn.Sequential, balance: list[int], name: str, steps: int = 2, buffers: bool = True
) -> None:
    """Losses and summed gradients of some steps are those of the whole module."""
    from splitpipe.distributed import Pipeline

    plain = copy.deepcopy(module)
    model = Pipeline(module, balance, chunks=CHUNKS, schedule=name, loss_fn=nn.MSELoss(), device="cpu")
    for _ in range(steps):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
        expected = nn.functional.mse_loss(plain(x.clone()), y)
        expected.backward()
        loss = model.step(x, y)
        last = schedule.build(name, SIZE, CHUNKS).placement[-1] if isinstance(name, str) else SIZE - 1
        assert (loss is not None) is (rank == last)
        if loss is not None:
            torch.testing.assert_close(loss, expected.detach())
    theirs = dict(plain.named_parameters())
    own = dict(model.named_parameters())
    assert (own or not buffers or rank == 0) and set(own) <= set(theirs)
    for key, parameter in own.items():
        expected_grad = theirs[key].grad
        if expected_grad is None:  # Of a stage that the loss does not come from: torch sends zeros.
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, expected_grad, rtol=1e-6, atol=1e-9)
    assert set(model.state_dict()) >= set(own)
    if not buffers:  # A call for each microbatch.
        assert all(int(buffer) == CHUNKS * steps for buffer in model.buffers())


def trained(rank: int, name: str) -> None:
    stages = schedule.build(name, SIZE, CHUNKS).stages
    assert_trained_alike(rank, layers(), [len(layers()) // stages] * stages, name)


@pytest.mark.parametrize("name", schedule.names())
def test_every_schedule_gives_the_loss_and_gradients_of_the_module(world: World, name: str) -> None:
    world.run(trained, name)


def skipping(rank: int, name: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Stash(), nn.Linear(6, 6), Two(), Two(), Pop(), nn.Linear(6, 2)).double()
    assert_trained_alike(rank, module, [4, 3], name)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_skips_to_the_next_stage_and_tuples_are_sent(world: World, name: str) -> None:
    world.run(skipping, name)


def refused(rank: int) -> None:
    from splitpipe.distributed import Pipeline

    far = nn.Sequential(Stash(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), Pop())
    with pytest.raises(ValueError, match=r"'skip' from stage 0 to stage 3"):
        Pipeline(far, [1, 1, 1, 2], chunks=2, schedule="interleaved-1f1b", loss_fn=nn.MSELoss(), device="cpu")
    shared = nn.Linear(6, 6)
    with pytest.raises(ValueError, match=r"1\.weight of stage 1 is 0\.weight of stage 0"):
        Pipeline(nn.Sequential(shared, shared), [1, 1], chunks=2, loss_fn=nn.MSELoss(), device="cpu")
    with pytest.raises(ValueError, match="balance has 1 stages for 2 devices"):
        Pipeline(nn.Sequential(nn.Linear(6, 6)), [1], chunks=2, loss_fn=nn.MSELoss(), device="cpu")
    model = Pipeline(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), [1, 1], chunks=2, loss_fn=nn.MSELoss(),
                     device="cpu")
    with pytest.raises(ValueError, match=r"input has 7 rows for chunks=2.*drop_last"):
        model.step(torch.randn(7, 6), torch.randn(7, 2))
    model.step(torch.randn(8, 6), torch.randn(8, 2))
    with pytest.raises(ValueError, match=r"input has shape \[4, 6\] of torch.float32, and had \[8, 6\]"):
        model.step(torch.randn(4, 6), torch.randn(4, 2))
    with pytest.raises(RuntimeError, match=r"expected step\(input, target\)"):
        model(torch.randn(8, 6))
    model.step(torch.randn(8, 6), torch.randn(8, 2))


def test_what_the_runtime_can_not_run_is_refused_in_every_process(world: World) -> None:
    world.run(refused)


def test_without_processes_it_says_what_to_do() -> None:
    from splitpipe.distributed import Pipeline

    with pytest.raises(RuntimeError, match="init_process_group"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), [1], loss_fn=nn.MSELoss())


class Fatal(nn.Module):
    """A loss that ends its process when it is asked for the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2 * CHUNKS:  # The first run of all is for the shapes.
            os._exit(1)
        return nn.functional.mse_loss(output, target)


def bereft(rank: int, name: str) -> None:
    from splitpipe.distributed import Pipeline

    stages = schedule.build(name, SIZE, CHUNKS).stages
    last = schedule.build(name, SIZE, CHUNKS).placement[-1]
    assert last == SIZE - 1
    model = Pipeline(layers(), [8 // stages] * stages, chunks=CHUNKS, schedule=name, loss_fn=Fatal(), device="cpu")
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        for _ in range(3):
            model.step(x, y)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_process_that_is_killed_makes_the_others_end_with_an_error(world: World, name: str) -> None:
    world.lose(bereft, name)


def counted(rank: int) -> None:
    from splitpipe.distributed import Pipeline

    module = nn.Sequential(nn.Embedding(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    plain = copy.deepcopy(module)
    model = Pipeline(module, [2, 2], chunks=2, schedule="1f1b", loss_fn=nn.MSELoss(), device="cpu")
    for _ in range(2):
        x, y = torch.randint(9, (8,)), torch.randn(8, 6, dtype=torch.float64)
        model.step(x, y)
        for rows in x.chunk(2):
            plain(rows)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name))


def test_finding_out_the_shapes_leaves_buffers_alone(world: World) -> None:
    world.run(counted)


def clipped(rank: int) -> None:
    from splitpipe.distributed import Pipeline

    module = layers()
    plain = copy.deepcopy(module)
    model = Pipeline(module, [4, 4], chunks=CHUNKS, loss_fn=nn.MSELoss(), device="cpu")
    x, y = torch.randn(8, 6, dtype=torch.float64) * 9, torch.randn(8, 2, dtype=torch.float64)
    model.step(x, y)
    nn.functional.mse_loss(plain(x), y).backward()
    for most in (1e9, 0.1):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), most)
        torch.testing.assert_close(model.clip_grad_norm_(most), expected)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_gradients_are_clipped_by_the_norm_over_all_processes(world: World) -> None:
    world.run(clipped)


def unfit(rank: int) -> None:
    from splitpipe.distributed import Pipeline

    def pair(output: Tensor, target: Tensor) -> Any:
        return output.sum(), len(output)

    loss_fn: Any = pair
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model = Pipeline(module, [1, 1], chunks=2, loss_fn=loss_fn, device="cpu")
    error, message = (TypeError, "loss_fn gave a tuple.*mean over the microbatch") if rank else (RuntimeError, ".")
    with pytest.raises(error, match=message):
        model.step(torch.randn(8, 6), torch.randn(8, 2))
    if rank:
        os._exit(0)  # The other one waits for a gradient, and ends with this one.


def test_a_loss_that_is_no_mean_is_an_error(world: World) -> None:
    world.lose(unfit)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, "odd"


def evaluated(rank: int, name: str) -> None:
    from splitpipe.distributed import Pipeline

    stages = schedule.build(name, SIZE, CHUNKS).stages
    module = layers()
    module[1] = nn.Dropout(0.5)
    plain = copy.deepcopy(module).eval()
    model = Pipeline(module, [8 // stages] * stages, chunks=CHUNKS, schedule=name, loss_fn=nn.MSELoss(), device="cpu")
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    for _ in range(2):
        model.eval()
        loss = model.evaluate(x, y)
        if loss is not None:
            torch.testing.assert_close(loss, nn.functional.mse_loss(plain(x), y).detach())
        assert all(parameter.grad is None for parameter in model.parameters())
        model.train()
        model.step(x, y)
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "v-half"])
def test_evaluating_is_forward_alone_between_steps_and_before(world: World, name: str) -> None:
    world.run(evaluated, name)


def test_values_that_can_not_be_sent_are_an_error_that_names_the_stage() -> None:
    leaving: Any = [(None, "skip")]
    with pytest.raises(TypeError, match=r"stage 3: its output holds a str.*splitpipe\.SplitPipe"):
        Part([("0", Odd())], 3, last=False, arriving=[], leaving=leaving)(torch.randn(2, 2))
    with pytest.raises(TypeError, match=r"stage 3: the skip 'skip' holds a NoneType"):
        Part([("0", nn.Linear(2, 2))], 3, last=False, arriving=[], leaving=leaving)(torch.randn(2, 2))


class Scaled(nn.Module):
    """Multiplies by the sum of two parameters, whose gradients are one tensor to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first + self.second)


class Fresh(nn.Module):
    """Goes on from its parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.start.sin().expand(x.shape[0], -1)


class Mean(nn.Module):
    """Keeps a count that each call puts in a new place, and gives what is in no order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x.reshape(-1, 2, 3).transpose(1, 2)


def frozen() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    module[0].requires_grad_(False)
    return module


HARD: dict[str, Any] = {
    "a first stage that is frozen": (frozen, [1, 3]),
    "a first stage without parameters": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)), [1, 2]),
    "parameters that meet": (lambda: nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 2)), [1, 2]),
    "a layer that ignores its input": (lambda: nn.Sequential(nn.Linear(6, 6), Fresh(), nn.Linear(6, 2)), [2, 1]),
    "in place": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)),
                 [2, 2]),
    "a transposed value": (
        lambda: nn.Sequential(nn.Linear(6, 6), Mean(), nn.Flatten(), nn.Linear(6, 2)), [2, 2]),
    "an expanded gradient": (
        lambda: nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (6, 2)), nn.AvgPool1d(2), nn.Flatten(),
                              nn.Linear(6, 2)), [2, 3]),
}


def hard(rank: int, what: str, name: str) -> None:
    make, balance = HARD[what]
    assert_trained_alike(rank, make().double(), balance, name, steps=3, buffers=what != "a transposed value")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("what", HARD)
def test_no_gradient_is_lost_or_another_ones(world: World, what: str, name: str) -> None:
    world.run(hard, what, name)


def stepping(rank: int) -> None:
    from splitpipe.distributed import Pipeline

    model = Pipeline(layers(), [4, 4], chunks=2, schedule="zb-h1", loss_fn=nn.MSELoss(), device="cpu")
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        def count(_: Tensor, name: str = name) -> None:
            fired[name] = fired.get(name, 0) + 1

        parameter.register_post_accumulate_grad_hook(count)
    model.step(torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64))
    assert set(fired) == {name for name, _ in model.named_parameters()}


def test_hooks_after_accumulation_fire_in_every_stage(world: World) -> None:
    world.run(stepping)


def mismatched(rank: int) -> None:
    from splitpipe.distributed import Pipeline

    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    whole = module.state_dict()
    model = Pipeline(module, [1, 1], chunks=2, loss_fn=nn.MSELoss(), device="cpu")
    model.load_state_dict(whole)
    with pytest.raises(ValueError, match="found input with 8 rows, target with 4 rows"):
        model.step(torch.randn(8, 6), torch.randn(4, 2))
    with pytest.raises(TypeError, match="target is a dict: expected a tensor"):
        model.step(torch.randn(8, 6), {"y": torch.randn(8, 2)})
    model.step(torch.randn(4, 6), torch.randn(4, 2))
    model.evaluate(torch.randn(8, 6), torch.randn(8, 2))  # Its processes agree apart.
    with pytest.raises(ValueError, match="input has shape .4, 6. of torch.float64, and had .4, 6. of torch.float32"):
        model.step(torch.randn(4, 6).double(), torch.randn(4, 2))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if rank == 0:
        with pytest.raises(RuntimeError) as info:
            model.step(torch.randn(4, 6), torch.randn(4, 2))
        assert re.search("stage 0 would send .* Build another Pipeline after freezing", str(info.value.__cause__))
        with pytest.raises(RuntimeError, match="an earlier step has failed .*stage 0 would send.*Start them again"):
            model.step(torch.randn(4, 6), torch.randn(4, 2))


def test_what_processes_have_not_agreed_on_is_refused(world: World) -> None:
    world.run(mismatched)

