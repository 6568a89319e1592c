"""The tests that call a function, run against its mutants, each in a child of a fork of one collected session."""
from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

import pytest

from .changes import Mutant
from .children import tried
from .replacing import Functions

Key = tuple[str, str]
#: Seconds for a child to begin in.
BEGIN = 20.0
#: Tests of one file for a function.
MOST = 40


def _file(name: str) -> str:
    return name.partition("::")[0]


class Driver:
    """A plugin of pytest that tries mutants in the place of running the tests.

    Args:
        package: the folder whose files are mutated.
        mutants: what to try.
        record: a file for which test calls which functions; if there is one it is believed.
        budgets: seconds of tests for a mutant; those that survive the first are tried with the next.
        processes: children at a time.
        told: called with each mutant and the test that failed, or how its child ended; None if it has survived.
    """

    def __init__(
        self, package: Path, mutants: Sequence[Mutant], record: Path, budgets: Sequence[float], processes: int,
        told: Callable[[Mutant, str | None], object],
    ) -> None:
        self._package, self._mutants, self._record = package, mutants, record
        self._budgets, self._processes, self._told = budgets, processes, told
        self._failed: str | None = None
        self._killers: dict[Key, list[str]] = {}
        self._kills: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = self._failed or report.nodeid

    def _fails(self, items: Sequence[pytest.Item]) -> str | None:
        """The first that does."""
        self._failed = None
        for item, following in zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                break
        return self._failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._functions = Functions(f"{self._package}/")
        if not self._record.exists():
            self._record.write_text(json.dumps(dict(self._recorded())))
        self._tests = self._callers()
        gc.collect()
        gc.freeze()  # Or each child would copy what its collector looks at.
        left = list(self._mutants)
        for number, budget in enumerate(self._budgets):
            tasks = ((mutant, self._chosen(mutant, budget)) for mutant in left)
            survived = []
            for (mutant, _), answer in tried(self._try, tasks, self._limit, self._processes):
                if answer is not None:
                    if answer in self._items:
                        self._killers.setdefault(self._key(mutant), []).insert(0, answer)
                        self._kills[_file(answer)] += 1
                    self._told(mutant, answer)
                elif number + 1 == len(self._budgets):
                    self._told(mutant, None)
                else:
                    survived.append(mutant)
            left = survived
        print("fail by themselves:", self._wrong())
        return True

    def _callers(self) -> dict[Key, list[list[tuple[float, str]]]]:
        """Of each function that has mutants: tests that call it, the quickest of each file."""
        found: dict[Key, dict[str, list[tuple[float, str]]]] = {self._key(mutant): {} for mutant in self._mutants}
        for name, (seconds, keys) in json.loads(self._record.read_text()).items():
            if name in self._items:
                for file, function in keys:
                    if (file, function) in found:
                        found[file, function].setdefault(_file(name), []).append((seconds, name))
        return {key: [sorted(tests)[:MOST] for tests in files.values()] for key, files in found.items()}

    def _recorded(self) -> Iterator[tuple[str, tuple[float, list[Key]]]]:
        files: dict[str, list[str]] = {}
        for name in self._items:
            files.setdefault(_file(name), []).append(name)
        for file, answer in tried(self._record_file, files.values(), lambda _: 900.0, self._processes):
            if isinstance(answer, str):
                print(f"not recorded: {file[0]}: {answer}")
            else:
                yield from answer.items()

    def _record_file(self, names: list[str]) -> dict[str, tuple[float, list[Key]]]:
        found = {}
        items = [self._items[name] for name in names]
        for item, following in zip_longest(items, items[1:]):
            self._failed, start = None, time.perf_counter()
            protocol = partial(item.config.hook.pytest_runtest_protocol, item=item, nextitem=following)
            called = self._functions.called(protocol)
            if self._failed is None:
                found[item.nodeid] = (time.perf_counter() - start, sorted(called))
        return found

    def _key(self, mutant: Mutant) -> Key:
        return mutant.file.partition("/")[2], mutant.function

    def _chosen(self, mutant: Mutant, budget: float) -> list[tuple[float, str]]:
        """Tests that call its function: those that have failed for it, then the quickest of every file in turn, those
        files first that have failed for most mutants so far.
        """
        first = dict.fromkeys(self._killers.get(self._key(mutant), []))
        files = sorted(self._tests[self._key(mutant)], key=lambda tests: -self._kills[_file(tests[0][1])])
        turns = [test for test in chain.from_iterable(zip_longest(*files)) if test is not None]
        chosen, seconds = [], 0.0
        for test in sorted(turns, key=lambda test: test[1] not in first):
            if seconds + test[0] <= budget or not chosen:
                chosen.append(test)
                seconds += test[0]
        # Those of a file one after the other, as they share what a fixture makes.
        order = list(dict.fromkeys(_file(name) for _, name in chosen))
        return sorted(chosen, key=lambda test: order.index(_file(test[1])))

    def _limit(self, task: tuple[Mutant, list[tuple[float, str]]]) -> float:
        return BEGIN + 3 * sum(seconds for seconds, _ in task[1])

    def _try(self, task: tuple[Mutant, list[tuple[float, str]]]) -> str | None:
        mutant, tests = task
        self._functions.replace(self._key(mutant), mutant.code)
        return self._fails([self._items[name] for _, name in tests])

    def _wrong(self) -> list[str]:
        """Tests that have failed for a mutant, and fail alone without any."""
        names = dict.fromkeys(name for them in self._killers.values() for name in them)
        alone = tried(lambda name: self._fails([self._items[name]]), names, lambda _: 200.0, self._processes)
        return [name for name, answer in alone if answer is not None]
