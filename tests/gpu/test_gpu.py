"""The command for GPUs: what becomes of its parts; what is wrong gets a line."""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.gpu import __main__ as command
from tests.gpu.__main__ import main
from tests.gpu.parts import Part, parts, run

TESTS = """
import pytest
def test_fine(): pass
def test_wrong(): assert 0, 'no'
@pytest.mark.skip(reason='needs 2 CUDA devices')
def test_two(): pass
"""


@pytest.mark.parametrize(("code", "limit", "line"), [
    ("os.abort()", 60, "it was ended by SIGABRT: last words"),
    ("sys.exit(3)", 60, "it ended with exit code 3: last words"),
    ("time.sleep(600)", 0.5, "it was not done in 0.5 s, and was stopped: "),
], ids=["crash", "exit", "hang"])
@pytest.mark.thorough
def test_a_part_that_does_not_end_well_gets_a_line(code: str, limit: float, line: str, tmp_path: Path) -> None:
    found = run("it", Part(("-c", f"import os, sys, time; print('last words', flush=True); {code}"), limit), tmp_path)
    assert len(found.wrong) == 1 and found.wrong[0].startswith(line)


@pytest.mark.thorough
def test_the_report_tells_failures_from_what_was_not_tried(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_it.py").write_text(TESTS)
    words = ("-m", "pytest", "-q", "-p", "no:randomly", "-c", os.devnull, str(tmp_path), "-rfEs")
    monkeypatch.setattr(command, "machine", lambda: {"devices": ["a GPU"]})
    monkeypatch.setattr(command, "parts", lambda steps: {"tests": Part(words, 60)})
    assert main(["--out", str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("not tried: tests: [1] ") and lines[-2].endswith("needs 2 CUDA devices")
    assert lines[-1].startswith("wrong: tests: ") and "::test_wrong" in lines[-1]
    (part,) = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]
    assert part["result"].startswith("1 failed, 1 passed, 1 skipped") and "test_wrong" in part["wrong"][0]


def test_every_file_with_tests_for_gpus_is_run() -> None:
    its = parts(7)["tests"]
    assert {"tests/gpu/test_checks_cuda.py", "tests/partition/test_placing.py"} <= {*its.command}
    assert [*its.environment.values()] == ["7"]
