"""Skip connections between layers of an nn.Sequential, however far apart."""
from __future__ import annotations

from splitpipe.skip.box import Namespace
from splitpipe.skip.pairs import verify_skippables
from splitpipe.skip.skippable import pop, skippable, stash

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
