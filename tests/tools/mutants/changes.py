"""Mutants: a file of the package with one change, and the function that has it."""
from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from .operators import operators

#: Of what a mutant's name is made.
NAMES = ("file", "line", "function", "before", "after")


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: relative to the repository.
        line: of the change, counted from 1.
        function: the qualified name of the outermost function or method around it.
        before: the changed lines, without the space around them.
        after: what they have become.
        code: of the function.
    """

    file: str
    line: int
    function: str
    before: str
    after: str
    code: CodeType = field(repr=False, hash=False, compare=False)

    @property
    def name(self) -> tuple[str, int, str, str, str]:
        """What tells it from others."""
        return self.file, self.line, self.function, self.before, self.after

    def result(self, killed: str | None) -> str:
        """A line of JSON with what came of it.

        Args:
            killed: the test that failed, or how its process ended; None: it has survived.
        """
        return json.dumps({**dict(zip(NAMES, self.name)), "killed": killed})

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.before}  ->  {self.after or '(nothing)'}"


def results(text: str) -> dict[tuple[str, int, str, str, str], str | None]:
    """What lines of JSON say of mutants, by name."""
    lines = map(json.loads, text.splitlines())
    return {tuple(line[name] for name in NAMES): line["killed"] for line in lines}  # type: ignore[misc]


def functions(code: CodeType) -> dict[str, CodeType]:
    """The outermost functions and methods that a module's code makes, by qualified name; of two the latter."""
    found: dict[str, CodeType] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 1:  # CO_OPTIMIZED: a function, not the body of a class.
                found[constant.co_qualname] = constant
            else:
                found |= functions(constant)
    return found


def _named(source: str) -> list[tuple[range, str]]:
    """Lines of each outermost function's body, and its qualified name."""
    found = []

    def look(nodes: list[ast.stmt], name: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{name}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                found.append((range(node.body[0].lineno, node.end_lineno + 1), name + node.name))

    look(ast.parse(source).body, "")
    return found


def _changed(before: str, after: str) -> tuple[str, str]:
    lines = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    return tuple(" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")  # type: ignore


def mutants(root: Path, file: str, only: int | None = None) -> Iterator[Mutant]:
    """All mutants of a file's functions that compile to other code, each once. What runs at import is not changed.

    Args:
        root: of the repository.
        file: relative to it.
        only: a line; None: all.
    """
    source = (root / file).read_text()
    named, whole = _named(source), functions(compile(source, str(root / file), "exec"))
    seen = {source}
    for operator in operators():
        places = [at for node in ast_nodes(get_ast(source)) for at, _ in operator.mutation_positions(node)]
        for occurrence, (line, _) in enumerate(places):
            function = next((name for lines, name in named if line in lines and only in (None, line)), None)
            after = None if function is None else mutate_code(source, operator, occurrence)
            if function is None or after is None or after in seen:
                continue
            seen.add(after)
            try:
                code = functions(compile(after, str(root / file), "exec"))[function]
            except SyntaxError:
                continue
            if code != whole[function]:  # Else it stands in an annotation.
                yield Mutant(file, line, function, *_changed(source, after), code)
