"""The pages are in plain English: none has one of these phrases, each of which has a plainer one."""
from __future__ import annotations

import re
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
    r"\bstands?\b": "is",
    r"\brefuse[sd]?\b": "raises an error, is an error",
    r"\b(?:can|could)(?:'t| not) be had\b": "isn't possible",
    r", say\b": "for example, such as",
    r"\bas ever\b|\bwill not do\b|\bsays? so\b": "as before, limitations",
    r"\bbeside\b": "next to, compared with",
}
#: Code, and comments that the reports fill.
CODE = r"^```.*?^```$|`[^`]*`|<!--.*?-->"


ALL = [*PAGES, *OTHERS, ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", ALL, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_is_in_plain_english(page: Path) -> None:
    prose = re.sub(CODE, "`", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\s+", " ", prose)
    found = [
        f"{prose[max(match.start() - 30, 0):match.end() + 30]!r}: {plainer}"
        for phrase, plainer in PLAINER.items() for match in re.finditer(phrase, prose, flags=re.IGNORECASE)
    ]
    assert found == []
