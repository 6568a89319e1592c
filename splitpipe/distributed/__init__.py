"""The same Sequential, balance, chunks and schedule on several machines, with torch.distributed.pipelining."""
from __future__ import annotations

from splitpipe.distributed.pipeline import Pipeline

__all__ = ["Pipeline"]
