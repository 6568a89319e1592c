"""The site: its playground offers what its pages were made for, and every page has its place."""
from __future__ import annotations

import re
import runpy
from pathlib import Path

from splitpipe import schedule

ROOT = Path(__file__).parents[2]
OPTION = r'<option(?: value="(\w+)")?(?: selected)?>([^<]+)'


def choices() -> dict[str, list[str]]:
    """The values of each choice on the page."""
    page = (ROOT / "docs" / "playground.md").read_text(encoding="utf-8")
    return {
        name: [value or text for value, text in re.findall(OPTION, options)]
        for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', page, flags=re.DOTALL)
    }


def test_the_playground_has_a_page_for_each_of_its_choices() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "site" / "playground.py"), run_name="playground")
    numbers = {name: [str(each) for each in made[name.upper()]] for name in ("devices", "chunks", "costs")}
    assert choices() == {"name": [*schedule.names()], **numbers}
    for costs in made["COSTS"]:
        assert "zb-v: 4 devices, 8 microbatches" in made["page"]("zb-v", 4, 8, costs)


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (docs/\S+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = [f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")]
    assert sorted(listed) == sorted(pages)
