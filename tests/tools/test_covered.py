"""The count of branches that several runs took."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools import covered


def measured(**files: tuple[list[list[int]], list[list[int]]]) -> dict[str, Any]:
    """What slipcover gives: of each file the branches that were taken, and those that were not."""
    return {
        "meta": {"software": "slipcover", "branch_coverage": True, "show_contexts": False},
        "files": {
            f"{name}.py": {"executed_lines": [], "missing_lines": [], "executed_branches": taken,
                           "missing_branches": missed, "summary": {}}
            for name, (taken, missed) in files.items()
        },
    }


@pytest.mark.parametrize(("least", "code"), [(75, 0), (76, 1)])
def test_a_branch_counts_that_one_of_the_runs_took(
    least: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(covered, "LEAST", least)
    monkeypatch.setenv(covered.FOLDER, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["covered", "--count"])
    one = measured(one=([[1, 2]], [[1, 3], [4, 5]]), other=([[1, 2]], []))
    for name, found in {"a": measured(one=([[1, 3]], [[1, 2], [4, 5]])), "b": one}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert covered.main() == code
    assert capsys.readouterr().out.splitlines()[:2] == ["one.py 4->5", "3 of 4 branches, 75.0 %"]


def test_a_folder_without_a_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(covered.FOLDER, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["covered", "--count"])
    assert covered.main() == 2
    assert f"found no file in {tmp_path}: expected SPLITPIPE_COVERAGE to name a folder" in capsys.readouterr().out
