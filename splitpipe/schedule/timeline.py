"""A played schedule that draws itself."""
from __future__ import annotations

from splitpipe.schedule.played import Played


class Timeline(Played):
    """What ``simulate`` gives: a schedule with the time of each op, its measures and its pictures.

    Example:
        >>> from splitpipe import schedule
        >>> timeline = schedule.simulate(schedule.build("1f1b", devices=4, chunks=8))
        >>> timeline.makespan, timeline.peak_activations
        (33.0, (4.0, 3.0, 2.0, 1.0))
    """
