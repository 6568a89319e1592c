"""A balance for SplitPipe that fits the model: by the time of its layers, or by their memory."""
from __future__ import annotations

from splitpipe.balance.choose import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
