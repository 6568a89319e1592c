"""The examples that people copy: each runs as its page says, learns, and uses what users may import."""
from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.doors.test_layers import DOORS, imports

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docs" / "examples").glob("*.py"))
#: The command of each script, by its name.
COMMANDS = dict(re.findall(r"^\| \[(\S+)\]\(examples/\1\) \|.*\| `(.*)` \|$",
                           (ROOT / "docs/examples.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
Run = Callable[..., str]


@pytest.fixture
def run(no_accelerator: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command of a script in this process, which has imported what it needs: what it prints."""

    def run(name: str, *options: str) -> str:
        program, *words = shlex.split(COMMANDS[name])
        assert program == "python"
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [*words, *options])
        runpy.run_path(words[0], run_name="__main__")
        return capsys.readouterr().out

    return run


def losses(said: str) -> list[tuple[float, float]]:
    """The first and the last loss of each run, by what a script printed."""
    found = re.findall(r"^loss (\S+) -> (\S+)$", said, flags=re.MULTILINE)
    return [(float(first), float(last)) for first, last in found]


def torchrun(*words: str) -> str:
    """What the processes of a script print, on CPUs."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", *words], cwd=ROOT,
                          env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        try:
            said, complaints = launcher.communicate(timeout=250)
        finally:
            launcher.terminate()  # It ends its processes, too.
    assert launcher.returncode == 0, complaints
    return said


def test_the_page_has_a_command_for_every_script() -> None:
    assert sorted(COMMANDS) == [script.name for script in SCRIPTS]


@scripts
def test_a_script_explains_itself_is_short_and_imports_only_what_users_may(script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    assert f"\n    {COMMANDS[script.name]}\n" in said and "\nOn GPUs with a real model: " in said
    assert len(source.splitlines()) <= 90
    names = {name for name, _ in imports(source) if name.partition(".")[0] == "splitpipe"}
    assert names and {name.partition(".")[2] for name in names} <= DOORS


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:no accelerator is available")
def test_a_script_learns(run: Run) -> None:
    ((first, last),) = losses(run("vision_skips.py", "--steps", "4"))
    assert last < 0.9 * first  # Batches differ by less.


@pytest.mark.thorough
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_two_processes_learn() -> None:
    program, *words = shlex.split(COMMANDS["ddp.py"])
    assert program == "torchrun"
    ((first, last),) = losses(torchrun(*words, "--steps", "8"))
    assert last < 0.9 * first  # Batches differ by less.
