"""Pipeline schedules as values: built, checked, simulated, drawn and searched. Nothing here needs torch."""
from __future__ import annotations

from splitpipe.schedule.block import BuildingBlock, Pass
from splitpipe.schedule.check import check
from splitpipe.schedule.costs import Bytes, Costs
from splitpipe.schedule.library import build, names
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording import Recording, Step
from splitpipe.schedule.search import search
from splitpipe.schedule.simulate import simulate
from splitpipe.schedule.text import from_csv
from splitpipe.schedule.tiling import Tiling
from splitpipe.schedule.timeline import Timeline

__all__ = [
    "BuildingBlock", "Bytes", "Costs", "Op", "Pass", "Recording", "Schedule", "Step", "Tiling", "Timeline", "build",
    "check", "from_csv", "names", "search", "simulate",
]
