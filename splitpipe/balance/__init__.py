"""A balance or cuts for SplitPipe that fit the model, by the time or the memory of its parts."""
from __future__ import annotations

from splitpipe.balance.balances import balance_by_size, balance_by_time
from splitpipe.balance.cuts import cuts_by_size, cuts_by_time

__all__ = ["balance_by_size", "balance_by_time", "cuts_by_size", "cuts_by_time"]
