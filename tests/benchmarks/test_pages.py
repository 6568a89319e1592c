"""The pages and pictures are those of the results, and one command makes all of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.harness import runner
from benchmarks.harness.runner import BENCHMARKS, Part, Setting
from benchmarks.report import __main__ as report
from benchmarks.report import cells, figures

RESULTS = BENCHMARKS / "results"


def test_the_pages_are_as_the_results_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_the_pictures_are_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--check"]) == 0, capsys.readouterr().err


def test_the_page_is_short_and_names_the_command_of_each_part() -> None:
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 300
    for part in run.PARTS:
        if part.setting("cpu"):
            assert f"`python -m benchmarks.{shlex.join(part.words('cpu'))}`" in page, part.name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_has_tables_and_says_where_they_are_from(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["tables"] and all(found["tables"].values())
    assert cells.origin(found["environment"], path.name).startswith("<sub>")


@pytest.fixture
def results(tmp_path: Path) -> Iterator[cells.Results]:
    """A file with two tables."""
    environment = {"cpu": "A chip", "cores": 2, "python": "3.11", "torch": "2.13", "date": "2026-11-21 10:00"}
    tables = {"speed, a": [{"who": "one", "ms": 1.5}, {"who": "two", "ms": 3.0}]}
    tables["speed, b"] = [{"who": "one", "ms": 2.0}]
    (tmp_path / "found.json").write_text(json.dumps({"environment": environment, "tables": tables}))
    yield cells.Results(tmp_path)


def filled(text: str, results: cells.Results) -> str:
    """A page with its blocks filled."""
    page = results.folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return report.filled(page, results)[0]


def test_tables_and_numbers_are_filled_from_a_result(results: cells.Results) -> None:
    text = filled(
        '<!-- table: found.json "speed, a" "speed, b" as=model rows=one columns="who | ms" -->\n<!-- end -->\n'
        'It takes <!-- value: found.json "speed, a" ms pick=most format=.1f -->0<!-- end --> ms.\n',
        results,
    )
    assert "| model | who | ms |\n|---|---|---|\n| a | one | 1.500 |\n| b | one | 2.000 |\n" in text
    assert "A chip, 2 cores" in text and "-->3.0<!-- end --> ms" in text


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("<!-- table: lost.json -->\n<!-- end -->", "found the file 'lost.json'"),
        ("<!-- table: found.json slow -->\n<!-- end -->", "found the table of found.json 'slow'; expected one of"),
        ('<!-- table: found.json "speed, a" columns=s -->\n<!-- end -->', "found the column 's'; expected one of"),
        ('<!-- table: found.json "speed, a" rows=three -->\n<!-- end -->', "found the row 'three'"),
        ('x <!-- value: found.json "speed, a" ms -->1<!-- end -->', "found 2 cells; expected one"),
        ('<!-- table: found.json "speed, a" -->', "without an end"),
        ('<!-- table: found.json slow pick=most -->\n<!-- end -->', "expected a table or a value"),
    ],
)
def test_what_a_result_does_not_have_is_named(block: str, said: str, results: cells.Results) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        filled(block, results)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_pictures_say_which_results_they_show(tmp_path: Path) -> None:
    for name in {picture.part for picture in figures.PICTURES.values()}:
        file = f"{name}-cpu.json"
        (tmp_path / file).write_text((RESULTS / file).read_text(encoding="utf-8"), encoding="utf-8")
    assert figures.main(["--results", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.glob("*.svg")} == {f"{name}-cpu" for name in figures.PICTURES}
    assert figures.main(["--results", str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_list_has_each_part_with_its_command(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list", "--device", device]) == 0
    printed = capsys.readouterr().out
    for part in run.PARTS:
        if part.setting(device):
            assert shlex.join(part.words(device)) in printed


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("pass", "left no result"),
        ("open(path, 'w').write(json.dumps({'environment': {}, 'tables': {}}))", "measured nothing"),
        ("open(path, 'w').write(json.dumps({'environment': {}, 'tables': {'a': [{'b': 1}]}}))", None),
    ],
    ids=["fails", "leaves nothing", "measures nothing", "succeeds"],
)
def test_a_part_that_fails_leaves_the_older_result(
    code: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__init__.py").touch()
    (tmp_path / "benchmarks/planted.py").write_text(f"import json, sys\npath = sys.argv[-1]\n{code}\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    result = tmp_path / "planted-cpu.json"
    result.write_text("older")
    part = Part("planted", "planted", Setting("", 20), None, "")
    outcome = runner.measured(part, tmp_path, "cpu", False, asked="all")
    assert [path.name for path in tmp_path.glob("*.json*")] == [result.name]
    if fault is None:
        assert json.loads(result.read_text())["environment"]["run"]["command"] == "all"
    else:
        assert outcome.fault is not None and fault in outcome.fault and result.read_text() == "older"
