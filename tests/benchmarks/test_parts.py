"""Each benchmark runs in its tiniest size and saves what it prints; pages and pictures are those of the results."""
from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.harness import tensor_memory
from benchmarks.harness.runner import BENCHMARKS, Part
from benchmarks.parts.memory import fresh
from benchmarks.report import __main__ as report
from benchmarks.report import cells, figures
from benchmarks.run import PARTS

CPU = [part for part in PARTS if part.setting("cpu")]

Run = Callable[[Part], tuple[dict[str, Any], str]]


def module(words: list[str]) -> ModuleType:
    """The module that python -m runs."""
    return importlib.import_module(f"benchmarks.{words[0]}")


@pytest.fixture
def run(threads: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a part in this process: what it saves, and what it prints."""

    def run(part: Part) -> tuple[dict[str, Any], str]:
        path, words = tmp_path / "found.json", part.words("cpu", quick=True)
        assert module(words).main([*words[1:], "--save", str(path)]) == 0
        return json.loads(path.read_text(encoding="utf-8")), capsys.readouterr().out

    return run


def complete(found: dict[str, Any], printed: str) -> None:
    """Fails unless a result has tables with rows, which were printed, and an environment."""
    assert {"date", "command", "cpu", "torch"} <= found["environment"].keys()
    assert any(found["tables"].values())
    for title, rows in found["tables"].items():
        assert title in printed and all(str(name) in printed for row in rows for name in row)


@pytest.mark.parametrize("part", [
    pytest.param(part, id=part.name, marks=[] if part.name == "scaling" else pytest.mark.thorough)
    for part in CPU
])
def test_a_benchmark_saves_what_it_prints(part: Part, run: Run) -> None:
    complete(*run(part))


def counted() -> int:
    """Bytes of a step that holds 1,200 floats at most, beside what is gone before."""
    kept: list[torch.Tensor] = []

    def step() -> None:
        torch.empty(1000)
        kept.append(torch.empty(500))
        torch.empty(700)

    return tensor_memory.peaks(step, kept.clear, passes=1)[0]["cpu"]


@pytest.mark.thorough
def test_bytes_of_a_step_are_those_of_its_tensors() -> None:
    assert 4 * 1200 <= fresh(counted) < 4 * 1300


RESULTS = BENCHMARKS / "results"


def test_the_pages_are_as_the_results_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_the_pictures_are_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--check"]) == 0, capsys.readouterr().err


def test_the_page_is_short_and_names_the_command_of_each_part() -> None:
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 300
    for part in PARTS:
        if part.setting("cpu"):
            assert f"`python -m benchmarks.{shlex.join(part.words('cpu'))}`" in page, part.name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_has_tables_and_says_where_they_are_from(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["tables"] and all(found["tables"].values())
    assert cells.origin(found["environment"], path.name).startswith("<sub>")
