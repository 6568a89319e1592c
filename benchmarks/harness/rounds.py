"""Contenders in processes of their own, which stay alive and take turns: only one computes at a time."""

from __future__ import annotations

import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from typing_extensions import Self

from benchmarks.harness.contenders import Contender
from benchmarks.harness.subject import Subject

#: Of the repository.
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Steps:
    """Times and losses of a contender's steps.

    Attributes:
        wall: seconds of each.
        cpu: seconds of processor time of each, all its processes together.
        losses: of all steps, those that were not timed included.
        first: seconds of the first step, which may compile.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first: float = 0.0

    @property
    def median(self) -> float:
        """The median wall time, in seconds."""
        return statistics.median(self.wall)


class Processes:
    """The processes of a contender, as a context manager; they may still be building when it is entered.

    Args:
        contender: who.
        subject: what it is to train.
    """

    def __init__(self, contender: Contender, subject: Subject) -> None:
        self.contender = contender
        threads = str(contender.threads)
        self._environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self._command = [sys.executable, "-m", "benchmarks.harness.contender_process", contender.name]
        self._command += ["--model", subject.model, "--preset", subject.preset, "--chunks", str(subject.chunks)]
        self._command += ["--device", subject.device]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._said: list[IO[bytes]] = []  # What each process wrote to its standard error.

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        meeting = ["--meeting", str(Path(self._folder.name, "meeting"))]
        for rank in range(self.contender.processes):
            self._said.append(tempfile.TemporaryFile())
            command = [*self._command, "--rank", str(rank), *meeting]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said[-1]}
            self._processes.append(subprocess.Popen(command, cwd=ROOT, env=self._environment, **pipes))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        for file in self._said:
            file.close()
        self._folder.cleanup()

    def wait(self) -> None:
        """Until they have built their parts, which is to be done before anything is asked."""
        self._answers()

    def ask(self, word: str) -> list[dict[str, Any]]:
        """The answer of each process.

        Raises:
            RuntimeError: one has ended, with what it wrote to its standard error.
        """
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # It has ended, which its answer will tell.
                process.stdin.write(f"{word}\n".encode())
                process.stdin.flush()
        return self._answers()

    def step(self, steps: Steps, timed: bool) -> None:
        """One step of training, added to ``steps``."""
        began = time.perf_counter()
        answers = self.ask("step")
        took = time.perf_counter() - began
        (loss,) = [answer["loss"] for answer in answers if answer["loss"] is not None]
        steps.first = steps.first or took
        steps.losses.append(loss)
        if timed:
            steps.wall.append(took)
            steps.cpu.append(sum(answer["cpu"] for answer in answers))

    def peak(self) -> int:
        """Bytes of memory beyond those before the first step, all processes together."""
        return sum(answer["peak"] for answer in self.ask("peak"))

    def _answers(self) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        numbers = {process.stdout: number for number, process in enumerate(self._processes)}
        while len(answers) < len(self._processes):
            waiting = [stream for stream, number in numbers.items() if number not in answers]
            for stream in select.select(waiting, [], [])[0]:
                line = stream.readline()
                if not line:
                    self._fail(numbers[stream])
                answers[numbers[stream]] = json.loads(line)
        return [answers[number] for number in range(len(self._processes))]

    def _fail(self, number: int) -> None:
        self._processes[number].kill()  # Another thread of it may not let it end.
        self._processes[number].wait()
        self._said[number].seek(0)
        said = self._said[number].read().decode(errors="replace")
        raise RuntimeError(f"{self.contender.name}: process {number} has ended, and wrote:\n{said}")


def rounds(
    contenders: Sequence[Contender], subject: Subject, passes: int, warm_up: int = 1
) -> dict[str, tuple[Steps, int]]:
    """Lets all take a turn each round, in an order drawn again for each.

    A turn is two steps, the second of them timed: it finds its memory, its caches and its threads as a step of a long
    training would. Then the contender gives back the memory that it has freed. Before the timed rounds the order is the
    given one: who comes first compiles what later ones find in the compiler's cache.

    Args:
        contenders: that take turns.
        subject: what they are to train.
        passes: number of rounds.
        warm_up: rounds before, not timed.

    Returns:
        by name, the steps and the peak of memory in bytes.
    """
    groups = {each.name: Processes(each, subject) for each in contenders}
    draw = random.Random(0)
    steps = {name: Steps() for name in groups}
    with ExitStack() as stack:
        for group in groups.values():
            stack.enter_context(group)
        for group in groups.values():
            group.wait()
        for number in range(-warm_up, passes):
            for name in draw.sample([*groups], len(groups)) if number >= 0 else groups:
                groups[name].step(steps[name], timed=False)
                groups[name].step(steps[name], timed=number >= 0)
                groups[name].ask("rest")
            print(f"round {number + 1} of {passes}", file=sys.stderr, flush=True)
        return {name: (steps[name], group.peak()) for name, group in groups.items()}
