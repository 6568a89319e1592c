"""Skip connections between layers of an nn.Sequential, however far apart."""
from __future__ import annotations

from splitpipe.skip.skippable import pop, skippable, stash, verify_skippables
from splitpipe.skip.tracker import Namespace

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
