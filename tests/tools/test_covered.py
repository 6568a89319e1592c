"""The count of branches that several runs took."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools import covered


def measured(**files: tuple[list[list[int]], list[list[int]]]) -> str:
    """What slipcover writes: of each file the branches that were taken, and those that were not."""
    return json.dumps({
        "meta": {"software": "slipcover", "branch_coverage": True, "show_contexts": False},
        "files": {
            f"{name}.py": {"executed_lines": [], "missing_lines": [], "executed_branches": taken,
                           "missing_branches": missed, "summary": {}}
            for name, (taken, missed) in files.items()
        },
    })


@pytest.mark.parametrize(("least", "code"), [(75, 0), (76, 1)])
def test_a_branch_counts_that_one_of_the_runs_took(
    least: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(covered, "LEAST", least)
    (tmp_path / "a.json").write_text(measured(one=([[1, 2]], [[1, 3], [4, 5]]), other=([[1, 2]], [])))
    (tmp_path / "b.json").write_text(measured(one=([[1, 3]], [[1, 2], [4, 5]])))
    assert covered.counted(tmp_path) == code
    assert capsys.readouterr().out.splitlines()[:2] == ["one.py 4->5", "3 of 4 branches, 75.0 %"]
