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

from splitpipe.core.torch_private import tree_leaves
from splitpipe.distributed.halves import separable, weights
from splitpipe.distributed.torch_private import _Action, _PipelineScheduleRuntime, stage_backward_input
from splitpipe.schedule.csv import LETTERS
from splitpipe.schedule.op import Op, Schedule


class Stage(pipelining.PipelineStage):
    """A stage that its first run, by which torch finds out the shapes, leaves as it was.

    Torch has the layers compute with memory that nobody wrote to. BatchNorm would take that into its statistics, and an
    embedding would look rows up that it doesn't have.
    """

    _output: Any = None

    def _to_tensor(self, arg: Any) -> Tensor:
        x: Tensor = super()._to_tensor(arg)
        return x if isinstance(arg, Tensor) else x.detach().zero_().requires_grad_(x.requires_grad)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        slots = [(part._buffers, dict(part._buffers)) for part in module.modules()]
        values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        try:
            output = super()._compute_outputs(*args, module=module, **kwargs)
        finally:
            for buffer, value in values:
                buffer.data.copy_(value)
            for held, was in slots:
                held.clear()
                held.update(was)
        if not self.is_last:
            return output
        self._output = output if self.has_backward else None
        return tuple([x for x in tree_leaves(output) if isinstance(x, Tensor)])

    def _backward_metadata_inference(self, loss_fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        output, self._output = self._output, None

        def loss(_: Any, *more: Any, **rest: Any) -> Any:
            return loss_fn(output, *more, **rest)  # As later: torch would give it other tuples.

        return super()._backward_metadata_inference(loss, *args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # Torch would detach it in place after B: parameters as well, and what W has need of.
            self.fwd_cache[fwd_chunk_id] = (), self.fwd_cache[fwd_chunk_id][1]
        return output

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], *more: Any, **rest: Any
    ) -> Any:
        if backward_type == "weight":
            weights(bwd_kwargs["param_groups"] or ())
            return (), None
        if backward_type == "input":
            outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
            leaves = separable(outputs, inputs)
            if leaves is not None:
                parameters: Any = leaves  # All that have a gradient, those of the loss as well.
                return stage_backward_input(outputs, bwd_kwargs["output_grads"], inputs, parameters)
            whole = dict(bwd_kwargs)
            if whole["output_grads"] is None:  # The loss, which is no tuple there.
                whole["stage_output"] = whole["stage_output"][0]
            grads, _ = super().backward_maybe_with_nosync("full", whole, *more, **rest)
            return grads, []
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *more, **rest)


def verify_order(schedule: Schedule) -> None:
    """Refuses a last stage that goes forward in another order than that of microbatches: torch counts losses so.

    Raises:
        ValueError: with the order.
    """
    last = schedule.stages - 1
    found = [op.microbatch for op in schedule.rows[schedule.placement[last]] if op.kind == "F" and op.stage == last]
    if found != sorted(found):
        raise ValueError(
            f"the schedule has the last stage go forward with microbatches in the order {found}: expected "
            f"{sorted(found)}, by which torch.distributed.pipelining counts losses. Number them so."
        )


def runtime(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup,
    loss_fn: Callable[[Any, Any], Tensor],
    forward: bool = False,
) -> Any:
    """The runtime of this process's row of the schedule.

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
    runner: Any = _PipelineScheduleRuntime(
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
    return _Action.from_str(f"{op.stage}{LETTERS[op.kind]}{op.microbatch}")
