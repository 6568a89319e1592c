"""Selections of a grid: few cases in which chosen axes have all their combinations, in place of the whole product."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

#: Places of axes, and a value for each of them.
Combination = tuple[tuple[int, ...], tuple[int, ...]]


def pairs(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Every two of the axes."""
    return list(combinations(names, 2))


def graded(
    axes: Mapping[str, Sequence[Any]], essence: Iterable[Sequence[str]], thorough: Iterable[Sequence[str]] = (),
    allowed: Callable[..., bool] = lambda **_: True,
) -> pytest.MarkDecorator:
    """Parametrizes a test by a selection; what is not in its essence is marked ``thorough``.

    Args:
        axes: the values of each argument of the test; each says what it is as a text.
        essence: groups of axes of which every combination is to be seen.
        thorough: groups of which every combination is to be seen besides those.
        allowed: takes a case by keyword, and tells whether it is possible.
    """
    first = covering(axes, essence, allowed)
    more = covering(axes, thorough, allowed, first)[len(first):]
    cases = [pytest.param(*case, id=_name(case)) for case in first]
    cases += [pytest.param(*case, id=_name(case), marks=pytest.mark.thorough) for case in more]
    return pytest.mark.parametrize(tuple(axes), cases)


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by cases that have every two values of any two axes; the essence has each value."""
    return graded(axes, [[axis] for axis in axes], pairs([*axes]))


def _name(case: Iterable[Any]) -> str:
    return "-".join(str(getattr(value, "__name__", value)) for value in case)


def covering(
    axes: Mapping[str, Sequence[Any]], groups: Iterable[Sequence[str]], allowed: Callable[..., bool] = lambda **_: True,
    given: Sequence[tuple[Any, ...]] = (),
) -> list[tuple[Any, ...]]:
    """Cases that have every combination of each group of axes that an allowed case has; the same in every process.

    Each new case takes the next combination that is missing, and of the cases that have it one with as many other
    missing ones as a greedy choice finds.

    Args:
        axes: the values of each axis, in any order that is always the same.
        groups: names of axes.
        allowed: takes a case by keyword, and tells whether it is possible.
        given: cases to begin with.

    Returns:
        those given, and the ones that they lacked; values in the order of the axes.
    """
    names, values = list(axes), [list(each) for each in axes.values()]
    places = [tuple(sorted(names.index(name) for name in group)) for group in groups]
    found = [tuple(values[place].index(value) for place, value in enumerate(case)) for case in given]

    def fits(case: Sequence[int]) -> bool:
        return allowed(**{name: values[place][case[place]] for place, name in enumerate(names)})

    missing = dict.fromkeys(_combinations(places, values))
    for case in found:
        _strike(missing, places, case)
    for number, combination in enumerate(list(missing)):
        if combination in missing:
            case = _case(combination, missing, places, values, fits, number)
            if case is None:  # No allowed case has it.
                del missing[combination]
            else:
                found.append(case)
                _strike(missing, places, case)
    return [tuple(values[place][value] for place, value in enumerate(case)) for case in found]


def _combinations(places: Iterable[tuple[int, ...]], values: Sequence[Sequence[Any]]) -> Iterator[Combination]:
    """Of the largest group first: its cases have many of the others' combinations."""
    for group in sorted(places, key=lambda group: -_size(group, values)):
        yield from ((group, each) for each in product(*(range(len(values[place])) for place in group)))


def _size(group: tuple[int, ...], values: Sequence[Sequence[Any]]) -> int:
    size = 1
    for place in group:
        size *= len(values[place])
    return size


def _strike(missing: dict[Combination, None], places: Iterable[tuple[int, ...]], case: Sequence[int]) -> None:
    for group in places:
        missing.pop((group, tuple(case[place] for place in group)), None)


def _case(
    combination: Combination, missing: Mapping[Combination, None], places: Sequence[tuple[int, ...]],
    values: Sequence[Sequence[Any]], fits: Callable[[Sequence[int]], bool], number: int,
) -> tuple[int, ...] | None:
    """A case with that combination: the other axes are set one after the other, and back where no case is allowed.

    Of values that are as good as each other the number decides, so that they are all used.
    """
    fixed = dict(zip(*combination))
    free = [place for place in range(len(values)) if place not in fixed]

    def gain(known: Mapping[int, int], place: int) -> int:
        return sum(
            (group, tuple(known[each] for each in group)) in missing
            for group in places if place in group and all(each in known for each in group)
        )

    def tried(known: dict[int, int], left: Sequence[int]) -> tuple[int, ...] | None:
        if not left:
            case = tuple(known[place] for place in range(len(values)))
            return case if fits(case) else None
        place, count = left[0], len(values[left[0]])
        order = [(number + offset) % count for offset in range(count)]
        for value in sorted(order, key=lambda value: -gain({**known, place: value}, place)):
            found = tried({**known, place: value}, left[1:])
            if found is not None:
                return found
        return None

    return tried(fixed, free)
