"""FSDP and a pipeline do not go together: it is refused before anything runs, with what to use instead."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from splitpipe.distributed import Pipeline
from tests.helpers.world import both

REFUSED = r"(?s)FSDP \(fully_shard\) has {}: expected .*DistributedDataParallel\(SplitPipe.*splitpipe\.distributed"
fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this build of torch has no FSDP")


def layers() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def pipeline(module: nn.Sequential, schedule: str = "gpipe") -> SplitPipe:
    return SplitPipe(module, [2, 3], devices=["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=nn.functional.mse_loss)


def shard(*modules: nn.Module) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in modules:
        fsdp.fully_shard(module, mesh=mesh)


@pytest.mark.parametrize(("schedule", "part", "names"), [
    ("gpipe", "2", "'2'"), ("1f1b", "1.0", "'1.0'"), ("zb-h1", "", "the module itself")])
@both
def test_a_module_that_fsdp_has_is_refused_and_left_as_it_was(rank: int, schedule: str, part: str, names: str) -> None:
    module = layers()
    plain = copy.deepcopy(module)
    shard(module.get_submodule(part))
    with pytest.raises(TypeError, match=REFUSED.format(names)):
        pipeline(module, schedule)
    with pytest.raises(TypeError, match=REFUSED.format(names)):
        Pipeline(module, [2, 3], chunks=2, loss_fn=nn.functional.mse_loss, device="cpu")
    # It is as it was, and of use: both processes have the same batch, so the mean of their gradients is that of each.
    x = torch.ones(2, 6, dtype=torch.float64)
    for each in (module, plain):
        each(x).square().mean().backward()
    for p, q in zip(module.parameters(), plain.parameters()):
        grad = p.grad
        torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, q.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("itself", [False, True], ids=["layers", "model"])
@both
def test_a_pipeline_that_fsdp_was_given_afterwards_refuses_to_run(rank: int, schedule: str, itself: bool) -> None:
    model = pipeline(layers(), schedule)
    x, y = torch.ones(6, 6, dtype=torch.float64), torch.ones(6, 3, dtype=torch.float64)
    model(x, target=y).backward()  # It has its workers by now.
    model.zero_grad()
    shard(*([model] if itself else list(model)))
    calls: list[nn.Module] = []
    for each in model:
        each.register_forward_hook(lambda module, given, output: calls.append(module))
    refused = REFUSED.format("the module itself" if itself else "'0', '1', '2' and 2 more")
    for training, target in (True, y), (True, None), (False, None):
        with pytest.raises(TypeError, match=refused):
            model.train(training)(x, target=target)
    assert not calls and all(parameter.grad is None for parameter in model.parameters())


@both
def test_the_older_fsdp_is_refused(rank: int) -> None:
    wrapped = fsdp.FullyShardedDataParallel(nn.Linear(6, 6).double(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match=REFUSED.format("'1'")):
        SplitPipe(nn.Sequential(nn.Linear(6, 6).double(), wrapped), [1, 1], devices=["cpu"] * 2)
