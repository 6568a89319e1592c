"""The command line of schedules: ``python -m splitpipe schedule``."""
from __future__ import annotations

import inspect
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from splitpipe.schedule.construct.library import SCHEDULES, build, options
from splitpipe.schedule.costs import Costs
from splitpipe.schedule.draw import text
from splitpipe.schedule.timeline import simulate

USAGE = "python -m splitpipe schedule (NAME | --list) [options]"

EXAMPLES = """examples:
  python -m splitpipe schedule zb-h1 --devices 4 --chunks 8
  python -m splitpipe schedule zb-v --costs 3 4 2 0.1 --compare 1f1b zb-h1 --html schedules.html
  python -m splitpipe schedule interleaved-1f1b --stages-per-device 4 --svg picture.svg
  python -m splitpipe schedule --list

Times have any unit. Without --svg or --html, a picture goes to the terminal.
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
    parser = Parser("schedule", USAGE, "Builds, simulates, draws and compares pipeline schedules.", EXAMPLES)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", metavar="NAME", help="the name of a schedule: see --list")
    which.add_argument("--list", action="store_true", help="list all names, and exit")
    add = parser.add_argument
    add("--devices", type=int, metavar="N", default=4, help="default: 4")
    add("--chunks", type=int, metavar="N", default=8, help="microbatches; default: 8")
    add("--costs", type=float, nargs=4, metavar=("F", "B", "W", "COPY"), default=(1, 1, 1, 0),
        help="times of one microbatch: a whole device's forward pass, input gradient and weight gradients, and one "
             "copy to another device; default: 1 1 1 0")
    add("--split", action="store_true", default=None, help="W separate from B, in idle time: gpipe, 1f1b, eager-1f1b")
    add("--stages-per-device", type=int, metavar="N", help="for an interleaved schedule")
    add("--group", type=int, metavar="N", help="for interleaved-low-memory")
    add("--compare", nargs="+", metavar="NAME", default=[],
        help="also draw these, with the same numbers and those of the options that they have")
    add("--svg", metavar="FILE", help="write a picture")
    add("--html", metavar="FILE", help="write a zoomable page")
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
    if arguments.list:
        for name, function in SCHEDULES.items():
            about = (inspect.getdoc(function) or "").partition("\n")[0]
            print(f"{name:<24}{about}", *(f"[--{option.replace('_', '-')}]" for option in options(name)))
        return
    known = {option for name in SCHEDULES for option in options(name)}
    chosen = {option: value for option, value in vars(arguments).items() if option in known and value is not None}
    schedules = [build(arguments.name, arguments.devices, arguments.chunks, **chosen)]
    for name in arguments.compare:
        own = {option: value for option, value in chosen.items() if option in options(name)}
        schedules.append(build(name, arguments.devices, arguments.chunks, **own))
    timeline, *others = [simulate(schedule, Costs(*arguments.costs)) for schedule in schedules]
    if arguments.svg is not None:
        timeline.to_svg(arguments.svg, *others)
    if arguments.html is not None:
        timeline.to_html(arguments.html, *others)
    if arguments.svg is arguments.html is None:
        print(text.draw([timeline, *others], shutil.get_terminal_size(fallback=(120, 24)).columns))
