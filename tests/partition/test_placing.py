"""A Sequential is cut and moved as asked, or refused."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from splitpipe.core.stream import Place
from splitpipe.partition.placement import move_stages, verify_stages
from splitpipe.stage import layers

CPU = Place(torch.device("cpu"))
META = Place(torch.device("meta"))


def test_sharing_between_devices_is_refused_and_on_one_device_is_not() -> None:
    tied, other, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)
    other.weight = tied.weight
    stages = [[tied, norm], [nn.Tanh()], [other, norm]]
    verify_stages(stages, [META] * 3)
    verify_stages(stages, [META, CPU, META])
    for number, name in enumerate(["Linear.weight", "BatchNorm1d.running_mean"]):
        with pytest.raises(ValueError, match=rf"{name} of stage 1 \(meta\) is also in stage 0 \(cpu\).*copy.deepcopy"):
            verify_stages([[stages[0][number]], [stages[2][number]]], [CPU, META])


def test_stages_on_the_cpu_have_a_worker_each_unless_they_share_state_and_an_accelerator_has_one() -> None:
    a, b, c = (nn.BatchNorm1d(2) for _ in range(3))
    tied, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = tied.weight

    def workers(*stages: list[nn.Module]) -> list[int]:
        return layers.workers(stages, [CPU] * 9)

    assert workers([a], [b], [c]) == [0, 1, 2]
    assert workers([tied], [other]) == [0, 1]
    assert workers([a], [b], [a]) == [0, 1, 0]
    assert workers([a], [b], [nn.Sequential(c, a)], [b]) == [0, 1, 0, 1]
    assert workers([tied], [nn.Sequential(tied)]) == [0, 0]
    relu, empty = nn.ReLU(), nn.Sequential()
    assert workers([relu, empty, c], [relu, empty]) == [0, 1]
    assert workers() == []
    assert layers.workers([[nn.Tanh()] for _ in range(5)], [META, CPU, META, CPU, META]) == [0, 1, 0, 2, 0]


@pytest.mark.cuda
def test_layers_move_to_the_device_with_their_gradients() -> None:
    modules = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3)]
    modules[1].weight = modules[0][0].weight
    nn.Sequential(*modules)(torch.rand(4, 3)).sum().backward()
    weight = modules[1].weight
    move_stages([[modules[0]], [modules[1]]], [Place(torch.device("cuda:0"))] * 2)
    assert weight.is_cuda and weight.grad is not None and weight.grad.is_cuda
    assert modules[0][0].weight is modules[1].weight is weight
