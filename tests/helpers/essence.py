"""The essence of the tests: of each that is parametrized, as few cases as show every value of every parameter."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks as ``thorough`` tests of two processes, and what the essence leaves out of those with several parameters.

    What they mark themselves stays so. A test with one list of parameters has a say of each of its cases.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: item.nodeid):
        if "world" in getattr(item, "fixturenames", ()):  # To start the processes alone takes ten seconds.
            item.add_marker(pytest.mark.thorough)
        if len([*item.iter_markers("parametrize")]) > 1 and not item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        chosen = essence([item.callspec.params for item in cases])  # type: ignore[attr-defined]
        for number, item in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.thorough)


def essence(cases: list[Mapping[str, object]]) -> set[int]:
    """The indices of few cases that together have every value, which is one object, of every parameter: greedily."""
    left = [{(name, id(value)) for name, value in case.items()} for case in cases]
    missing, found = {value for case in left for value in case}, set()
    while missing:
        best = max(range(len(left)), key=lambda number: len(left[number] & missing))
        found.add(best)
        missing -= left[best]
    return found
