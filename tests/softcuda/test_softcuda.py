"""The command around the fake runtime: what it fetches, keeps, builds and says, without a wheel of torch's."""
from __future__ import annotations

import ast
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.softcuda import wheel
from tests.softcuda.__main__ import main
from tests.softcuda.kept import whole
from tests.softcuda.parts import parts
from tests.tools import covered


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands, which are written down in place of being run, and succeed."""
    them: list[list[str]] = []

    def run(command: Sequence[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        them.append([*map(str, command)])
        if "venv" in command:
            Path(command[-1], "lib/python3.1/site-packages").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return them


def test_each_part_runs_in_the_environment_with_its_variables_and_arguments(tmp_path, monkeypatch, ran):
    monkeypatch.setattr("tests.softcuda.__main__.ready", lambda given, extras: tmp_path / "python")
    monkeypatch.delenv(covered.FOLDER, raising=False)
    assert main(["tests", "--", "-k", "x"]) == 0
    assert ran[0][:5] == [str(tmp_path / "python"), "-m", "pytest", "-m", "cuda"] and ran[0][-2:] == ["-k", "x"]
    monkeypatch.setenv(covered.FOLDER, str(tmp_path))
    assert main(["hazards"]) == 0
    assert ran[1][1:3] == ["-m", "slipcover"] and ran[1][-5:] == ["-m", "cuda", "-p", "no:randomly", "tests/devices"]


def test_tests_that_are_left_out_are_there_and_have_a_reason() -> None:
    for name, why in parts()["tests"].skipped.items():
        file, test = name.split("::")
        assert f"def {test.split('[')[0]}(" in (wheel.ROOT / file).read_text(encoding="utf-8") and why


def test_a_folder_is_filled_once_and_again_if_that_was_interrupted(tmp_path, capsys):
    def breaks(room: Path) -> None:
        (room / "half").touch()
        raise KeyboardInterrupt

    def fills(room: Path) -> None:
        (room / "whole").write_text("12345")

    with pytest.raises(KeyboardInterrupt):
        whole(tmp_path / "it", breaks, "fills")
    assert whole(tmp_path / "it", fills, "fills") == whole(tmp_path / "it", breaks, "fills") == tmp_path / "it"
    assert sorted(file.name for file in (tmp_path / "it").rglob("*")) == ["whole"]
    assert capsys.readouterr().out == "fills ...\n" * 2


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_what_a_part_imports_of_the_tests_is_there(file: Path) -> None:
    """Parts run elsewhere: a module that is gone would show there alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("tests.")):
            module = f"tests.softcuda.{node.module}" if node.level and node.module else node.module or "tests.softcuda"
            source = wheel.ROOT / module.replace(".", "/")
            assert source.is_dir() or source.with_suffix(".py").exists(), module
