"""Process groups of stages whose layers are shared by several processes."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from splitpipe import SplitPipe
from splitpipe.core.stream import Place
from splitpipe.partition.placing import verify_groups
from splitpipe.stage.layers import chain_layers
from splitpipe.stage.resources import Resources

NAMES = itertools.count()
GPUS = [Place(torch.device("cuda", index)) for index in range(2)]


@pytest.fixture(autouse=True)
def processes() -> Iterator[None]:
    pytest.importorskip("torch.distributed.tensor", reason="needs DTensor, and this build of torch has none")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stages(own: bool) -> list[list[nn.Module]]:
    """Two stages of a layer of DTensors, with a process group for each, or one for both."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    groups = [dist.new_group([0]) for _ in range(1 + own)] * (2 - own)
    # Torch takes meshes of the same names for one, even those of an earlier test.
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"m{next(NAMES)}",)) for group in groups]
    how = ColwiseParallel(output_layouts=Replicate())
    return [[nn.ReLU(), parallelize_module(nn.Linear(2, 2), mesh, how)] for mesh in meshes]


def test_a_group_shared_by_two_devices_is_refused() -> None:
    where = r"Linear\.weight in stage 1 \(cuda:1\) is also the group of Linear\.weight in stage 0 \(cuda:0\)"
    with pytest.raises(ValueError, match=f"(?s){where}.*new_group"):
        verify_groups(stages(own=False), GPUS)


def test_a_group_for_each_device_or_on_one_device_is_fine() -> None:
    verify_groups(stages(own=True), GPUS)
    verify_groups(stages(own=False), GPUS[:1] * 2)


def verified(monkeypatch: pytest.MonkeyPatch, **options: Any) -> bool:
    """Whether a model has its groups looked at before it trains."""
    layers = nn.Sequential(*(layer for part in stages(own=False) for layer in part))
    model = SplitPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=2, **options)
    seen: list[Any] = []
    monkeypatch.setattr(model._runtime._resources, "verify_groups", seen.append)
    x = torch.randn(4, 2)
    model(x, target=x) if options else model(x)
    return bool(seen)


@pytest.mark.thorough
def test_groups_are_verified_for_autograds_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified(monkeypatch)
    assert not verified(monkeypatch, schedule="1f1b", loss_fn=nn.functional.mse_loss)
    with torch.no_grad():
        assert not verified(monkeypatch)


def test_a_model_on_two_devices_is_refused_by_its_resources() -> None:
    parts = [[(f"{k}", layer) for k, layer in enumerate(part)] for part in stages(own=False)]
    one, two = (Resources(places, [0, 1]) for places in (GPUS[:1] * 2, GPUS))
    layers = chain_layers([*parts[0], *parts[1]], [(0, 2), (2, 4)], GPUS)
    one.verify_groups(layers)
    with pytest.raises(ValueError, match="share a process group"):
        two.verify_groups(layers)
