"""The pages and pictures are those of the results, and one command makes all of them."""

from __future__ import annotations

import json
import shlex
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


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("open(path, 'w').write(json.dumps({'environment': {}, 'tables': {}}))", "measured nothing"),
        ("open(path, 'w').write(json.dumps({'environment': {}, 'tables': {'a': [{'b': 1}]}}))", None),
    ],
    ids=["fails", "measures nothing", "succeeds"],
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
