"""The examples that people copy: each runs as its page says, learns, and uses what users may import."""
from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.doors.test_layers import DOORS, imports

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docs" / "examples").glob("*.py"))
#: The command of each script, by its name.
COMMANDS = dict(re.findall(
    r"^\| \[(\S+)\]\(examples/\1\) \|.*\| `(.*)` \|$", (ROOT / "docs/examples.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
))
gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


def ran(*words: str) -> str:
    """What Python prints when it is started with these words, on the CPU and without a network."""
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)
    }
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:
        try:
            said, complaints = process.communicate(timeout=250)
        finally:
            process.terminate()  # torchrun ends its processes, too.
    assert process.returncode == 0, complaints
    return said


def printed(name: str, *options: str) -> str:
    """What the command of a script prints."""
    program, *words = shlex.split(COMMANDS[name])
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[program]
    return ran(*launcher, *words, *options)


def losses(said: str) -> list[tuple[float, float]]:
    """The first and the last loss of each run, by what a script printed."""
    found = re.findall(r"^loss (\S+) -> (\S+)$", said, flags=re.MULTILINE)
    return [(float(first), float(last)) for first, last in found]


def test_the_page_has_a_command_for_every_script() -> None:
    assert sorted(COMMANDS) == [script.name for script in SCRIPTS]


@scripts
def test_a_script_explains_itself_and_is_short(script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    assert f"\n    {COMMANDS[script.name]}\n" in said and "\nOn GPUs with a real model: " in said
    assert len(source.splitlines()) <= 90


@scripts
def test_a_script_imports_only_what_users_may(script: Path) -> None:
    names = {name for name, _ in imports(script.read_text(encoding="utf-8")) if name.partition(".")[0] == "splitpipe"}
    assert names and {name.partition(".")[2] for name in names} <= DOORS


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["vision_skips.py", pytest.param("ddp.py", marks=gloo)])
def test_a_script_learns(name: str) -> None:
    ((first, last),) = losses(printed(name, "--steps", "8"))
    assert last < 0.9 * first  # Batches differ by less.
