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
from splitpipe.schedule.search.search import search
from splitpipe.schedule.timeline import simulate
from splitpipe.schedule.torch_csv import from_csv

USAGE = "python -m splitpipe schedule (NAME | --search | --from-csv FILE | --list) [options]"

EXAMPLES = """examples:
  python -m splitpipe schedule zb-h1 --devices 4 --chunks 8
  python -m splitpipe schedule zb-v --costs 3 4 2 0.1 --compare 1f1b zb-h1 --html schedules.html
  python -m splitpipe schedule interleaved-1f1b --stages-per-device 4 --svg picture.svg --csv ranks.csv
  python -m splitpipe schedule --search --memory 6 --devices 8 --chunks 32 --costs 3 4 2 0
  python -m splitpipe schedule --list

Times have any unit. Without --svg, --html or --csv, a picture goes to the terminal.
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
    parser = Parser("schedule", USAGE, "Builds, simulates, draws, compares and searches pipeline schedules.", EXAMPLES)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="the name of a schedule: see --list")
    add("--list", action="store_true", help="list all names, and exit")
    add("--search", action="store_true", help="search for the shortest schedule")
    add("--from-csv", metavar="FILE", help="read it from torch.distributed.pipelining's text, one line per device")
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
    add("--compare", nargs="+", metavar="NAME", default=[],
        help="also draw these, with the same numbers and those of the options that they have")
    add("--width", type=int, metavar="COLUMNS", help="width of the picture in the terminal")
    add("--svg", metavar="FILE", help="write a picture")
    add("--html", metavar="FILE", help="write a zoomable page")
    add("--csv", metavar="FILE", help="write the rows of the first schedule, for --from-csv")
    return parser


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
    except (OSError, ValueError, ImportError, MemoryError, OverflowError) as error:
        if isinstance(error, OSError) and error.filename is None:
            # So that the interpreter doesn't try to write the rest of the buffer when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if isinstance(error, BrokenPipeError) else failed(str(error) or "the numbers are too big.", who)


def failed(message: str, who: str = "splitpipe schedule") -> int:
    """Prints one line about what is wrong; returns the exit code."""
    with suppress(OSError, AttributeError):  # stderr may be missing or full.
        sys.stderr.write(f"{who}: {' '.join(message.split())}\n")
        sys.stderr.flush()
    return 2


def _run(arguments: Namespace) -> None:
    _verify(arguments)
    if arguments.list:
        _list()
        return
    costs = Costs(*arguments.costs)
    schedules = [_schedule(arguments, costs)]
    for name in arguments.compare:
        chosen = {option: value for option, value in _options(arguments).items() if option in options(name)}
        schedules.append(build(name, schedules[0].devices, schedules[0].microbatches, **chosen))
    timeline, *others = (simulate(schedule, costs) for schedule in schedules)
    if arguments.svg is not None:
        timeline.to_svg(arguments.svg, *others)
    if arguments.html is not None:
        timeline.to_html(arguments.html, *others)
    if arguments.csv is not None:
        schedules[0].to_csv(arguments.csv)
    if arguments.svg is arguments.html is arguments.csv is None:
        width = arguments.width or shutil.get_terminal_size(fallback=(120, 24)).columns
        print(text.draw([timeline, *others], width))


def _verify(arguments: Namespace) -> None:
    ways = {"NAME": arguments.name, "--list": arguments.list, "--search": arguments.search,
            "--from-csv": arguments.from_csv}
    chosen = [way for way, value in ways.items() if value not in (None, False)]
    if len(chosen) != 1:
        raise ValueError(f"found {' and '.join(chosen) or 'no schedule'}: expected one of {', '.join(ways)}. "
                         "See --help.")
    known = {option for name in [arguments.name, *arguments.compare] for option in options(name)}
    unfit = [option for option in _options(arguments) if arguments.name is None and option not in known]
    if arguments.search:
        unfit = [option for option in unfit if option != "stages_per_device"]
    else:
        unfit += [option for option in ("memory", "span") if vars(arguments)[option] is not None]
    if arguments.from_csv is not None:
        unfit += [option for option in ("devices", "chunks") if vars(arguments)[option] is not None]
    for option in unfit:
        raise ValueError(f"--{option.replace('_', '-')} doesn't go with {chosen[0]}: leave it out.")
    files = [os.path.realpath(file) for file in (arguments.svg, arguments.html, arguments.csv) if file is not None]
    if len(files) > len({*files}):
        raise ValueError(f"two outputs are written to one of {files}: expected different files.")


def _list() -> None:
    """Prints a line for each name: a description of the schedule, and its options."""
    for name, function in SCHEDULES.items():
        about = (inspect.getdoc(function) or "").partition("\n")[0]
        print(f"{name:<24}{about}", *(f"[--{option.replace('_', '-')}]" for option in options(name)))


def _options(arguments: Namespace) -> dict[str, Any]:
    values = {option: vars(arguments).get(option) for name in SCHEDULES for option in options(name)}
    return {option: value for option, value in values.items() if value is not None and value is not False}


def _schedule(arguments: Namespace, costs: Costs) -> Schedule:
    if arguments.from_csv is not None:
        return replace(from_csv(arguments.from_csv), name=os.path.basename(arguments.from_csv))
    devices = 4 if arguments.devices is None else arguments.devices
    chunks = 8 if arguments.chunks is None else arguments.chunks
    if arguments.search:
        stages, span = arguments.stages_per_device, arguments.span or "makespan"
        return search(devices, chunks, costs, arguments.memory, stages, span=span)  # type: ignore[arg-type]
    return build(arguments.name, devices, chunks, **_options(arguments))
