"""A schedule with the times of its ops, which can draw itself, and the simulation that produces it."""
from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

from splitpipe.schedule.check import checked
from splitpipe.schedule.costs import Costs, verify_costs
from splitpipe.schedule.draw import html, svg, text
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.timed import Span, TimedSchedule


class Timeline(TimedSchedule):
    """A simulated schedule, with the time of each op, its measures and its pictures.

    ``print(timeline)`` draws it as text.

    Example:
        >>> from splitpipe import schedule
        >>> timeline = schedule.simulate(schedule.build("1f1b", devices=4, chunks=8))
        >>> timeline.makespan, timeline.peak_activations
        (33.0, (4.0, 3.0, 2.0, 1.0))
        >>> print(timeline)
        1f1b: 4 devices, 8 microbatches
        <BLANKLINE>
          0              5              10 ...
        0 F0 F1 F2 F3 ..................BW0   F4 BW1 ...
    """

    def __str__(self) -> str:
        return text.draw([self])

    def to_svg(self, path: str | PathLike[str], *others: TimedSchedule) -> None:
        """Writes a picture for a README or a paper; in a browser, hovering over an op shows its name.

        Args:
            path: the file to write.
            others: timelines to draw below it, on the same scale.

        Raises:
            TypeError: ``path`` isn't a path, or ``others`` aren't timelines.
            ValueError: a schedule takes infinitely long.
            OSError: the file can't be written.
        """
        _write(path, svg.draw(self._beside(others)))

    def to_html(self, path: str | PathLike[str], *others: TimedSchedule) -> None:
        """Writes a zoomable page, with each op's times and what is alive on each device. It needs no network.

        Arguments and errors are those of ``to_svg``; ``others`` are on the same time axis.
        """
        _write(path, html.draw(self._beside(others)))

    def _beside(self, others: Sequence[TimedSchedule]) -> list[TimedSchedule]:
        return [self, *others]


def _write(path: str | PathLike[str], content: str) -> None:
    with open(fspath(path), "w", encoding="utf-8", newline="\n") as file:
        file.write(content)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulates a schedule: every op starts as soon as its device is free and its inputs have arrived.

    Args:
        schedule: the schedule to simulate.
        costs: the times of its ops. Default: F, B and W take 1, and copies take no time.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the schedule can't run (see ``check``), or the costs are for another number of stages.

    Example:
        >>> from splitpipe import schedule
        >>> timeline = simulate(schedule.build("zb-h1", devices=4, chunks=8), Costs(copy=0.1))
        >>> round(timeline.makespan, 3), timeline.makespan >= max(timeline.bounds.values())
        (28.2, True)
    """
    order = checked(schedule)
    costs = Costs() if costs is None else costs
    verify_costs(costs)
    starts, ends = order.play(costs)
    spans = [tuple(map(Span, *each)) for each in zip(schedule.rows, starts, ends)]
    return Timeline(schedule, costs, tuple(spans))
