"""Pipeline schedules as values: built, checked, simulated, drawn and searched. Nothing here needs torch."""
from __future__ import annotations

from splitpipe.schedule.check import check
from splitpipe.schedule.construct.block import BlockOp, BuildingBlock
from splitpipe.schedule.construct.library import build, names
from splitpipe.schedule.construct.reorder import reorder
from splitpipe.schedule.construct.search import search
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording import Recording
from splitpipe.schedule.timeline import Timeline, simulate
from splitpipe.schedule.torch_csv import from_csv

__all__ = [
    "BlockOp", "BuildingBlock", "Costs", "Op", "Recording", "Schedule", "Timeline", "build", "check", "from_csv",
    "names", "reorder", "search", "simulate",
]
