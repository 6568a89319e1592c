"""On GPUs, one and two: steps on reused memory, streams, dropout, full memory, refilled buffers, DDP."""
from __future__ import annotations

import copy
import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from splitpipe import SplitPipe
from tests.devices.log import softcuda
from tests.gpu import checks
from tests.gpu.checks import WIDTH, assert_same_gradients, exact, loss_of, slow, squared, wrapped
from tests.gpu.parts import ROOT, STEPS
from tests.helpers.world import World

#: Of the steps on memory that is used again; a tenth of them on streams.
COUNT = int(os.environ.get(STEPS, "200"))
#: How far from the unwrapped module's a value of some hundred steps may be.
CLOSE = 1e-8
BOTH = pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.devices(2))])


@pytest.mark.cuda
# Drop-in, gradients are handed over on the caller's streams, and a weight's node has its stage's.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(("schedule", "checkpoint", "backward"), [
    (None, "never", "split"), (None, "except_last", "split"), (None, "never", "autograd"), ("zb-h1", "never", "split"),
    ("zb-v", "except_last", "split"),
])
@pytest.mark.parametrize("part", [torch.device, torch.Stream, torch.cuda.Stream, "a caller on streams of its own"])
@BOTH
def test_training_on_memory_that_is_used_again(devices, part, schedule, checkpoint, backward):
    """What differs is summed up on the device: a look at it each step would have the host wait, and hide a race."""
    count = COUNT if part is torch.device else max(2, COUNT // 10)
    own, part = isinstance(part, str), torch.device if isinstance(part, str) else part
    with exact():
        torch.manual_seed(0)
        module = slow(4)
        plain = copy.deepcopy(module).to("cuda:0")
        model = wrapped(module, devices, schedule, part, checkpoint=checkpoint, backward=backward)
        first, last = model.devices[0], model.devices[-1]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, model)]
        with checks.callers(devices) if own else nullcontext():
            worst = torch.zeros((), device=first)
            for number in range(count):
                x, y = torch.randn(10, WIDTH, device=first), torch.randn(10, WIDTH, device=last)
                checks.press(devices)
                losses = []
                for each, optimizer in zip((plain, model), optimizers):
                    optimizer.zero_grad()
                    loss = loss_of(each, x, y, schedule)
                    loss.backward()
                    losses.append(loss.detach().to(first))
                worst = torch.maximum(worst, (losses[0] - losses[1]).abs())
                for one, other in zip(plain.parameters(), model.parameters()):
                    assert one.grad is not None and other.grad is not None
                    worst = torch.maximum(worst, (one.grad - other.grad.to(first)).abs().max())
                for optimizer in optimizers:
                    optimizer.step()
                if number % 50 == 49 or number == count - 1:
                    assert worst.item() <= CLOSE, f"a loss or gradient is wrong by step {number}"


@pytest.mark.cuda
@BOTH
def test_one_seed_gives_the_same_dropout_checkpointed_or_not_and_the_same_next_numbers(devices: int) -> None:
    first: list[Tensor] = []
    for checkpoint, _ in product(("never", "except_last", "always"), range(2)):
        with exact():
            torch.manual_seed(0)
            model = wrapped(slow(3, nn.Dropout), devices, checkpoint=checkpoint)
            told = []
            for _ in range(3):
                loss = model(torch.randn(10, WIDTH).to(model.devices[0])).square().mean()
                loss.backward()
                told += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            told += [torch.rand(3, device=device) for device in dict.fromkeys(model.devices)]
            first = first or told
            torch.testing.assert_close(told, first)


@pytest.mark.cuda
@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("schedule", [None, "zb-h1"])
@pytest.mark.parametrize("at", ["forward", "backward"])
@BOTH
def test_a_step_without_memory_says_so_and_keeps_none(devices, at, schedule, backward):
    with exact():
        module = slow(3, checks.Hungry)
        plain = copy.deepcopy(module).to("cuda:0")
        model = wrapped(module, devices, schedule, checkpoint="except_last", backward=backward)
        x, y = (torch.randn(10, WIDTH, device=model.devices[end]) for end in (0, -1))
        loss_of(model, x, y, schedule).backward()
        model.zero_grad()
        before, hungry = checks.allocated(devices), model[1][1]
        hungry.at = at
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model, x, y, schedule).backward()
        hungry.at = None
        model.zero_grad()
        after = checks.allocated(devices)
        assert all(now <= was for now, was in zip(after, before)), f"{after} bytes, {before} were before"
        loss_of(model, x, y, schedule).backward()
        loss_of(plain, x, y).backward()
        assert_same_gradients(model, plain, "the next step")


class Pinned(nn.Module):
    """Gives its input in pinned memory, if that is on the CPU: as layers do that refill a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, pin_memory=x.device.type == "cpu").copy_(x)


@pytest.mark.cuda
@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize("where", [{"balance": [1, 1]}, {"cuts": ["1"], "batched": {}}], ids=["layers", "cuts"])
@pytest.mark.parametrize("places", [
    ["cuda:0", "cuda:0"], pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.devices(2)), ["cpu", "cuda:0"],
], ids=", ".join)
def test_pinned_memory_has_been_read_when_the_call_returns(places, where, schedule):
    """On a GPU buffers that are filled again would change what is trained on; the fake tells who still reads."""
    with exact():
        module = slow(2)
        module[0].append(Pinned())
        plain = copy.deepcopy(module).to("cuda:0")
        options = {} if schedule is None else {"schedule": schedule, "loss_fn": squared}
        model = SplitPipe(module, devices=places, chunks=4, **where, **options)
        x, y = (torch.empty(10, WIDTH).pin_memory() for _ in range(2))
        for _ in range(5):
            given = torch.randn(2, 10, WIDTH)
            x.copy_(given[0]), y.copy_(given[1])
            output = model(x) if schedule is None else model(x, target=y)
            assert softcuda is None or {*softcuda.reads()} == {"done"}
            if places[0] != "cpu":  # Where the first stage keeps it for backward.
                x.fill_(torch.nan)
            loss = squared(output, y.to(output.device)) if schedule is None else output
            if schedule is not None:
                y.fill_(torch.nan)
            loss.backward()
            assert softcuda is None or "reading" not in softcuda.reads()
            loss_of(plain, given[0].to("cuda:0"), given[1]).backward()
        assert_same_gradients(model, plain, "refilled buffers")


_ELSEWHERE = """
import torch
from torch import nn
from splitpipe import SplitPipe
model = SplitPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [1, 1], devices=["cuda:1"] * 2, chunks=2)
model(torch.randn(4, 8, device="cuda:1")).sum().backward()
torch.cuda.synchronize(1)
assert not torch._C._cuda_hasPrimaryContext(0), "training on cuda:1 has made a context on cuda:0, half a GiB"
"""


@pytest.mark.cuda
@pytest.mark.devices(2)
def test_training_on_the_second_gpu_leaves_the_first_alone() -> None:
    subprocess.run([sys.executable, "-c", _ELSEWHERE], cwd=ROOT, timeout=120, check=True)


#: The devices of each of two processes' stages.
PLACES = {"one-each": [["cuda:0"] * 4, ["cuda:1"] * 4],
          "both": [["cuda:0", "cuda:1"] * 2, ["cuda:1", "cuda:0"] * 2],
          "two-each": [["cuda:0", "cuda:1"] * 2, ["cuda:2", "cuda:3"] * 2]}
#: What has reduced gradients: torch's gloo may wait for itself for ever if its last owner is freed just after a
#: reduction, as ~ProcessGroupGloo takes a lock of its threads' with the interpreter's in its hand.
REDUCED: list[DistributedDataParallel] = []


def trains(rank: int, places: list[list[str]], backend: str, backward: str) -> None:
    """Three steps of DDP around a pipeline: gradients are the mean of what both processes' rows give."""
    group = dist.new_group([0, 1], backend=backend)
    try:
        with exact():
            torch.manual_seed(0)
            module = slow(4)
            plain = copy.deepcopy(module).to(places[rank][0])
            model = SplitPipe(module, [1] * 4, devices=places[rank], chunks=2, backward=backward)
            parallel = DistributedDataParallel(model, process_group=group)
            REDUCED.append(parallel)
            for number in range(3):
                torch.manual_seed(number)
                batches = torch.randn(2, 6, WIDTH)
                for each in (plain, parallel):
                    each.zero_grad()
                output = parallel(batches[rank].to(model.devices[0]))
                squared(output, torch.zeros_like(output)).backward()
                for batch in batches:
                    other = plain(batch.to(places[rank][0]))
                    (squared(other, torch.zeros_like(other)) / 2).backward()
                assert_same_gradients(model, plain, f"process {rank}, step {number}")
    finally:
        dist.destroy_process_group(group)


@pytest.mark.cuda
@pytest.mark.thorough
@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize(("where", "backend"), [
    pytest.param("both", "gloo", marks=pytest.mark.devices(2)),
    pytest.param("one-each", "nccl", marks=pytest.mark.devices(2)),
    pytest.param("two-each", "nccl", marks=pytest.mark.devices(4)),
])
def test_ddp_around_a_pipeline_takes_the_mean(world: World, where: str, backend: str, backward: str) -> None:
    world.run(trains, PLACES[where], backend, backward)
