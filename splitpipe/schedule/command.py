"""The command line of schedules: ``python -m splitpipe schedule``."""
from __future__ import annotations

import inspect
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from splitpipe.schedule.construct.library import SCHEDULES, build, options
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.draw import text
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.plurals import counted
from splitpipe.schedule.search.search import search
from splitpipe.schedule.timeline import Timeline, simulate
from splitpipe.schedule.torch_csv import from_csv

USAGE = """python -m splitpipe schedule NAME [--devices N] [--chunks N] [--costs F B W COPY] [options]
       python -m splitpipe schedule --from-csv FILE [--costs F B W COPY] [options]
       python -m splitpipe schedule --search [--memory N] [--devices N] [--chunks N] [--costs F B W COPY] [options]
       python -m splitpipe schedule --list"""

MOST = 1_000_000  # The most ops that one command accepts.

EXAMPLES = """examples:
  python -m splitpipe schedule zb-h1 --devices 4 --chunks 8
  python -m splitpipe schedule zb-v --costs 3 4 2 0.1 --compare 1f1b zb-h1 --html schedules.html
  python -m splitpipe schedule interleaved-1f1b --stages-per-device 4 --svg picture.svg --csv ranks.csv
  python -m splitpipe schedule --search --memory 6 --devices 8 --chunks 32 --costs 3 4 2 0
  python -m splitpipe schedule --list

Times have any unit. Without --svg, --html, --trace or --csv, a picture goes to the terminal; NO_COLOR and
FORCE_COLOR are respected.
"""


class Parser(ArgumentParser):
    """The parser of a command; its errors are one line."""

    def __init__(self, command: str, usage: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"python -m splitpipe {command}", usage=usage, description=description, epilog=examples,
            formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(failed(message, self.prog.removeprefix("python -m ")))


def parser() -> ArgumentParser:
    """The parser of ``python -m splitpipe schedule``."""
    made = Parser(
        "schedule", USAGE, "Builds, simulates, draws, compares and searches pipeline schedules.", EXAMPLES
    )
    add = made.add_argument_group("which schedule").add_argument
    add("name", nargs="?", metavar="NAME", help="the name of a schedule: see --list")
    add("--list", action="store_true", help="list all names, and exit")
    add("--search", action="store_true", help="search for the shortest schedule")
    add("--from-csv", metavar="FILE", help="read it from torch.distributed.pipelining's text, one line per device")
    add = made.add_argument_group("its numbers").add_argument
    add("--devices", type=int, metavar="N", help="default: 4")
    add("--chunks", type=int, metavar="N", help="microbatches; default: 8")
    add("--costs", type=float, nargs=4, metavar=("F", "B", "W", "COPY"), default=(1, 1, 1, 0),
        help="times of one microbatch: a whole device's forward pass, input gradient and weight gradients, and one "
             "copy to another device; default: 1 1 1 0")
    add("--split", action="store_true", help="W separate from B, in idle time: gpipe, 1f1b, eager-1f1b")
    add("--stages-per-device", type=int, metavar="N", help="for an interleaved schedule, or a search")
    add("--group", type=int, metavar="N", help="for interleaved-low-memory")
    add("--span", choices=("makespan", "longest"),
        help="with --search: what to minimise, the makespan (default) or the longest span of a device")
    add("--memory", type=float, metavar="N",
        help="with --search: number of microbatches whose activations a device has room for")
    add = made.add_argument_group("output").add_argument
    add("--compare", nargs="+", metavar="NAME", default=[],
        help="also draw these, with the same numbers and those of the options that they have")
    add("--width", type=int, metavar="COLUMNS", help="width of the picture in the terminal")
    add("--svg", metavar="FILE", help="write a picture")
    add("--html", metavar="FILE", help="write a zoomable page")
    add("--trace", metavar="FILE", help="write trace events for ui.perfetto.dev; a unit of time is a millisecond")
    add("--csv", metavar="FILE", help="write the rows of the first schedule, for --from-csv")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command given on the command line."""
    return guarded(lambda: _run(parser().parse_args(arguments)))


def guarded(work: Callable[[], None], who: str = "splitpipe schedule") -> int:
    """Runs ``work``; returns the exit code: 0, 2 after a line on stderr, 130 after Ctrl-C, 141 if stdout is closed."""
    try:
        try:
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
        if sys.stdout is not None:  # None if the shell closed it.
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is not None:
            return failed(f"{error.filename!r}: {error.strerror}", who)
        # So that the interpreter doesn't try to write the rest of the buffer when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if isinstance(error, BrokenPipeError) else failed(error.strerror or str(error), who)
    except (ValueError, ImportError) as error:
        return failed(str(error), who)
    except (MemoryError, OverflowError):
        return failed("the numbers are too big.", who)


def failed(message: str, who: str = "splitpipe schedule") -> int:
    """Prints one line about what is wrong; returns the exit code."""
    with suppress(OSError, AttributeError):  # stderr may be missing or full.
        sys.stderr.write(f"{who}: {' '.join(message.split())}\n")
        sys.stderr.flush()
    return 2


def _run(given: Namespace) -> None:
    _verify(given)
    if given.list:
        print("\n".join(_names()))
        return
    costs = Costs(*given.costs)
    schedule = _first(given, costs)
    first, *others = (simulate(each, costs) for each in [schedule, *_compared(given, schedule)])
    if given.svg is not None:
        first.to_svg(given.svg, *others)
    if given.html is not None:
        first.to_html(given.html, *others)
    if given.trace is not None:
        first.to_chrome_trace(given.trace, *others)
    if given.csv is not None:
        schedule.to_csv(given.csv)
    if not _files(given):
        _show([first, *others], given.width)


def _files(given: Namespace) -> list[str]:
    """The files to write."""
    return [os.path.realpath(file) for file in (given.svg, given.html, given.trace, given.csv) if file is not None]


def _verify(given: Namespace) -> None:
    """Raises for options that don't go together."""
    ways = {"NAME": given.name, "--list": given.list, "--search": given.search, "--from-csv": given.from_csv}
    chosen = [way for way, value in ways.items() if value not in (None, False)]
    if len(chosen) != 1:
        raise ValueError(f"found {' and '.join(chosen) or 'no schedule'}: expected one of {', '.join(ways)}. "
                         "See --help.")
    for option in "memory", "span":
        if vars(given)[option] is not None and not given.search:
            raise ValueError(f"--{option} goes with --search: for other schedules, it is a result. Leave it out.")
    if given.from_csv is not None and (given.devices is not None or given.chunks is not None):
        raise ValueError("--devices and --chunks don't go with --from-csv: the file determines them. Leave them out.")
    if given.width is not None and given.width < 1:
        raise ValueError(f"--width {given.width}: expected a number of columns, at least 1.")
    files = _files(given)
    verify_apart(files)
    if given.from_csv is not None and os.path.realpath(given.from_csv) in files:
        raise ValueError(f"{given.from_csv!r} is both read and written: expected two different files.")
    taken = {option for name in given.compare for option in options(name)}
    if given.search:
        taken.add("stages_per_device")
    for option in _options(given):
        if given.name is None and option not in taken:
            raise ValueError(f"--{option.replace('_', '-')} is an option of some named schedules, "
                             f"not of {chosen[0]}: leave it out.")


def verify_apart(files: Sequence[str]) -> None:
    """Raises if two outputs have the same file name."""
    for file in files:
        if files.count(file) > 1:
            raise ValueError(f"two outputs are written to {file!r}: expected different files.")


def _names() -> list[str]:
    """A line for each name: a description of the schedule, and its options."""
    width = max(map(len, SCHEDULES)) + 2
    lines = []
    for name, function in SCHEDULES.items():
        about = (inspect.getdoc(function) or "").partition("\n")[0]
        its = "".join(f" [--{option.replace('_', '-')}]" for option in options(name))
        lines.append(f"{name:<{width}}{about}{its}")
    return lines


def _options(given: Namespace) -> dict[str, Any]:
    """The options of a schedule that were given."""
    each = {option: vars(given).get(option) for name in SCHEDULES for option in options(name)}
    return {option: value for option, value in each.items() if value is not None and value is not False}


def _first(given: Namespace, costs: Costs) -> Schedule:
    if given.from_csv is not None:
        return replace(from_csv(given.from_csv), name=os.path.basename(given.from_csv))
    devices = 4 if given.devices is None else given.devices
    chunks = 8 if given.chunks is None else given.chunks
    stages = given.stages_per_device or 1
    if devices * stages * max(chunks, devices) > MOST:
        raise ValueError(
            f"{counted(devices, 'device')}, {counted(chunks, 'chunk')} and {counted(stages, 'stage')} per device: "
            f"expected no more than {MOST} F."
        )
    if given.search:
        return search(
            devices, chunks, costs, memory=given.memory, stages_per_device=given.stages_per_device,
            span=given.span or "makespan",
        )
    return build(given.name, devices, chunks, **_options(given))


def _compared(given: Namespace, first: Schedule) -> list[Schedule]:
    """The other schedules, each with those of the options that it has."""
    chosen = _options(given)
    return [
        build(name, first.devices, first.microbatches,
              **{option: chosen[option] for option in options(name) if option in chosen})
        for name in given.compare
    ]


def _show(timelines: Sequence[Timeline], width: int | None) -> None:
    if sys.stdout is None:
        return
    columns = shutil.get_terminal_size(fallback=(120, 24)).columns if width is None else width
    picture = text.draw(timelines, columns, text.wants_colour(sys.stdout))
    encoding = sys.stdout.encoding or "utf-8"
    print(picture.encode(encoding, "backslashreplace").decode(encoding))
