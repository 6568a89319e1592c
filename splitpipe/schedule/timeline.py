"""A played schedule that draws itself."""
from __future__ import annotations

from os import PathLike, fspath

from splitpipe.schedule.draw import html, svg, text, trace
from splitpipe.schedule.played import Played


class Timeline(Played):
    """What ``simulate`` gives: a schedule with the time of each op, its measures and its pictures.

    Printed, it is a picture in letters: ``print(timeline)``.

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

    def to_svg(self, path: str | PathLike[str], *others: Played) -> None:
        """Writes a picture that a README or a paper can show; in a browser, hovering an op names it.

        Args:
            path: of the file.
            others: to be drawn below it, on the same scale.

        Raises:
            TypeError: the path is none, or others are no timelines.
            ValueError: a schedule takes infinitely long.
            OSError: the file can't be written.
        """
        _write(path, svg.draw([self, *others]))

    def to_html(self, path: str | PathLike[str], *others: Played) -> None:
        """Writes a page to zoom into, with each op's times and what is alive on each device. It needs no network.

        Args:
            path: of the file.
            others: to be compared with it, on the same time axis.

        Raises:
            TypeError: the path is none, or others are no timelines.
            ValueError: a schedule takes infinitely long.
            OSError: the file can't be written.
        """
        _write(path, html.draw([self, *others]))

    def to_chrome_trace(self, path: str | PathLike[str], *others: Played, unit: float = 1000.0) -> None:
        """Writes Chrome's trace events, which Perfetto (https://ui.perfetto.dev) opens.

        Args:
            path: of the file.
            others: to stand beside it, each a process of its own.
            unit: how many microseconds a unit of the costs is: 1000 for costs in milliseconds.

        Raises:
            TypeError: the path is none, or others are no timelines.
            ValueError: a schedule takes infinitely long, or the unit is not positive.
            OSError: the file can't be written.
        """
        _write(path, trace.draw([self, *others], unit))


def _write(path: str | PathLike[str], content: str) -> None:
    with open(fspath(path), "w", encoding="utf-8", newline="\n") as file:
        file.write(content)
