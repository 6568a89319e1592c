"""Pipeline schedules as values: built, checked, simulated, drawn and searched. Nothing here needs torch."""
from __future__ import annotations

from splitpipe.schedule.check import check
from splitpipe.schedule.costs import Bytes, Costs
from splitpipe.schedule.library import build, names
from splitpipe.schedule.op import Op, Schedule
from splitpipe.schedule.simulate import simulate
from splitpipe.schedule.text import from_csv
from splitpipe.schedule.timeline import Timeline

__all__ = ["Bytes", "Costs", "Op", "Schedule", "Timeline", "build", "check", "from_csv", "names", "simulate"]
