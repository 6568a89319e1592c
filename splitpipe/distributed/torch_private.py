"""The private names of torch.distributed.pipelining that the package uses; in a file of their own, as few need them."""
# mypy: implicit-reexport
# ruff: noqa: F401, I001
from __future__ import annotations

from torch.distributed import pipelining

from splitpipe.core.torch_private import Attribute, needed, verify

#: The stages of torch 2.11 find out shapes in another way, with which BatchNorm's statistics would not stay.
EXPECTED = "torch>=2.12,<2.14"

with needed("to run a schedule on torch.distributed.pipelining", EXPECTED):
    from torch.distributed.pipelining.schedules import _Action  # An op, as its runtime names it.
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # Runs any list of ops.

with needed("to go backward in two halves on torch.distributed.pipelining", EXPECTED):
    from torch.distributed.pipelining._backward import stage_backward_input  # B: the gradients of the inputs alone.

_SHAPES = "to leave the layers as they were where torch finds out the shapes"
_HALVES = "to go backward in two halves on torch.distributed.pipelining"

#: The methods that ``lowering.Stage`` overrides. Torch alone calls them: were one gone, nobody would notice.
ATTRIBUTES = [
    Attribute(pipelining.PipelineStage, "_to_tensor", _SHAPES),
    Attribute(pipelining.PipelineStage, "_compute_outputs", _SHAPES),
    Attribute(pipelining.PipelineStage, "_backward_metadata_inference", _SHAPES),
    Attribute(pipelining.PipelineStage, "forward_one_chunk", _HALVES),
    Attribute(pipelining.PipelineStage, "backward_maybe_with_nosync", _HALVES),
    Attribute(_PipelineScheduleRuntime, "_prepare_schedule_with_comms", "to have torch add what is sent and received"),
]

verify(ATTRIBUTES, EXPECTED)
