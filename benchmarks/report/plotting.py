"""Parts of the pictures: a plot in one style, colours by who is shown, bars, lines, labels that don't hide.

matplotlib is imported by what draws alone, so that the rest works without it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measure import Row
from benchmarks.report import cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Tables = Mapping[str, Sequence[Row]]
#: A median, and how far whiskers reach below it and above it.
Spread = tuple[float, float, float]

#: Colours that colour-blind eyes tell apart, too (Okabe and Ito), and a grey.
BLUE, SKY, GREEN, ORANGE, RED, GREY = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#767676"

#: Colour, mark and line of who is shown, by the start of the name, the first that fits.
LOOKS = {
    "unwrapped, 2": (GREY, "-"),
    "unwrapped, whole batch, 2": (GREY, "-"),
    "unwrapped": (GREY, ":"),
    "torchgpipe": (ORANGE, "s--"),
    "torch.distributed": (RED, "x--"),
    "splitpipe, drop-in, autograd": (SKY, "v-"),
    "splitpipe, autograd": (SKY, "v-"),
    "splitpipe, drop-in": (BLUE, "o-"),
    "splitpipe, split": (BLUE, "o-"),
    "splitpipe, 1f1b": (RED, "^-"),
    "splitpipe": (GREEN, "D-"),
}
LINE: dict[str, Any] = {"ms": 4, "lw": 1.3}
WHISKER: dict[str, Any] = {"capsize": 2, "elinewidth": 1}

#: Text stays text, for the reader's fonts; the salt makes names inside the file the same every time.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "splitpipe",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.0,
    "figure.titlesize": 11.0,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "savefig.facecolor": "white",
}


def svg(draw: Callable[[Figure, Tables], None], result: Path) -> bytes:
    """A picture as a file: without a date, and with its results in its metadata.

    Args:
        draw: draws the tables into an empty figure.
        result: the file that they are in.
    """
    import matplotlib
    from matplotlib.figure import Figure

    content = json.loads(result.read_text(encoding="utf-8"))
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        figure.supxlabel(cells.machine(content["environment"]), x=0.01, ha="left", fontsize=7, color=GREY)
        draw(figure, content["tables"])
        figure.savefig(file, format="svg", metadata={"Date": None, "Source": source(result)})
    return file.getvalue()


def source(result: Path) -> str:
    """A file of results by name and digest, so that a picture tells what state of it it shows."""
    return f"{result.name} sha256:{hashlib.sha256(result.read_bytes()).hexdigest()}"


def axes(figure: Figure, title: str, x: str, y: str, grid: str = "y") -> Axes:
    """The one plot of a figure."""
    figure.suptitle(title, x=0.01, ha="left")
    plot: Axes = figure.subplots()
    plot.set(xlabel=x, ylabel=y)
    plot.grid(axis=grid)  # type: ignore[arg-type]
    plot.tick_params(length=0)
    return plot


def look(name: str) -> tuple[str, str]:
    """Colour, and mark and line, of who is shown.

    Example:
        >>> look("torchgpipe, GPipe")
        ('#e69f00', 's--')
    """
    return next((style for start, style in LOOKS.items() if name.startswith(start)), (SKY, "x-"))


def spread(row: Row, column: str) -> Spread:
    """A median with its percentiles, as measure.spread names them; without whiskers, where there are none.

    Example:
        >>> spread({"ms": 3.0, "ms: 25%": 2.0, "ms: 75%": 5.0}, "ms")
        (3.0, 1.0, 2.0)
    """
    middle = float(row[column])
    low, high = (float(row.get(f"{column}: {part}", middle)) for part in ("25%", "75%"))
    return middle, max(0.0, middle - low), max(0.0, high - middle)


def legend(it: Axes) -> None:
    """Above the plot, in one line."""
    close: dict[str, Any] = {"borderaxespad": 0.1, "columnspacing": 1.0, "handletextpad": 0.5, "handlelength": 1.5}
    it.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=9, **close)


def bars(it: Axes, groups: Sequence[str], heights: Mapping[str, Sequence[Spread | None]]) -> None:
    """Bars side by side, a colour for each who, with their numbers above them.

    Args:
        it: the plot.
        groups: what stands below each group of bars.
        heights: of each who, for each group.
    """
    width = 0.8 / len(heights)
    for number, (who, its) in enumerate(heights.items()):
        shift = width * (number - (len(heights) - 1) / 2)
        there = [(place + shift, *each) for place, each in enumerate(its) if each is not None]
        places, middle, low, high = zip(*there)
        whiskers = (low, high) if any(low + high) else None
        it.bar(places, middle, 0.92 * width, yerr=whiskers, color=look(who)[0], label=who, error_kw=WHISKER)
        for place, value, more in zip(places, middle, high):
            above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 7}
            it.annotate(f"{value:.2f}", (place, value + more), **above)
    it.set_xticks(range(len(groups)), groups)
    legend(it)


def lines(it: Axes, name: str, places: Sequence[float], values: Sequence[Spread]) -> None:
    """A line with whiskers."""
    colour, kind = look(name)
    middle, low, high = zip(*values)
    it.errorbar(places, middle, [low, high], fmt=kind, color=colour, label=name, **LINE, **WHISKER)


def label(it: Axes, texts: Mapping[tuple[float, float], str], others: Sequence[tuple[float, float]]) -> None:
    """Writes a text beside each point, where it hides neither a point nor another text, if there is such a place.

    Args:
        it: the plot, with all that belongs into it.
        texts: by their points.
        others: points that are not to be hidden, either.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    # Laid out as it will be, so that places are known.
    FigureCanvasAgg(it.get_figure(root=True)).draw()  # type: ignore[no-untyped-call]
    marks = it.transData.transform([*texts, *others])
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in marks]
    shown = it.get_legend()
    taken += [shown.get_window_extent()] if shown else []
    around = [(x, y) for y in (0, 1, -1, 2, -2) for x in (1, -1)] + [(0, 1), (0, -1), (1, 0)]
    for place, text in texts.items():
        for number, (x, y) in enumerate(around, 1):
            how: dict[str, Any] = {"ha": {1: "left", 0: "center", -1: "right"}[x], "va": "center", "fontsize": 7}
            note = it.annotate(text, place, (6 * x, 8 * y), textcoords="offset points", **how)
            box = note.get_window_extent()
            if number == len(around) or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            note.remove()
