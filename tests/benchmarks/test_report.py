"""Pages say what the results say: a made-up page is filled, faults are named, and the repository's pages are right."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    {"schedule": "zb-h1", "chunks": 4, "step, ms": 12.5},
    {"schedule": "zb-h1, later", "chunks": 4, "step, ms": 1234.5, "note": "slow"},
    {"schedule": "zb-h1", "chunks": 8, "step, ms": 7.0},
]
WHERE = {"cpu": "A chip", "cores": 2, "python": "3.11.7", "torch": "2.13.0", "date": "2026-11-21 10:00:00 +0000"}
LINE = "<sub>A chip, 2 cores, Python 3.11.7, torch 2.13.0, 2026-11-21; [a.json](results/a.json)</sub>"
Page = Callable[[str], Path]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The script, with results of ours."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    it = importlib.import_module("report")
    monkeypatch.setattr(it, "BENCHMARKS", tmp_path)
    (tmp_path / "results").mkdir()
    both = {"steps": ROWS, "one row": [{"name": "a", "ratio": 0.98765}]}
    (tmp_path / "results" / "a.json").write_text(json.dumps({"environment": WHERE, "tables": both}))
    yield it


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """Writes a page."""

    def write(text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    return write


def fault(script: ModuleType, page: Page, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a page that can't be filled; it stays as it is."""
    path = page(text)
    assert script.main([str(path)]) == 1
    assert path.read_text() == text
    return capsys.readouterr().err.removeprefix(str(path))


def test_the_repositorys_pages_are_as_the_results_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    code = importlib.import_module("report").main(["--check"])
    assert code == 0, capsys.readouterr().err


def test_a_table_is_filled_and_says_where_it_is_from(script: ModuleType, page: Page) -> None:
    path = page('a\n\n<!-- table: results/a.json "one row" -->\nold\n<!-- end -->\n\nb\n')
    assert script.main([str(path)]) == 0
    table = "| name | ratio |\n|---|---|\n| a | 0.988 |"
    expected = f'a\n\n<!-- table: results/a.json "one row" -->\n\n{table}\n\n{LINE}\n\n<!-- end -->\n\nb\n'
    assert path.read_text() == expected


def test_filling_twice_changes_nothing(script: ModuleType, page: Page) -> None:
    path = page("<!-- table: results/a.json -->\n<!-- end -->\n")
    script.main([str(path)])
    once = path.read_text()
    assert script.main([str(path)]) == script.main(["--check", str(path)]) == 0
    assert path.read_text() == once


def test_all_tables_of_a_file_have_their_names_above_them(script: ModuleType, page: Page) -> None:
    path = page("<!-- table: results/a.json -->\n<!-- end -->\n")
    script.main([str(path)])
    text = path.read_text()
    assert text.index("**steps**") < text.index("| zb-h1 |") < text.index("**one row**") < text.index(LINE)
    assert text.count("<sub>") == 1


def test_columns_and_rows_are_chosen(script: ModuleType, page: Page) -> None:
    options = 'columns="step, ms | schedule" rows="zb-h1 | chunks=4"'
    path = page(f"<!-- table: results/a.json steps {options} --><!-- end -->")
    script.main([str(path)])
    assert "| step, ms | schedule |\n|---|---|\n| 12.5 | zb-h1 |\n\n" in path.read_text()


def test_words_and_values_are_alternatives(script: ModuleType) -> None:
    picked = script.contents.picked
    assert picked(ROWS, "chunks=4 | chunks=8") == ROWS
    assert picked(ROWS, "later | 7") == ROWS[1:]


def test_a_long_table_is_folded(script: ModuleType, page: Page) -> None:
    path = page('<!-- table: results/a.json steps fold="All steps" --><!-- end -->')
    script.main([str(path)])
    # Markdown inside of HTML needs an empty line around it.
    assert "<details><summary>All steps</summary>\n\n| schedule |" in path.read_text()
    assert f"{LINE}\n\n</details>\n\n<!-- end -->" in path.read_text()


@pytest.mark.parametrize(("asked", "expected"), [
    ('"step, ms" rows="zb-h1 | chunks=8"', "7.000"),
    ('"step, ms" rows="zb-h1, later"', "1234"),
    ('"step, ms" rows=later format=.1f', "1234.5"),
    ('"step, ms" pick=most', "1234"),
    ('"step, ms" pick=least format=.0f', "7"),
    ("note", "slow"),
])
def test_a_number_in_a_sentence_is_filled(script: ModuleType, page: Page, asked: str, expected: str) -> None:
    path = page(f"It takes <!-- value: results/a.json steps {asked} -->0<!-- end --> ms.")
    assert script.main([str(path)]) == 0
    assert path.read_text() == f"It takes <!-- value: results/a.json steps {asked} -->{expected}<!-- end --> ms."


def test_check_names_page_and_line_and_writes_nothing(
    script: ModuleType, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'a\nThese <!-- value: results/a.json "one row" ratio -->0.987<!-- end -->'
    path = page(text)
    assert script.main(["--check", str(path)]) == 1
    assert f"{path}:2: found another value than results/a.json gives" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(("mark", "said"), [
    ("table: results/b.json", "found the file 'results/b.json'; expected one of: results/a.json"),
    ("table: results/a.json step", "found the table of results/a.json 'step'; expected one of: steps; one row"),
    ("table: results/a.json steps columns=chunk", "found the column 'chunk'; expected one of: schedule; chunks; step"),
    ("table: results/a.json steps rows=1f1b", "found the row '1f1b'; expected one of: zb-h1; zb-h1, later"),
    ("table: results/a.json steps rows=chunks=5", "found the value of 'chunks' '5'; expected one of: 4; 8"),
    ('table: results/a.json steps rows="later | chunks=8"', "found no row that fits"),
    ("table: results/a.json steps row=later", "found the option 'row'; expected, for a table: columns, rows, fold"),
    ("tables: results/a.json", "found a block 'tables'; expected table or value"),
    ("value: results/a.json steps", "found the names ['results/a.json', 'steps']; expected, for a value"),
    ("value: results/a.json steps chunks", "found 3 cells; expected one"),
    ("value: results/a.json steps chunks pick=all", "found the pick 'all'; expected one of: most; least"),
    ("value: results/a.json steps note format=.1f", "found the cell 'slow'; expected a number"),
])
def test_what_is_not_there_is_named_with_what_is(
    script: ModuleType, page: Page, capsys: pytest.CaptureFixture[str], mark: str, said: str
) -> None:
    assert fault(script, page, f"a\n\nb <!-- {mark} --> <!-- end -->", capsys).startswith(f":3: {said}")


def test_a_block_that_is_wrong_keeps_none_of_the_others_from_being_filled(script: ModuleType, page: Page) -> None:
    good = '<!-- value: results/a.json "one row" name --><!-- end -->'
    path = page(f"a <!-- value: results/b.json x y -->0<!-- end --> {good}")
    assert script.main([str(path)]) == 1
    assert "-->0<!-- end -->" in path.read_text() and "name -->a<!-- end -->" in path.read_text()


@pytest.mark.parametrize("text", [
    "a <!-- table: results/a.json -->",
    'a <!-- table: results/a.json --> <!-- value: results/a.json "one row" ratio -->0.988<!-- end -->',
])
def test_a_block_needs_an_end(
    script: ModuleType, page: Page, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert fault(script, page, text, capsys).startswith(":1: found a table without an end; expected <!-- end -->")


def test_a_value_can_not_start_a_line(script: ModuleType, page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    text = '* <!-- value: results/a.json "one row" ratio -->1<!-- end --> of it'
    assert fault(script, page, text, capsys).startswith(":1: found a value at the start of a line")


def test_code_that_shows_a_block_is_left_alone(script: ModuleType, page: Page) -> None:
    text = "```\n<!-- table: results/none.json -->\n```\nsay `<!-- value: a b c -->1<!-- end -->`\n"
    path = page(text)
    assert script.main([str(path)]) == 0
    assert path.read_text() == text


def test_published_results_say_whose_machine_it_was(script: ModuleType, page: Page) -> None:
    path = page(f'a <!-- table: {ROOT}/benchmarks/results/published.json "U-Net timeline" --><!-- end -->')
    assert script.main([str(path)]) == 0
    assert "on torchgpipe 0.0.5, Python 3.6.9, PyTorch 1.3.0, CUDA 10.1.243, 4 Tesla P40 GPUs" in path.read_text()


def test_published_pages_are_read_with_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    published = importlib.import_module("published")
    table = "Run | Rate | Up\n--- | ---: | -\na | 1.50/s | 1×\nb ([page][]) | N/A | 2.0×\n"
    assert published.page(f"# A\n\n## Result\n\n{table}\n## Optimized Environment\n\n- x\n").rows == [
        {"Run": "a", "Rate, samples a second": "1.50", "Up, times": "1"},
        {"Run": "b (page)", "Rate, samples a second": "N/A", "Up, times": "2.0"},
    ]
    with pytest.raises(ValueError, match="found the sections Elsewhere; expected a table below 'Result'"):
        published.page("# A\n\n## Elsewhere\n")


def test_published_results_are_those_of_the_pages_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    published = importlib.import_module("published")
    found = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())
    assert set(found["tables"]) == set(published.PAGES) == set(found["environment"]["published"]["sources"])
    rates = {row["Experiment"]: row["Throughput, samples a second"] for row in found["tables"]["U-Net speed"]}
    assert rates["baseline"] == "28.500" and rates["pipeline-8"] == "88.497"
