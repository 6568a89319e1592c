"""The tests that call a function, run against its mutants, each in a child of a fork of one collected session."""
from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from .changes import Mutant
from .children import tried
from .replacing import Functions

Key = tuple[str, str]
#: Seconds for a child to begin in.
BEGIN = 20.0
#: Tests of one file for a function.
MOST = 40


class Test(NamedTuple):
    """One that calls a function.

    Attributes:
        seconds: it takes.
        name: its node id.
        special: how rare what it calls is: more the fewer tests call each function.
    """

    seconds: float
    name: str
    special: float

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def _own(module: str, file: str) -> bool:
    room, _, name = module.removesuffix(".py").rpartition("/")
    return file.startswith(f"tests/{room}/test_{name}" if room else f"tests/test_{name}")


def _some(tests: list[Test], all_of_them: bool) -> list[Test]:
    tests = sorted(tests)
    return tests if all_of_them else sorted({*tests[:MOST], *sorted(tests, key=lambda test: -test.special)[:MOST]})


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
        #: Of tests that have failed for a mutant.
        self._sound: dict[str, bool] = {}

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
        self._import()
        gc.collect()
        gc.freeze()  # Or each child would copy what its collector looks at.
        left = [mutant for mutant in self._mutants if self._there(mutant)]
        for number, budget in enumerate(self._budgets):
            tasks, left = left, []
            while tasks:
                again = []
                chosen = ((mutant, self._chosen(mutant, budget, number > 0)) for mutant in tasks)
                for (mutant, _), answer in tried(self._try, chosen, self._limit, self._processes):
                    if answer in self._items and not self._passes(answer):
                        again.append(mutant)
                    elif answer is None and number + 1 < len(self._budgets):
                        left.append(mutant)
                    else:
                        self._learn(mutant, answer)
                        self._told(mutant, answer)
                tasks = again
        return True

    def _there(self, mutant: Mutant) -> bool:
        """Whether its function is: what was not replaced must not count as seen."""
        found = self._key(mutant) in self._functions.keys()
        if not found:
            print("not tried, as no test has imported it:", mutant)
        return found

    def _passes(self, name: str) -> bool:
        """Whether a test passes alone, without any mutant."""
        if name not in self._sound:
            (_, failed), = tried(lambda name: self._fails([self._items[name]]), [name], lambda _: 200.0, 1)
            self._sound[name] = failed is None
            if failed is not None:
                print("fails without a mutant:", name)
        return self._sound[name]

    def _learn(self, mutant: Mutant, answer: str | None) -> None:
        if answer is not None and answer in self._items:
            self._killers.setdefault(self._key(mutant), []).insert(0, answer)
            self._kills[answer.partition("::")[0]] += 1

    def _import(self) -> None:
        """What tests import when they run, so that not each child has to."""
        quickest = {tests[0].name: None for files in self._tests.values() for tests in files}
        for _, names in tried(self._imported, [list(quickest)], lambda _: 300.0, 1):
            for name in names:
                with suppress(Exception):
                    import_module(name)

    def _imported(self, names: list[str]) -> list[str]:
        before = {*sys.modules}
        for name in names:
            self._fails([self._items[name]])
        return [name for name in sys.modules if name not in before]

    def _callers(self) -> dict[Key, list[list[Test]]]:
        """Of each function that has mutants: tests that call it, by file, the quickest of each and the most special."""
        record = {name: found for name, found in json.loads(self._record.read_text()).items() if name in self._items}
        often = Counter(tuple(key) for _, keys in record.values() for key in keys)
        found: dict[Key, dict[str, list[Test]]] = {self._key(mutant): {} for mutant in self._mutants}
        for name, (seconds, keys) in record.items():
            test = Test(seconds, name, sum(1 / often[tuple(key)] for key in keys))
            for file, function in keys:
                if (file, function) in found:
                    found[file, function].setdefault(test.file, []).append(test)
        return {
            key: [_some(tests, _own(key[0], file)) for file, tests in files.items()] for key, files in found.items()
        }

    def _recorded(self) -> Iterator[tuple[str, tuple[float, list[Key]]]]:
        files: dict[str, list[str]] = {}
        for name in self._items:
            files.setdefault(name.partition("::")[0], []).append(name)
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

    def _chosen(self, mutant: Mutant, budget: float, special: bool) -> list[Test]:
        """Tests that call its function, of so many seconds.

        First those that have failed for it, then the quickest of every file in turn, those files first that have
        failed for most mutants so far. Or first those in a file named as its own, then the most special.
        """
        key = self._key(mutant)
        files = sorted(self._tests[key], key=lambda tests: -self._kills[tests[0].file])
        turns = [test for test in chain.from_iterable(zip_longest(*files)) if test is not None]
        if special:
            turns.sort(key=lambda test: (not _own(key[0], test.file), -test.special))
        first = {*self._killers.get(key, [])}
        chosen, seconds = [], 0.0
        for test in sorted(turns, key=lambda test: test.name not in first):
            if self._sound.get(test.name, True) and (seconds + test.seconds <= budget or not chosen):
                chosen.append(test)
                seconds += test.seconds
        # Those of a file one after the other, as they share what a fixture makes.
        order = list(dict.fromkeys(test.file for test in chosen))
        return sorted(chosen, key=lambda test: order.index(test.file))

    def _limit(self, task: tuple[Mutant, list[Test]]) -> float:
        return BEGIN + 3 * sum(test.seconds for test in task[1])

    def _try(self, task: tuple[Mutant, list[Test]]) -> str | None:
        mutant, tests = task
        self._functions.replace(self._key(mutant), mutant.code)
        return self._fails([self._items[test.name] for test in tests])
