"""How a line may be wrong: cosmic-ray's operators, and three of concurrent code's, in its interface."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator

#: What each is to be replaced by, of all that cosmic-ray has: one way for each, and that at the border.
TAKEN = (
    *(f"ReplaceComparisonOperator_{swap}" for swap in (
        "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is",
    )),
    *(f"ReplaceBinaryOperator_{swap}" for swap in (
        "Add_Sub", "Sub_Add", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "BitOr_BitAnd", "BitAnd_BitOr",
    )),
    "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub", "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop",
)
_DELETED = {
    "expr_stmt", "atom_expr", "power", "return_stmt", "raise_stmt", "del_stmt", "assert_stmt", "yield_expr", "keyword",
}


def _leaf(code: str, like: Any) -> Any:
    """Code in the place of a node, with the same space before it."""
    new = parso.parse(code)
    new.get_first_leaf().prefix = like.get_first_leaf().prefix
    return new


class DeleteStatement(Operator):
    """A statement that is not there: a wait, a lock, an early return, a reference let go of."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt":
            for statement in node.children:
                bare = statement.type == "expr_stmt" and statement.children[1].type == "annassign"
                kept = bare and len(statement.children[1].children) == 2 or statement.get_code().strip() == "pass"
                if statement.type in _DELETED and not kept:
                    yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        starts = [start for start, _ in self.mutation_positions(node)]
        node.children = [
            _leaf("pass", child) if child.start_pos == starts[index] else child for child in node.children
        ]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("wait(a)\n", "pass\n"), Example("if a: return 1\n", "if a: pass\n"))


class DeleteContext(Operator):
    """A block outside of a context that it should be in: a lock, a stream, a mode."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "with_stmt":
            for item in node.children[1:-2:2]:
                yield item.start_pos, item.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        items = node.children[1:-2:2]
        if len(items) == 1:
            node.children[:-2] = [_leaf("if True", node)]
        else:
            first = 1 + 2 * index
            del node.children[first - 1 if index else first:first + 1 if index else first + 2]
            node.children[1].get_first_leaf().prefix = " "
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("with a:\n    b()\n", "if True:\n    b()\n"),
            Example("with a, b as c:\n    d()\n", "with b as c:\n    d()\n"),
            Example("with a, b as c:\n    d()\n", "with a:\n    d()\n", occurrence=1),
        )


class FixCondition(Operator):
    """A condition that always holds, or never."""

    def _place(self, node: Any) -> int | None:
        if node.type in ("if_stmt", "while_stmt"):
            return 1
        if node.type in ("ternary", "test"):
            return 2
        return 1 if node.type in ("comp_if", "sync_comp_if") else None

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        place = self._place(node)
        if place is not None:
            for _ in range(1 if node.type == "while_stmt" else 2):
                yield node.children[place].start_pos, node.children[place].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        place = self._place(node)
        assert place is not None
        node.children[place] = _leaf(("False", "True")[index], node.children[place])
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("if a:\n    b()\n", "if False:\n    b()\n"),
            Example("if a:\n    b()\n", "if True:\n    b()\n", occurrence=1),
            Example("c = a if b else d\n", "c = a if False else d\n"),
        )


OWN: tuple[type[Operator], ...] = (DeleteStatement, DeleteContext, FixCondition)


def operators() -> Iterator[Operator]:
    """All of them."""
    for one in OWN:
        yield one()
    for name in TAKEN:
        yield get_operator(f"core/{name}")()
