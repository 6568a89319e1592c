"""Pipeline schedules as values: built, checked, simulated, drawn and searched. Nothing here needs torch."""
from __future__ import annotations

from splitpipe.schedule.check import check
from splitpipe.schedule.construct.block import BuildingBlock, Pass
from splitpipe.schedule.construct.library import build, names
from splitpipe.schedule.construct.tiling import Tiling
from splitpipe.schedule.costs import Bytes, Costs
from splitpipe.schedule.csv import from_csv
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.recording.recording import Recording, Step
from splitpipe.schedule.search.search import search
from splitpipe.schedule.simulate import simulate
from splitpipe.schedule.timeline import Timeline

__all__ = [
    "BuildingBlock", "Bytes", "Costs", "Op", "Pass", "Recording", "Schedule", "Step", "Tiling", "Timeline", "build",
    "check", "from_csv", "names", "search", "simulate",
]
