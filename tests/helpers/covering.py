"""Selections of a grid: few cases in which chosen axes have all their combinations, in place of the whole product."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from operator import itemgetter
from random import Random
from typing import Any

import pytest

#: The number of a group of axes, and the places of its values.
Combination = tuple[int, object]


def pairs(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Every two of the axes."""
    return list(combinations(names, 2))


def graded(axes: Mapping[str, Sequence[Any]], essence: Iterable[Sequence[str]], thorough: Iterable[Sequence[str]] = (),
           allowed: Callable[..., bool] = lambda **_: True) -> pytest.MarkDecorator:
    """Parametrizes a test by cases that have every combination of each group of axes, but those that are not allowed.

    What groups of the essence do not need is marked ``thorough``.
    """
    first = covering(axes, essence, allowed)
    more = covering(axes, thorough, allowed, first)[len(first):]
    cases = [pytest.param(*case, id=_name(case)) for case in first]
    cases += [pytest.param(*case, id=_name(case), marks=pytest.mark.thorough) for case in more]
    return pytest.mark.parametrize(tuple(axes), cases)


def few(number: int, values: Iterable[Any]) -> list[Any]:
    """The first ``number`` of a test's cases as they are, the others marked ``thorough``."""
    return [value if at < number else pytest.param(value, marks=pytest.mark.thorough)
            for at, value in enumerate(values)]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by cases that have every two values of any two axes; the essence has each value."""
    return graded(axes, [[axis] for axis in axes], pairs([*axes]))


def _name(case: Iterable[Any]) -> str:
    return "-".join(str(getattr(value, "__name__", value)) for value in case)


def covering(axes: Mapping[str, Sequence[Any]], groups: Iterable[Sequence[str]],
             allowed: Callable[..., bool] = lambda **_: True,
             given: Sequence[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Cases that have every combination of each group of axes that an allowed case has; the same in every process.

    Of the whole product, in an order of chance, those cases are taken first that have most combinations that are new.
    They come behind those given, which they complete; values are in the order of the axes.
    """
    names, values = list(axes), [list(each) for each in axes.values()]
    places = dict.fromkeys(tuple(sorted(names.index(name) for name in group)) for group in groups)
    getters = [*enumerate(itemgetter(*group) for group in places)]

    def had(case: Sequence[int]) -> set[Combination]:
        return {(number, get(case)) for number, get in getters}

    seen = set[Combination]().union(*(had([own.index(x) for own, x in zip(values, case)]) for case in given))
    left = {case: had(case) for case in product(*map(range, map(len, values)))
            if allowed(**{name: own[at] for name, own, at in zip(names, values, case)})}
    order, found = list(left), list(given)
    Random(0).shuffle(order)
    for least in range(len(places), 0, -1):
        for case in order:
            left[case] = left[case] - seen
            if len(left[case]) >= least:
                seen |= left[case]
                found.append(tuple(own[at] for own, at in zip(values, case)))
        order = [case for case in order if not left[case] <= seen]
    return found


def mark_essence(items: Iterable[pytest.Item]) -> None:
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
