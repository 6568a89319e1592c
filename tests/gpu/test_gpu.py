"""The command for GPUs: what is wrong in a part gets a line, and what could not be tried another one."""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.gpu import __main__ as command
from tests.gpu.__main__ import Part, main

TESTS = """
import pytest
def test_fine(): pass
def test_wrong(): assert 0, 'no'
@pytest.mark.skip(reason='needs 2 CUDA devices')
def test_two(): pass
"""


@pytest.mark.thorough
def test_the_report_has_failures_crashes_hangs_and_what_was_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(source: str, limit: float = 60) -> Part:
        return Part(("-c", f"import os, time; print('last words', flush=True); {source}"), limit, {})

    (tmp_path / "test_it.py").write_text(TESTS)
    words = ("-m", "pytest", "-q", "-p", "no:randomly", "-c", os.devnull, str(tmp_path), "-rfEs")
    monkeypatch.setattr(command, "MACHINE", "print('{\"devices\": [\"a GPU\"]}')")
    monkeypatch.setattr(command, "parts", lambda steps: {
        "tests": Part(words, 60, {}), "crash": code("os.abort()"), "hang": code("time.sleep(600)", 0.5)})
    assert main(["--out", str(tmp_path / "out")]) == 1
    skipped, failed, *ended = capsys.readouterr().out.splitlines()[-4:]
    assert skipped.startswith("not tried: tests: [1] ") and skipped.endswith("needs 2 CUDA devices")
    assert failed.startswith("wrong: tests: ") and "::test_wrong" in failed
    assert ended[0] == "wrong: crash: it was ended by SIGABRT: last words"
    assert ended[1].startswith("wrong: hang: it was not done in 0.5 s, and was stopped: ")
    part = json.loads((tmp_path / "out/gpu.json").read_text())["parts"][0]
    assert part["result"].startswith("1 failed, 1 passed, 1 skipped") and "test_wrong" in part["wrong"][0]
