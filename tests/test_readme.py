"""The README tells the truth: its examples run, its commands are those that are checked, its picture fits."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAIN = 'python -m pip install -e ".[bench]" -c constraints.txt && python benchmarks/train_gpt.py'
TEST = 'python -m pip install -e ".[test]" -c constraints.txt && python -m pytest'


def blocks(language: str) -> list[tuple[int, str]]:
    """The README's blocks of one language, each with the line that it starts in."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def test_the_examples_run_from_top_to_bottom(no_accelerator: None) -> None:
    # One namespace for all: a reader types them in one after the other.
    namespace: dict[str, object] = {"__name__": "readme"}
    examples = blocks("python")
    assert examples
    for line, source in examples:
        # Empty lines in front, so that a traceback names the README's own lines.
        exec(compile("\n" * (line - 1) + source, str(ROOT / "README.md"), "exec"), namespace)


def test_every_block_says_its_language() -> None:
    fences = re.findall(r"^```(.*)$", README, flags=re.MULTILINE)
    assert set(fences[::2]) == {"python", "sh", "text"} and set(fences[1::2]) == {""}


def test_the_commands_are_these_two() -> None:
    assert [line for _, source in blocks("sh") for line in source.splitlines()] == [TRAIN, TEST]


@pytest.mark.parametrize("command", [TRAIN, TEST])
def test_the_check_that_guards_the_project_installs_as_the_readme_says(command: str) -> None:
    assert command.partition(" && ")[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_cpu_build_to_take_first_is_the_version_that_is_pinned() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^torch==(\S+)$", constraints, flags=re.MULTILINE)
    assert re.findall(r"pip install torch==(\S+)", README) == pinned


def test_the_pictures_are_four_stages_and_four_microbatches_forward_and_backward() -> None:
    m = n = 4
    turn = m + n - 1
    fused, split = [], []
    for j in range(n):
        row = ["  "] * (2 * turn + m)
        for i in range(m):
            row[i + j] = f"F{i}"
            row[2 * turn - 1 - (i + j)] = f"B{i}"
        fused.append(f"stage {j}  {' '.join(row)}".rstrip())
        for i in range(m):
            row[2 * turn - 1 - (i + j) + m] = f"W{i}"
        split.append(f"stage {j}  {' '.join(row)}".rstrip())
    assert [source.splitlines() for _, source in blocks("text")][:2] == [fused, split]


def test_the_deferral_report_is_what_its_example_prints(
    no_accelerator: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [source for _, source in blocks("python") if "deferral_report" in source]
    (use, *_) = [source for _, source in blocks("python")]
    exec(f"{use}\n{example}", {})
    assert capsys.readouterr().out == [source for _, source in blocks("text")][2]
