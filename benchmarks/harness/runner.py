"""A part of the benchmarks: a script in a process of its own, within a time, whose result is whole or not there."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import measure

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
#: Lines of a part that failed to show.
LAST = 15
#: What a part may take of the seconds that it takes, about.
PATIENCE = 3


@dataclass(frozen=True)
class Setting:
    """How a part runs on a kind of device.

    Attributes:
        options: of its script.
        seconds: that it takes, about: what it may take goes by them.
    """

    options: str
    seconds: float


@dataclass(frozen=True)
class Part:
    """A script that saves a result.

    Attributes:
        name: by which it is chosen, and of its result.
        command: the module, from benchmarks, and the options that it has everywhere.
        cpu: how it runs on the CPU, on two cores; None: it has nothing to do there.
        cuda: how it runs on a CUDA device; None: it has nothing to do there.
        quick: options, after these, for sizes and numbers that show no more than that it runs.
    """

    name: str
    command: str
    cpu: Setting | None
    cuda: Setting | None
    quick: str

    def setting(self, device: str) -> Setting | None:
        """How it runs on a device, if it does."""
        return self.cpu if device == "cpu" else self.cuda

    def words(self, device: str, quick: bool = False) -> list[str]:
        """Its command on a device where it runs; where the result goes is left open.

        Example:
            >>> Part("a", "a", Setting("--passes 5", 1), Setting("--passes 9", 1), "").words("cuda")
            ['a', '--device', 'cuda', '--passes', '9']
        """
        setting = self.setting(device)
        assert setting is not None, f"{self.name} does not run on {device}"
        there = "" if device == "cpu" else f"--device {device}"
        return shlex.split(f"{self.command} {there} {setting.options} {self.quick if quick else ''}")


@dataclass(frozen=True)
class Outcome:
    """The end of a command.

    Attributes:
        seconds: that it took.
        fault: why it is no success; None: it is one.
        last: lines that it printed at the end.
    """

    seconds: float
    fault: str | None = None
    last: tuple[str, ...] = ()


def finish(words: Sequence[str], limit: float) -> Outcome:
    """Runs a script in the root of the repository; whatever it has started ends with it.

    Args:
        words: its module, from benchmarks, and its options.
        limit: seconds that it may take.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=said, stderr=said, start_new_session=True,
        )
        try:
            code = process.wait(limit)
            fault = f"ended with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            fault = f"was stopped after {limit:.0f} s"
        finally:
            # Its group is itself and what it has started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        took = time.perf_counter() - began
        said.seek(0)
        return Outcome(took, fault, tuple(said.read().splitlines()[-LAST:]))


def measured(part: Part, into: Path, device: str, quick: bool, asked: str) -> Outcome:
    """Runs a part. Its result takes the place of an older one when it is whole, and not before.

    Args:
        part: what to run.
        into: the folder of results.
        device: where to run it.
        quick: see ``Part.quick``.
        asked: the command that runs all parts, to be kept in the result.
    """
    target, setting = into / f"{part.name}-{device}.json", part.setting(device)
    assert setting is not None, f"{part.name} does not run on {device}"
    new = into / f".{target.name}.new"
    try:
        outcome = finish([*part.words(device, quick), "--save", str(new)], PATIENCE * setting.seconds)
        if outcome.fault is not None:
            return outcome
        try:
            result = json.loads(new.read_text(encoding="utf-8"))
            environment, tables = result["environment"], result["tables"]
        except (OSError, ValueError, KeyError) as error:
            return Outcome(outcome.seconds, f"left no result: {error!r}", outcome.last)
        if not any(tables.values()):
            return Outcome(outcome.seconds, "measured nothing", outcome.last)
        environment["command"] = environment.get("command", "").replace(str(new), short(target))
        environment["run"] = {"command": asked, "seconds": round(outcome.seconds, 1)}
        measure.save(str(new), environment, tables)
        new.replace(target)
        return outcome
    finally:
        new.unlink(missing_ok=True)


def sentence(outcome: Outcome) -> str:
    """A sentence about the end of a command, and the end of what it said if that is not well.

    Example:
        >>> print(sentence(Outcome(2.0)))
        2.0 s
        >>> print(sentence(Outcome(2.0, "ended with exit code 1", ("no room",))))
        ended with exit code 1 after 2.0 s
            no room
    """
    if outcome.fault is None:
        return f"{outcome.seconds:.1f} s"
    return "\n".join([f"{outcome.fault} after {outcome.seconds:.1f} s", *(f"    {line}" for line in outcome.last)])


def short(path: Path) -> str:
    """A path as seen from the root of the repository, if it lies there."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
