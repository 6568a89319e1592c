"""Rules for products that are summed over a dimension: of rows with a constant, and of rows with each other."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitpipe.loss.arithmetic import dot
from splitpipe.loss.facts import CONSTANT, ROWS, Facts, Made, tensors, term
from splitpipe.loss.indexing import made_by
from splitpipe.loss.terms import SUM, Number, Unknown


def einsum(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Products that are summed over letters; if the result has no rows, over those of the rows."""
    given, equation = list(tensors(args[1:])), args[0] if isinstance(args[0], str) else ""
    parts, arrow, result = equation.replace(" ", "").partition("->")
    letters = parts.split(",")
    rows = {own[facts.axis(x)] for x, own in zip(given, letters) if facts.of(x) is ROWS and len(own) == x.dim()}
    plain = arrow and "." not in parts and all(facts.of(x) is ROWS or facts.of(x) is CONSTANT for x in given)
    row = "".join(rows)
    if not plain or len(rows) != 1 or any(own.count(row) > 1 for own in letters):
        return Unknown(name) if rows else facts.other(name, given, out)
    for x, own in zip(given, letters):
        if row in own and made_by(facts, x):
            return Unknown(made_by(facts, x))
    if row not in result:
        return Number((term(out, SUM, None, name),))
    facts.turn(out, result.index(row))
    return ROWS


_PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ mm mv".split())


def matmul(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Products: of rows with a constant, and of rows with each other."""
    given = list(tensors(args))
    if len(given) == 2 and not out.dim():
        made = dot(facts, name, given[0], given[1]) or dot(facts, name, given[1], given[0])
        if made is not None:
            return made
    both = [x for x in given if facts.of(x) is ROWS]
    if name in _PRODUCTS and out.dim() and both:
        sides = given if name != "__rmatmul__" else given[::-1]
        added = [-1, -2 if sides[1].dim() > 1 else -1]
        if all(facts.axis(x) - x.dim() == dim for x, dim in zip(sides, added) if facts.of(x) is ROWS):
            one = len(both) == 2 and min(x.dim() for x in both) == 1
            return Number((term(out, SUM, None, name),)) if one else Unknown(f"{name}, which adds up rows")
    if len(both) == 2 and both[0].dim() == both[1].dim() == 1 and not out.dim():
        return Number((term(out, SUM, None, name),))
    if len(both) == 2 and min(x.dim() for x in both) > 1:
        axes = [facts.axis(x) - x.dim() for x in both]
        if axes in ([-2, -1], [-1, -2]):
            return Unknown(f"{name} of the batch with itself")
    if len(both) == 2 and both[0].dim() == both[1].dim() == out.dim() == 2:
        rows, shape = facts.rows, out.shape
        every = rows > 1 and shape[0] == shape[1] and not shape[0] % rows
        whole = both[0].shape[1] == both[1].shape[0] == rows and shape[0] % rows
        if every or whole and name != "cdist":
            return Unknown(f"{name} of the batch with itself")
    return facts.other(name, given, out)
