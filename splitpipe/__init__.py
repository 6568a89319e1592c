"""Pipeline parallelism for ``torch.nn.Sequential`` on the devices of one machine, in one process."""
from __future__ import annotations

from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.deferral.function import SplitFunction
from splitpipe.phase import is_checkpointing, is_recomputing
from splitpipe.pipe import SplitPipe

__all__ = ["DeferredBatchNorm", "SplitFunction", "SplitPipe", "is_checkpointing", "is_recomputing"]
