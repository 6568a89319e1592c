"""Runs a schedule, given as text, on torch.distributed.pipelining's runtime.

The runtime adds sends and receives itself, in an order without deadlocks.

Where it is right, backward has torch's two halves; otherwise, it isn't split. Torch finds a weight of a stage only if
its path in the graph meets the path of an input that requires grad. It misses the weights of a stage after frozen
layers, and weights that lead to an output on which no input has an influence. So the graph is checked first: if a
weight would be missed, B computes all gradients, and W none. W runs through AccumulateGrad, so that hooks fire, and no
two gradients share memory.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import pipelining

from splitpipe.core.graph import reached
from splitpipe.core.torch_private import tree_leaves
from splitpipe.distributed.torch_private import (
    FORWARD_KINDS,
    _Action,
    _PipelineScheduleRuntime,
    forget_outputs,
    stage_backward_input,
)
from splitpipe.schedule.op import Schedule, torch_name
from splitpipe.schedule.plurals import counted


class Stage(pipelining.PipelineStage):
    """A stage that isn't changed by its first run, in which torch determines the shapes.

    Torch makes the layers compute with uninitialised memory. BatchNorm would include that in its statistics, and an
    embedding would look up rows that it doesn't have.
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
            return loss_fn(output, *more, **rest)  # As in later calls: torch would pass different tuples.

        return super()._backward_metadata_inference(loss, *args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # Torch would detach it in place after B, including parameters and tensors that W needs.
            forget_outputs(self, fwd_chunk_id)
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
                parameters: Any = leaves  # All that have a gradient, including the loss's parameters.
                return stage_backward_input(outputs, bwd_kwargs["output_grads"], inputs, parameters)
            whole = dict(bwd_kwargs)
            if whole["output_grads"] is None:  # The loss, which isn't a tuple there.
                whole["stage_output"] = whole["stage_output"][0]
            grads, _ = super().backward_maybe_with_nosync("full", whole, *more, **rest)
            return grads, []
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *more, **rest)


def separable(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor] | None:
    """The leaves, if torch would find all of them for W, after the inputs' gradients; otherwise None."""
    # Torch walks from a leaf up to the node where an input's path joins. On a path to an output without an input, there
    # is no such node.
    starts = {get_gradient_edge(x)[:2] for x in inputs if isinstance(x, Tensor) and x.requires_grad}
    found: dict[int, Tensor] = {}
    # Since torch 2.15, an edge represents an output that has been sent, and freed.
    edges = [x for x in outputs if isinstance(x, GradientEdge)]
    edges += [get_gradient_edge(x) for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    for edge in edges:
        leaves, met, *_ = reached([edge[:2]], starts)
        if leaves and not met:
            return None
        found.update((id(leaf), leaf) for leaf in leaves)
    return list(found.values())


def weights(groups: Sequence[dict[str, Any]]) -> None:
    """W: the gradients of the leaves, from the nodes where B has stopped."""
    # The paths to a leaf that is used twice contain nodes that other groups need too.
    for group in sorted(groups, key=lambda group: len(group["intermediates"]) == 1):
        edges: list[GradientEdge] = []
        grads: list[Tensor] = []
        handles = []
        if group.get("grads") is None:
            continue
        for given, node in zip(group["grads"], group["intermediates"]):
            if given is None:
                continue
            for number, grad in enumerate(given):
                if grad is not None:
                    edges.append(GradientEdge(node, number))
                    grads.append(grad)
            # Tensor hooks have run in B; a node may come after another one, and its hooks must not run again.
            handles.append(node.register_prehook(lambda _, given=given: given))
        try:
            if edges:
                leaves = [node.variable for node in group["params"]]
                torch.autograd.backward(edges, grads, retain_graph=len(group["intermediates"]) > 1, inputs=leaves)
        finally:
            for handle in handles:
                handle.remove()
        group.clear()


def verify_order(schedule: Schedule) -> None:
    """Raises for schedules that torch can't run: a device has no ops, or the last stage's F aren't in order."""
    idle = [device for device, row in enumerate(schedule.rows) if not row]
    if idle:
        raise ValueError(
            f"the schedule has no ops on {counted(len(idle), 'device')} ({', '.join(map(str, idle))}): expected "
            "ops in every process. Leave out these devices, and start as many processes as have ops."
        )
    last = schedule.stages - 1
    found = [op.microbatch for op in schedule.rows[schedule.placement[last]] if op.kind == "F" and op.stage == last]
    if found != sorted(found):
        raise ValueError(
            f"the schedule runs the last stage's forwards of microbatches in the order {found}: expected "
            f"{sorted(found)}, since torch.distributed.pipelining counts losses in this order. Renumber them."
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
    """The runtime for this process's row of the schedule, or its forwards only; losses aren't divided by ``chunks``."""
    mine = [stage for stage, row in enumerate(schedule.placement) if row == rank]
    # Each runtime has separate stages, since they know what is sent, with gradients or without.
    stages = [Stage(module, stage, schedule.stages, device, group=group) for stage, module in zip(mine, modules)]
    runner: Any = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=loss_fn, scale_grads=False)
    actions = {
        row: [_Action.from_str(torch_name(op)) for op in ops]
        for row, ops in enumerate(schedule.rows)
    }
    runner.pipeline_order = actions
    runner._prepare_schedule_with_comms(actions)
    if forward:
        with_comms = runner.pipeline_order_with_comms
        runner.pipeline_order_with_comms = {
            row: [op for op in ops if op.computation_type in FORWARD_KINDS] for row, ops in with_comms.items()
        }
    return runner
