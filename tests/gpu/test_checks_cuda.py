"""On GPUs, one and two: steps on reused memory, streams, dropout, full memory, DDP."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from splitpipe import SplitPipe
from tests.gpu.checks import WIDTH, Check, checks, exact, gradients, slow, squared
from tests.helpers.world import World


def on(check: Check) -> object:
    """A case of a test, marked with the devices that it needs."""
    return pytest.param(check, id=check.name, marks=pytest.mark.devices(check.devices))


@pytest.mark.cuda
@pytest.mark.parametrize("check", [on(check) for check in checks()])
def test_it_holds(check: Check) -> None:
    check.holds("cuda")


#: The devices of each of two processes' stages.
Places = Callable[[int], list[str]]


def on_the_cpu(rank: int) -> list[str]:
    return ["cpu"] * 4


def on_the_first(rank: int) -> list[str]:
    return ["cuda:0"] * 4


def on_both(rank: int) -> list[str]:
    """Each process begins on another one."""
    return [f"cuda:{(rank + stage) % 2}" for stage in range(4)]


def on_one_each(rank: int) -> list[str]:
    return [f"cuda:{rank}"] * 4


def on_two_each(rank: int) -> list[str]:
    return [f"cuda:{2 * rank + stage % 2}" for stage in range(4)]


#: What has reduced gradients: torch's gloo may wait for itself for ever if its last owner is freed just after a
#: reduction, as ~ProcessGroupGloo takes a lock of its threads' with the interpreter's in its hand.
REDUCED: list[DistributedDataParallel] = []


def trains(rank: int, places: Places, backend: str, backward: str) -> None:
    """Three steps of DDP around a pipeline: gradients are the mean of what both processes' rows give."""
    group = dist.new_group([0, 1], backend=backend)
    try:
        with exact():
            torch.manual_seed(0)
            module = slow(4)
            plain = copy.deepcopy(module).to(places(rank)[0])
            model = SplitPipe(module, [1] * 4, devices=places(rank), chunks=2, backward=backward)
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
                    other = plain(batch.to(places(rank)[0]))
                    (squared(other, torch.zeros_like(other)) / 2).backward()
                gradients(model, plain, f"process {rank}, step {number}")
    finally:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize(
    ("places", "backend"),
    [
        (on_the_cpu, "gloo"),
        pytest.param(on_the_first, "gloo", marks=pytest.mark.cuda),
        pytest.param(on_both, "gloo", marks=[pytest.mark.cuda, pytest.mark.devices(2)]),
        pytest.param(on_one_each, "nccl", marks=[pytest.mark.cuda, pytest.mark.devices(2)]),
        pytest.param(on_two_each, "nccl", marks=[pytest.mark.cuda, pytest.mark.devices(4)]),
    ],
)
def test_ddp_around_a_pipeline_takes_the_mean(world: World, places: Places, backend: str, backward: str) -> None:
    world.run(trains, places, backend, backward)


def test_slow_layers_are_what_they_were() -> None:
    """What checks are made of changes no value on a device that doesn't spin."""
    with exact():
        torch.manual_seed(0)
        module, x = slow(2), torch.randn(3, WIDTH)
        plain = nn.Sequential(*(nn.Sequential(part[0], part[2]) for part in module))
        assert torch.equal(module(x), plain(x))
