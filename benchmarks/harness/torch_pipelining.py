"""torch.distributed.pipelining: two processes that talk over gloo, each with its stages."""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.harness.compiling import compile_layers
from benchmarks.harness.subject import Case, Step, sgd

RANKS = 2
#: The stages of each rank, by what the class of the schedule is called without "Schedule".
ONE_EACH = ((0,), (1,))
LOOP = ((0, 2), (1, 3))
V = ((0, 3), (1, 2))
PLACES = {
    "GPipe": ONE_EACH,
    "1F1B": ONE_EACH,
    "Interleaved1F1B": LOOP,
    "InterleavedZeroBubble": LOOP,
    "ZBVZeroBubble": V,
    "DualPipeV": V,
}


class _Contiguous(torch.autograd.Function):
    """The tensor; its gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class Layers(nn.Sequential):
    """Layers that take what the stage before gives: a tensor, or the tensors of a tuple one by one.

    What they give is contiguous, as gloo wants it, and so are gradients of what they take: compiled convolutions lay
    both out otherwise.
    """

    def forward(self, *values: Tensor) -> Any:
        values = tuple(_Contiguous.apply(x) for x in values)
        output = super().forward(values if len(values) > 1 else values[0])
        return tuple(x.contiguous() for x in output) if isinstance(output, tuple) else output.contiguous()


def meet(rank: int, path: str) -> None:
    """Connects this process to the other one.

    Args:
        rank: of this process.
        path: of a file that does not exist yet, by which they find each other.
    """
    patience = timedelta(seconds=900)  # With a partner that compiles, or has failed.
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS, timeout=patience)


def step(case: Case, rank: int, name: str, compiled: bool = False) -> Step:
    """A step of training of this rank's stages.

    Args:
        case: the whole model, of which the other rank's layers are dropped, and the whole batch.
        rank: of this process.
        name: of the schedule.
        compiled: whether layers are compiled.
    """
    mine = PLACES[name][rank]
    count = RANKS * len(mine)
    ends = list(accumulate(case.balance(count)))
    parts = {stage: Layers(*case.layers[ends[stage - 1] if stage else 0 : ends[stage]]) for stage in mine}
    compile_layers(layer for part in parts.values() for layer in part if compiled)
    stages = [pipelining.PipelineStage(part, stage, count, torch.device("cpu")) for stage, part in parts.items()]
    kind = getattr(pipelining, f"Schedule{name}")
    run = kind(stages if count > RANKS else stages[0], case.subject.chunks, loss_fn=case.subject.spec.loss)
    optimizer = sgd(case.subject, nn.ModuleList(parts.values()))
    inputs = [case.input] if 0 in mine else []
    sees_loss, chunks, target = count - 1 in mine, case.subject.chunks, case.target

    def step() -> float | None:
        losses: list[Tensor] = []
        more: dict[str, Any] = {"target": target, "losses": losses} if sees_loss else {}
        optimizer.zero_grad()
        run.step(*inputs, return_outputs=False, **more)
        optimizer.step()
        return sum(loss.item() for loss in losses) / chunks if sees_loss else None

    return step
