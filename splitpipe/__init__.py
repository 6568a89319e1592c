"""The front door: what a user imports from splitpipe."""
from __future__ import annotations

from splitpipe.phase import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
