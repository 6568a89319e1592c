"""Pages and the package are in plain English: none has one of these phrases, each of which has a plainer one."""
from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.doors.test_readme import OTHERS, PAGES, ROOT

#: Phrases, as regular expressions, and what to write instead.
PLAINER = {
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b)": "isn't a",
    r"\bof (?:its|their|one's|your|the user's) own\b": "own, custom, separate",
    r"\bby (?:a|the) schedule\b|\bby cuts\b": "with a schedule, with cuts",
    r"\bonce a (?:batch|call|microbatch|step)\b|\bone a (?:device|stage)\b|\b(?:process|stages) a device\b": "per",
    r"\bg(?:o|oes|oing|one) back(?:ward)?\b": "runs backward",
    r"\bnobody\b|\bwhoever\b": "the passive",
    r"\bso (?:few|many)\b(?! (?:as|that)\b)": "that many",
    r"\bstands?\b(?!-in)": "is",
    r"\brefuse[sd]?\b": "raises an error, is an error",
    r"\b(?:can|could)(?:'t| not) be had\b": "isn't possible",
    r", say\b": "for example, such as",
    r"\bas ever\b|\bwill not do\b|\bsays? so\b": "as before, limitations",
    r"\bbeside\b": "next to, compared with",
}
#: The same in the package's docstrings, comments, and texts of errors and warnings.
PLAINER_IN_CODE = {
    **PLAINER,
    r"[,;:] gives\b": "returns",
    r"\b(?:in|out)side of\b": "inside, outside",
    r"\bof a wrong type\b": "has a wrong type",
    r"\bonce more\b": "again",
    r"\bnot sooner\b|\bor the like\b": "only now, such as",
}
#: Code, and comments that the reports fill.
CODE = r"^```.*?^```$|^ *(?:>>>|\.\.\.) .*?$|``[^`]+``|`[^`]*`|<!--.*?-->"
ALL = [*PAGES, *OTHERS, ROOT / "CHANGELOG.md"]
SOURCES = sorted((ROOT / "splitpipe").rglob("*.py"))


def phrases(text: str, plainer: Mapping[str, str]) -> list[str]:
    """The phrases in a text, with what is around them and what to write instead."""
    prose = re.sub(r"\s+", " ", re.sub(CODE, "`", text, flags=re.MULTILINE | re.DOTALL))
    return [f"{prose[max(match.start() - 30, 0):match.end() + 30]!r}: {better}"
            for phrase, better in plainer.items() for match in re.finditer(phrase, prose, flags=re.IGNORECASE)]


def texts(source: str) -> Iterator[str]:
    """The strings with spaces in Python code, and its comments; those of lines that follow each other as one text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    block, last = "", (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (last[0] + 1, last[1]):
                yield block
                block = ""
            block, last = block + token.string.lstrip("#:"), token.start
    yield block


@pytest.mark.parametrize("page", ALL, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_is_in_plain_english(page: Path) -> None:
    assert phrases(page.read_text(encoding="utf-8"), PLAINER) == []


@pytest.mark.thorough
@pytest.mark.parametrize("room", sorted({path.parent for path in SOURCES}), ids=lambda room: room.name)
def test_a_room_of_the_package_is_in_plain_english(room: Path) -> None:
    found = [f"{path.name}: {phrase}" for path in room.glob("*.py")
             for text in texts(path.read_text(encoding="utf-8")) for phrase in phrases(text, PLAINER_IN_CODE)]
    assert found == []
