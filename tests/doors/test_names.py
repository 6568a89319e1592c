"""A class name has one meaning: no two files of the package have a class of the same name."""
from __future__ import annotations

import ast
from collections import Counter

from tests.doors.test_layers import FILES


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name for path in FILES.values() for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == set()
