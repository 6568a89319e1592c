"""The private names of torch.distributed.pipelining that the package uses; in a separate file, as few users need them.

Its documentation covers constructors and what a user calls: all other names of its classes count as private.
"""
# mypy: implicit-reexport
# ruff: noqa: F401
from __future__ import annotations

from torch.distributed import pipelining

from splitpipe.core.torch_private import names_in, needed, require

#: torch 2.11's stages determine shapes differently, so BatchNorm's statistics would change. Those of 2.12 fail if a
#: value has no gradient, as after a frozen stage, and the other processes wait until the timeout.
EXPECTED = "torch>=2.13,<2.16"

_RUN = "to run a schedule on torch.distributed.pipelining"

with needed(_RUN, EXPECTED):
    from torch.distributed.pipelining.schedules import (
        _Action,  # An op, as its runtime names it.
        _PipelineScheduleRuntime,  # Runs any list of ops.
    )

_STAGE = pipelining.PipelineStage
_HALVES = "to run backward in two halves"
# Methods that ``stage.Stage`` overrides. Only torch calls them: if one were missing, nothing would show it.
require(_STAGE, "_compute_outputs", "to leave the layers unchanged while torch determines the shapes", EXPECTED)
require(_STAGE, "backward_maybe_with_nosync", _HALVES, EXPECTED)
require(names_in(_STAGE.backward_maybe_with_nosync), "submod", _HALVES, EXPECTED)
require(_Action, "from_str", _RUN, EXPECTED)
require(_PipelineScheduleRuntime, "_prepare_schedule_with_comms", _RUN, EXPECTED)
require(names_in(_PipelineScheduleRuntime._prepare_schedule_with_comms), "pipeline_order_with_comms", _RUN, EXPECTED)
