"""Stages for SplitPipe that fit the model, by the time or the memory of its parts."""
from __future__ import annotations

from splitpipe.balance.balances import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
