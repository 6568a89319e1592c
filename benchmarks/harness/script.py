"""The command line that every benchmark has: its options, its environment, its tables printed and saved, its end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NoReturn

from benchmarks.harness import measure
from benchmarks.harness.measure import Row
from benchmarks.harness.subject import MODELS, PRESETS, WHERE, device


class Help(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written, and the default behind each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, False, [], argparse.SUPPRESS) or not action.help:
            return action.help
        if isinstance(default, list):
            default = " ".join(map(str, default))
        return f"{action.help} (default: {default})"


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A command line whose first option is ``--save``.

    Args:
        name: of the benchmark's module.
        description: the module's own.
    """
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.parts.{name}", description=description, formatter_class=Help
    )
    parser.add_argument("--save", metavar="PATH", help="where the tables go as JSON, with the environment")
    return parser


def subjects(parser: argparse.ArgumentParser, models: Sequence[str], preset: str) -> None:
    """Adds the options that choose models, their sizes and their device, with these defaults."""
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(models), help="what is trained")
    sizes(parser, preset)


def sizes(parser: argparse.ArgumentParser, preset: str) -> None:
    """Adds the options that choose the sizes of models, and their device, with this default."""
    parser.add_argument("--preset", choices=PRESETS, default=preset, help="sizes of the models")
    parser.add_argument("--device", type=device, default="cpu", help=WHERE)


def environment(left_out: Collection[str] = (), packages: Iterable[str] = (), **more: Any) -> dict[str, Any]:
    """Where and how a benchmark runs, to be taken before it does; says what is left out.

    Args:
        left_out: a line for each thing that can't run here.
        packages: that take part, of which torchgpipe's version is noted.
        more: what else belongs to the result.
    """
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    facts = {**measure.environment(), "left_out": [*left_out], **more}
    if "torchgpipe" in packages:
        facts["torchgpipe"] = version("torchgpipe")
    return facts


def show(tables: Mapping[str, Sequence[Row]]) -> None:
    """Prints tables."""
    for title, rows in tables.items():
        print(f"\n{title}\n\n{measure.table(rows)}", flush=True)


def finish(
    options: argparse.Namespace, environment: dict[str, Any], tables: Mapping[str, Sequence[Row]], wrong: bool = False
) -> int:
    """Prints the tables, and saves them if asked to, unless something is wrong; the exit code, then 1."""
    show(tables)
    if options.save and not wrong:
        measure.save(options.save, environment, tables)
    return int(wrong)


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with a benchmark's exit code; without a traceback, if it is interrupted."""
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
