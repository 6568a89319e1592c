"""The command line: ``python -m splitpipe``."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from splitpipe.schedule import command

HELP = """usage: python -m splitpipe COMMAND ...

Pipeline parallelism for torch modules, in one process.

commands:
  plan        measure a module, and choose how to split and run it
  schedule    build, simulate, draw and compare pipeline schedules

For more: python -m splitpipe COMMAND --help"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command that the arguments give, without the program's name; returns the exit code."""
    if arguments and arguments[0] == "schedule":
        return command.main(arguments[1:])
    if arguments and arguments[0] == "plan":  # Imported only when needed: torch takes seconds.
        code: int = import_module("splitpipe.planner.command").main(arguments[1:])
        return code
    if arguments and arguments[0] not in ("-h", "--help"):
        return command.failed(f"unknown command {arguments[0]!r}: expected plan or schedule. See --help.", "splitpipe")
    return command.guarded(lambda: print(HELP))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
