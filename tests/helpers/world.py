"""Two processes that talk over gloo: a test hands them a function, which both call."""
from __future__ import annotations

import functools
import importlib
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.tools.covered import FOLDER, measured

SIZE = 2
#: Seconds. A collective gives up first, then the wait for a process, then the suite's own clock.
_COLLECTIVE, _ANSWER = 40, 80
_ENDED = "it ended"


class World:
    """The processes, started when they are first needed, and again after a test that failed in them.

    They find each other by files in the folder; what they run of the package is measured, if coverage is.
    """

    def __init__(self, folder: Path, measure: bool = True) -> None:
        self._folder = folder
        self._measure = measure
        self._started = self._others = 0
        self._processes: list[Any] = []
        self._lines: list[Connection] = []

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Calls ``function(rank, *args)`` in both processes; fails if it raises or warns in one."""
        if not self._processes:
            self._start()
        for line in self._lines:
            line.send((function, args))
        for rank, line in enumerate(self._lines):
            fault = self._answer(line)
            if fault is not None:
                self.stop()
                pytest.fail(f"process {rank}:\n{fault}", pytrace=False)

    def lose(self, function: Callable[..., None], *args: Any) -> None:
        """As ``run``, of a function that ends the last process: that one must not answer, and the others must pass.

        In processes of its own, which are not measured: to begin to takes longer than all else.
        """
        self._others += 1
        other = World(self._folder / f"other{self._others}", measure=False)
        other._folder.mkdir()
        try:
            other._start()
            for line in other._lines:
                line.send((function, args))
            faults = [other._answer(line) for line in other._lines]
        finally:
            other.stop()
        assert faults[-1] == _ENDED, f"the last process should have ended: {faults[-1]}"
        for rank, fault in enumerate(faults[:-1]):
            assert fault is None, f"process {rank}:\n{fault}"

    def stop(self) -> None:
        """Ends the processes."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            if self._measure and os.environ.get(FOLDER):
                process.join(20)  # It has something to write.
            process.kill()
            process.join()
            process.close()
        self._processes, self._lines = [], []

    def _start(self) -> None:
        # Forks of a process that has imported torch and has no threads yet: that takes as long as many a test.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor.parallel", "tests.helpers.world"])
        store = self._folder / f"store{self._started}"
        self._started += 1
        for rank in range(SIZE):
            line, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(store), other, self._measure), daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._lines.append(line)

    def _answer(self, line: Connection) -> str | None:
        if not line.poll(_ANSWER):
            return f"no answer in {_ANSWER} s"
        try:
            fault: str | None = line.recv()
        except EOFError:
            return _ENDED
        return fault


@contextmanager
def opened(folder: Path) -> Iterator[World]:
    """A world for the time of the block; a skip where there can be none."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo, and this build of torch has none")
    world = World(folder)
    try:
        yield world
    finally:
        world.stop()


def both(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a function of the rank, and of what the test is parametrized by: both processes call it."""
    own = inspect.signature(function)

    @functools.wraps(function)
    def test(world: World, **given: Any) -> None:
        world.run(_within, function.__module__, function.__name__, given)

    first = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = own.replace(parameters=[first, *[*own.parameters.values()][1:]])  # type: ignore[attr-defined]
    return test


def _within(rank: int, module: str, name: str, given: dict[str, Any]) -> None:
    inspect.unwrap(getattr(importlib.import_module(module), name))(rank, **given)


def _serve(rank: int, store: str, line: Connection, measure: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE,
                            timeout=timedelta(seconds=_COLLECTIVE))
    with measured() if measure else nullcontext(), suppress(EOFError, OSError):  # The other end was closed.
        while True:
            line.send(_called(rank, *line.recv()))


def _called(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> str | None:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(rank, *args)
    except BaseException:
        return traceback.format_exc()
    return None
