"""Each benchmark runs in its tiniest size, prints its tables and saves them with where and how they were measured."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.harness import measure, tensor_memory
from benchmarks.harness.runner import Part
from benchmarks.parts.memory import fresh
from benchmarks.run import PARTS

CPU = [part for part in PARTS if part.setting("cpu")]

Run = Callable[[Part], tuple[dict[str, Any], str]]


def module(words: list[str]) -> ModuleType:
    """The module that python -m runs."""
    return importlib.import_module(f"benchmarks.{words[0]}")


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


def test_a_result_names_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/anywhere/__main__.py", "step", "--contenders", "batch, 2", "ZBV"])
    main.__spec__ = ModuleSpec("benchmarks.parts.scaling.__main__", None)
    assert measure.environment()["command"] == "python -m benchmarks.parts.scaling step --contenders 'batch, 2' ZBV"
    main.__spec__ = None
    monkeypatch.setattr(sys, "argv", ["benchmarks/train.py"])
    assert measure.environment()["command"] == "python benchmarks/train.py"


@pytest.mark.parametrize("part", [
    pytest.param(part, id=part.name, marks=[] if part.name == "scaling" else pytest.mark.thorough)
    for part in CPU
])
def test_a_benchmark_saves_what_it_prints(part: Part, run: Run) -> None:
    complete(*run(part))


@pytest.mark.cuda
@pytest.mark.devices(4)
@pytest.mark.thorough
def test_each_knob_has_a_peak_and_a_simulated_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    words = f"--width 64 --context 4 --rows 32 --passes 1 --save {path}"
    assert module(["parts.knobs"]).main(words.split()) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    complete(found, capsys.readouterr().out)
    peaks = {row["change"]: row["peak, MiB"] for row in found["tables"]["knobs"]}
    assert peaks["LoRA"] < peaks["the defaults"] < peaks['`checkpoint="never"`']


def test_the_simulated_step_of_a_knob_has_the_work_that_it_adds_or_saves() -> None:
    ways = module(["parts.knobs"]).WAYS
    times = {name: knobs.time() for name, knobs in ways.items()}
    assert times['`checkpoint="never"`'] < times["the defaults"] < times['`checkpoint="always"`']
    assert times["LoRA"] < times["the defaults"] and times["eight devices"] < times["the defaults"]
    assert 0.75 <= times['`schedule="zb-h1"`'] < times['`schedule="1f1b"`']  # F, B and W of four devices take 3 / 4.


@pytest.mark.thorough
def test_the_hosts_time_is_compared_with_those_of_others(threads: None, tmp_path: Path) -> None:
    words = "--kind cpu --devices 2 --blocks 4 --chunks 2 --passes 1".split()
    assert module(["parts.host"]).main([*words, "--save", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["tables"]["host"]
    (default,) = [row for row in rows if (row["who"], row["how"], row["checkpoint"], row["backward"]) ==
                  ("cuts", "drop-in", "except_last", "split")]
    assert default["/ loop"] > 0 and default["/ torchgpipe"] > 0 and default["/ autograd"] > 0
    assert [row["who"] for row in rows if "/ loop" not in row] == ["microbatch loop"]
    assert all("/ torchgpipe" in row for row in rows if row["who"] in ("Sequential", "cuts"))


def test_losses_that_differ_are_named() -> None:
    strayed = module(["parts.compute"]).strayed
    assert strayed({"a": [1.0, 2.0], "b": [1.0, 2.0]}, 1e-3) == []
    assert strayed({"a": [1.0, 2.0], "b": [1.0, 2.1]}, 1e-3) == [
        "b: loss 2.100000 at step 1; expected 2.000000, that of a"
    ]


def counted() -> int:
    """Bytes of a step that holds 1,200 floats at most, beside what is gone before."""
    kept: list[torch.Tensor] = []

    def step() -> None:
        torch.empty(1000)
        kept.append(torch.empty(500))
        torch.empty(700)

    (peak,) = tensor_memory.peaks(step, kept.clear, passes=1)
    return peak["cpu"]


@pytest.mark.thorough
def test_bytes_of_a_step_are_those_of_its_tensors() -> None:
    assert 4 * 1200 <= fresh(counted) < 4 * 1300
