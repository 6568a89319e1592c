"""A balance or cuts for SplitPipe that fit the model: by the time of its parts, or by their memory."""
from __future__ import annotations

from splitpipe.balance.choose import balance_by_size, balance_by_time
from splitpipe.balance.cuts import cuts_by_size, cuts_by_time

__all__ = ["balance_by_size", "balance_by_time", "cuts_by_size", "cuts_by_time"]
