"""torch.distributed.pipelining's runtime, driven by our schedule's text.

Its classes are private to torch, as ``_PipelineScheduleRuntime`` is: what is used of them stands here alone. It adds
what is sent and received by itself, in an order that does not lock up.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from splitpipe.distributed.halves import separable, weights
from splitpipe.schedule.op import LETTERS, Op, Schedule


class Stage(pipelining.PipelineStage):
    """A stage that its first run, by which torch finds out the shapes, leaves as it was.

    Torch has the layers compute with memory that nobody wrote to. BatchNorm would take that into its statistics, and an
    embedding would look rows up that it doesn't have.
    """

    def _to_tensor(self, arg: Any) -> Tensor:
        x: Tensor = super()._to_tensor(arg)
        return x if isinstance(arg, Tensor) else x.detach().zero_().requires_grad_(x.requires_grad)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        before = [
            (part._buffers, name, buffer, buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        try:
            return super()._compute_outputs(*args, module=module, **kwargs)
        finally:
            for held, name, buffer, value in before:
                buffer.data.copy_(value)
                held[name] = buffer

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], *more: Any, **rest: Any
    ) -> Any:
        parameters = list(self.submod.parameters())
        if backward_type == "weight":
            weights(bwd_kwargs["param_groups"] or (), parameters)
            return (), None
        if backward_type == "input" and not separable(
            bwd_kwargs["stage_output"], bwd_kwargs["input_values"], parameters
        ):
            whole = dict(bwd_kwargs)
            if whole["output_grads"] is None:  # The loss, which is no tuple there.
                whole["stage_output"] = whole["stage_output"][0]
            grads, _ = super().backward_maybe_with_nosync("full", whole, *more, **rest)
            return grads, []
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *more, **rest)


def runtime(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup,
    loss_fn: Callable[[Any, Any], Tensor],
    forward: bool = False,
) -> Any:
    """What runs this process's row of the schedule.

    Args:
        modules: of the stages of this process, in order.
        schedule: a row a process.
        rank: of this process in the group.
        device: of its stages.
        group: of the processes.
        loss_fn: of the output and the target of a microbatch. It is not divided by their number.
        forward: whether to run forward alone. Its stages are others than those that train: they know what is sent.
    """
    mine = [stage for stage, row in enumerate(schedule.placement) if row == rank]
    stages = [
        Stage(module, stage, schedule.stages, device, group=group)
        for stage, module in zip(mine, modules, strict=True)
    ]
    runner: Any = schedules._PipelineScheduleRuntime(
        stages, schedule.microbatches, loss_fn=loss_fn, scale_grads=False
    )
    actions = {row: [_action(op) for op in ops] for row, ops in enumerate(schedule.rows)}
    runner.pipeline_order = actions
    runner._prepare_schedule_with_comms(actions)
    if forward:
        kept = schedules.FORWARD, schedules.SEND_F, schedules.RECV_F
        with_comms = runner.pipeline_order_with_comms
        runner.pipeline_order_with_comms = {
            row: [action for action in ops if action.computation_type in kept] for row, ops in with_comms.items()
        }
    return runner


def _action(op: Op) -> Any:
    return schedules._Action.from_str(f"{op.stage}{LETTERS[op.kind]}{op.microbatch}")
