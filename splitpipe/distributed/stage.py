"""A stage on torch.distributed.pipelining: layers, between tensors that arrive and tensors that leave.

    values of the stage before  |  skips      ──>   layers   ──>      values for the next stage  |  skips

That runtime runs a schedule, given as text; it adds sends and receives from each stage to the next, without deadlocks.
So a skip is sent after the values, from the stage that stashes it to the next one, which pops it. A skip that goes
further is an error, before any process waits for another.
"""
from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import pipelining

from splitpipe.backward.graph_walk import walk
from splitpipe.backward.split_backward import LeafHooks, WeightGradStore, backward_input
from splitpipe.core import thread_state
from splitpipe.core.stream import Place
from splitpipe.core.torch_private import RemovableHandle
from splitpipe.distributed.torch_private import _Action, _PipelineScheduleRuntime
from splitpipe.partition import placement
from splitpipe.schedule.op import Schedule, torch_name
from splitpipe.skip.skippable import crossing
from splitpipe.skip.tracker import Key, open_box

Named = tuple[str, nn.Module]
#: The attributes that a module can have as a whole, separate from its layers.
_OWN = "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
#: Torch's names of the forwards and of what sends, receives and waits for their values.
_FORWARD = re.compile(r"\d+(F|\w+_F)\d+")


class StageModule(nn.Sequential):
    """The layers of one of all stages, with the same names as in the module; its skips arrive and leave in order."""

    def __init__(self, stages: Sequence[Sequence[Named]], stage: int) -> None:
        super().__init__()
        self._modules.update(stages[stage])
        self.stage = stage
        ends = crossing(stages).items()
        self._arriving = [key for key, (_, target) in ends if target == stage]
        self._leaving = [key for key, (source, _) in ends if source == stage]
        self._sent: dict[bool, list[tuple[list[int], torch.dtype, bool]]] = {}
        self.hooked = False  #: True once layers have set hooks in a forward, as of activations.

    def forward(self, *values: Any) -> Any:
        arrived = _node if self.stage else torch.clone  # The batch belongs to the caller.
        values = tuple(map(arrived, values))
        count = len(values) - len(self._arriving)
        box: dict[Key, Any] = dict(zip(self._arriving, values[count:]))
        handle = RemovableHandle.next_id
        with open_box(box):
            output: Any = values[0] if count == 1 else values[:count]
            for layer in self:
                output = layer(output)
        self.hooked |= handle != RemovableHandle.next_id
        values = output if type(output) is tuple and len(output) > 1 else (output,)
        sent = *values, *[box.get(key) for key in self._leaving]
        self._verify(sent)
        return tuple([_node(x.contiguous()) for x in sent])  # Others can't be sent.

    def _verify(self, sent: Sequence[Any]) -> None:
        """Raises for what would arrive as something else, or what the next process doesn't expect."""
        odd = [x for x in sent if not isinstance(x, Tensor) or x.is_complex() and x.requires_grad]
        if odd:
            raise TypeError(
                f"stage {self.stage} would send a {type(odd[0]).__name__}: expected a tensor, or a tuple of several, "
                "where a stage ends, and tensors as skips; none is complex. Cut elsewhere, or use splitpipe.SplitPipe."
            )
        found = [(list(x.shape), x.dtype, x.requires_grad) for x in sent]
        expected = self._sent.setdefault(torch.is_grad_enabled(), found)
        if found != expected:
            raise RuntimeError(
                f"stage {self.stage} would send {found}, but sent {expected} at first (shape, dtype, requires_grad): "
                "expected the same in every step. Build another Pipeline after freezing layers, or for another dtype."
            )


class _Send(Function):
    """The tensor as a node's output; its gradient is made contiguous, as sending requires."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _node(x: Tensor) -> Any:
    """The tensor as a node's output, so that a layer may write to it, and torch may detach it in place."""
    # So it isn't a view, a parameter, or a tensor that a layer has saved.
    return _Send.apply(x) if x.requires_grad and torch.is_grad_enabled() else x


def verify_stages(module: nn.Sequential, stages: Sequence[Sequence[Named]], schedule: Schedule) -> None:
    """Raises for what this runtime can't run."""
    idle = [str(device) for device, row in enumerate(schedule.rows) if not row]
    if idle:
        raise ValueError(f"the schedule has no ops on device {', '.join(idle)}: expected ops in every process.")
    homes, last = schedule.placement, len(stages) - 1
    order = [op.microbatch for op in schedule.rows[homes[last]] if op.kind == "F" and op.stage == last]
    if order != sorted(order):
        raise ValueError(f"the last stage runs microbatches in the order {order}: expected {sorted(order)}.")
    own = [name.strip("_") for name in _OWN if vars(module)[name]]
    if own:
        raise ValueError(f"the module itself has {' and '.join(own)}: expected them in the layers they are for.")
    ends = crossing(stages).items()
    far = [f"{key[1]!r} from stage {source} to stage {target}" for key, (source, target) in ends if target > source + 1]
    if far:
        raise ValueError(f"skips go too far: {', '.join(far)}. Expected both ends in one stage, or in neighbours.")
    processes: Any = [Place(f"process {row}") for row in homes]  # type: ignore[arg-type]
    placement.verify_stages([[layer for _, layer in layers] for layers in stages], processes)


class Stage(pipelining.PipelineStage):
    """A stage whose B and W are this package's, and which isn't changed by its first run.

    In that, torch determines the shapes, with uninitialised memory for values that arrive. BatchNorm would include that
    in its statistics, and an embedding would look up rows that it doesn't have.
    """

    def _compute_outputs(self, *args: Any, module: Any, **kwargs: Any) -> Any:
        for x in args if module.stage else ():
            x.detach().zero_()
        layers = dict(module._modules)
        module._modules.update(copy.deepcopy(layers))
        try:
            return super()._compute_outputs(*args, module=module, **kwargs)
        finally:
            module._modules.update(layers)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, *more: Any, **rest: Any) -> Any:
        if backward_type == "weight":
            (store,) = bwd_kwargs["param_groups"]
            with thread_state.use(thread_state.capture().outside_forward()):  # As in B.
                store.backward_weight()
            sums = [total for total in store.sums.values() if total.value is not None]
            if sums:  # By way of autograd, so that the leaves' hooks run.
                torch.autograd.backward([total.weight for total in sums], [total.value for total in sums])
            return (), None
        if backward_type == "input":
            return self._backward_input(*[bwd_kwargs[x] for x in ("stage_output", "output_grads", "input_values")])
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *more, **rest)

    def _backward_input(self, outputs: Sequence[Any], grads: Sequence[Any] | None, inputs: Sequence[Any]) -> Any:
        """B of a microbatch: the gradients of its inputs, and what is left for W."""
        grads = [torch.ones_like(x) for x in outputs] if grads is None else grads
        # Since torch 2.15, an edge represents an output that has been sent, and freed.
        edges = [x if isinstance(x, GradientEdge) or not x.requires_grad else get_gradient_edge(x) for x in outputs]
        given = [(x, grad) for x, grad in zip(edges, grads) if isinstance(x, GradientEdge) and grad is not None]
        roots = [edge for edge, _ in given]
        wanted = {k: get_gradient_edge(x) for k, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
        # W would miss what hooks of activations change.
        graph = walk(roots, {edge[0] for edge in wanted.values()}, not self.submod.hooked)
        store, hooks = WeightGradStore(None), LeafHooks()
        hooks.park(graph.leaves)  # They run in W.
        try:
            found = backward_input(roots, [grad for _, grad in given], [*wanted.values()], graph, keep=False)
        finally:
            hooks.restore()
        store.add(0, found)
        entries = dict(zip(wanted, found.entries))
        return tuple([entries.get(k) for k in range(len(inputs))]), [store]


def runtime(
    modules: Sequence[StageModule], schedule: Schedule, device: torch.device, group: dist.ProcessGroup | None,
    loss_fn: Callable[[Any, Any], Tensor], forward: bool = False,
) -> Any:
    """The runtime for this process's row of the schedule, or its forwards only; losses aren't divided by ``chunks``."""
    # Each runtime has separate stages, since they know what is sent, with gradients or without.
    stages = [Stage(module, module.stage, schedule.stages, device, group=group) for module in modules]
    runner: Any = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=loss_fn, scale_grads=False)
    actions = {row: [_Action.from_str(torch_name(op)) for op in ops] for row, ops in enumerate(schedule.rows)}
    runner._prepare_schedule_with_comms(actions)
    if forward:
        order = runner.pipeline_order_with_comms
        for row, ops in order.items():
            order[row] = [op for op in ops if _FORWARD.fullmatch(str(op))]
    return runner
