"""The private names of torch.distributed.pipelining that the package uses; in a separate file, as few users need them.

Its documentation covers constructors and what a user calls: all other names of its classes count as private.
"""
# mypy: implicit-reexport
# ruff: noqa: F401, I001
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed import pipelining

from splitpipe.core.torch_private import Attribute, names_in, needed, verify

#: torch 2.11's stages determine shapes differently, so BatchNorm's statistics would change. Those of 2.12 fail if a
#: value has no gradient, as after a frozen stage, and the other processes wait until the timeout.
EXPECTED = "torch>=2.13,<2.16"

_RUN = "to run a schedule on torch.distributed.pipelining"
_SHAPES = "to leave the layers unchanged while torch determines the shapes"
_HALVES = "to run backward in two halves on torch.distributed.pipelining"
_OUTPUTS = "to keep the outputs of the last stage from torch, which would detach them in place"

with needed(_RUN, EXPECTED):
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.schedules import _Action  # An op, as its runtime names it.
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # Runs any list of ops.
    from torch.distributed.pipelining.schedules import FORWARD, RECV_F, SEND_F  # Kinds of ops.
    from torch.distributed.pipelining.stage import _PipelineStageBase  # What PipelineStage inherits from.

with needed(_HALVES, EXPECTED):
    from torch.distributed.pipelining._backward import stage_backward_input  # B: only the gradients of the inputs.

#: The kinds of ops in a forward only. Since torch 2.15, a separate op waits for each send.
FORWARD_KINDS = frozenset({FORWARD, SEND_F, RECV_F, getattr(schedules, "WAIT_SEND_F", FORWARD)})


_MADE = names_in(_PipelineStageBase.__init__)
#: What a stage keeps of each microbatch from forward to backward; a separate class since torch 2.15.
_KEPT = "_forward_chunk_states" if hasattr(_MADE, "_forward_chunk_states") else "fwd_cache"

ATTRIBUTES = [
    # The methods that ``lowering.Stage`` overrides. Only torch calls them: if one were missing, nothing would show it.
    Attribute(pipelining.PipelineStage, "_to_tensor", _SHAPES),
    Attribute(pipelining.PipelineStage, "_compute_outputs", _SHAPES),
    Attribute(pipelining.PipelineStage, "_backward_metadata_inference", _SHAPES),
    Attribute(pipelining.PipelineStage, "forward_one_chunk", _OUTPUTS),
    Attribute(pipelining.PipelineStage, "backward_maybe_with_nosync", _HALVES),
    # What it reads, and what torch does by itself.
    Attribute(pipelining.PipelineStage, "_get_grad_send_meta", "to send zeros for a value without a gradient"),
    Attribute(pipelining.PipelineStage, "is_last", _OUTPUTS),
    Attribute(pipelining.PipelineStage, "has_backward", _SHAPES),
    Attribute(_MADE, _KEPT, _OUTPUTS),
    Attribute(_Action, "from_str", _RUN),
    Attribute(_Action, "computation_type", _RUN),
    Attribute(_PipelineScheduleRuntime, "_prepare_schedule_with_comms", "to make torch add sends and receives"),
    Attribute(
        names_in(_PipelineScheduleRuntime._prepare_schedule_with_comms), "pipeline_order_with_comms",
        "to run only forward on torch.distributed.pipelining",
    ),
    Attribute(names_in(schedules.PipelineScheduleMulti.__init__), "pipeline_order", _RUN),
]
if _KEPT == "_forward_chunk_states":
    with needed(_OUTPUTS, EXPECTED):
        from torch.distributed.pipelining.stage import _ForwardChunkState  # type: ignore[attr-defined,unused-ignore]
    _FIELDS = SimpleNamespace(**_ForwardChunkState.__dataclass_fields__)
    ATTRIBUTES += [Attribute(_FIELDS, name, _OUTPUTS) for name in ("live_outputs", "output_grad_edges")]

verify(ATTRIBUTES, EXPECTED)


def forget_outputs(stage: pipelining.PipelineStage, microbatch: int) -> None:
    """Makes a stage forget its outputs for a microbatch, which it keeps from forward to backward."""
    kept: dict[int, Any] = getattr(stage, _KEPT)
    if _KEPT == "fwd_cache":
        kept[microbatch] = (), kept[microbatch][1]
    else:
        state = kept[microbatch]
        state.live_outputs, state.output_grad_edges = [], ()
