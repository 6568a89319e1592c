"""Each benchmark runs in its tiniest size, prints its tables and saves them with where and how they were measured."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.harness import measure, tensor_memory
from benchmarks.harness.runner import ROOT, Part
from benchmarks.parts.memory import fresh
from benchmarks.run import PARTS

#: Another model of the part step-mlp.
ALIKE = ("step-gpt",)
CPU = [part for part in PARTS if part.way("cpu") and part.name not in ALIKE]

Run = Callable[[Part], tuple[dict[str, Any], str]]


def module(words: list[str]) -> ModuleType:
    """The module whose ``main`` python -m runs."""
    found = importlib.import_module(f"benchmarks.{words[0]}")
    return found if hasattr(found, "main") else importlib.import_module(f"benchmarks.{words[0]}.__main__")


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
    main.__spec__ = ModuleSpec("benchmarks.parts.backward.__main__", None)
    assert measure.environment()["command"] == "python -m benchmarks.parts.backward step --contenders 'batch, 2' ZBV"
    main.__spec__ = None
    monkeypatch.setattr(sys, "argv", ["benchmarks/train.py"])
    assert measure.environment()["command"] == "python benchmarks/train.py"


@pytest.mark.parametrize("part", [
    pytest.param(part, id=part.name, marks=[] if part.name == "step-mlp" else pytest.mark.thorough)
    for part in CPU
])
def test_a_benchmark_saves_what_it_prints(part: Part, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if part.name == "memory":  # One case of it is measured below.
        monkeypatch.setattr(module(part.words("cpu")), "_peak", lambda *_: 1)
    complete(*run(part))


@pytest.mark.cuda
@pytest.mark.fake
@pytest.mark.devices(4)
@pytest.mark.thorough
def test_the_ablation_says_that_all_variants_compute_the_same(tmp_path: Path) -> None:
    (part,) = [part for part in PARTS if part.name == "ablation"]
    path = tmp_path / "found.json"
    # In a process of its own: doubles stay the default there.
    command = [sys.executable, "-m", f"benchmarks.{part.command}", *part.quick.split(), "--save", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    complete(json.loads(path.read_text(encoding="utf-8")), done.stdout)
    assert "those of the unwrapped model, of all variants" in done.stdout


@pytest.mark.thorough
def test_without_the_fake_runtime_the_ablation_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.parts.ablation import __main__ as ablation

    with mock.patch.object(ablation, "softcuda", None):
        assert ablation.main(["--save", str(tmp_path / "found.json")]) == 0
    assert "left out: found no fake CUDA runtime: expected to be run by python -m" in capsys.readouterr().err


def test_the_peak_of_one_case_is_a_number(threads: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = "peak --models mlp --preset tiny --passes 1 --chunks 2".split()
    assert module(["parts.backward"]).main(words) == 0
    assert int(capsys.readouterr().out) >= 0


def test_the_growth_of_memory_counts_what_was_freed_and_is_never_below_zero() -> None:
    before = measure.forget_peak()
    torch.ones(2**24)  # 64 MiB, freed at once.
    assert measure.growth(before) > 60 * 2**20
    assert measure.growth(before + 2**40) == 0  # As if memory had been given back between the two counts.


def test_growth_prints_a_row_for_each_schedule_and_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert module(["parts.growth"]).main(["--schedules", "1f1b", "zb-h1"]) == 0
    assert capsys.readouterr().out.count("| zb-h1 |") == 3


@pytest.mark.thorough
def test_a_version_beside_itself_has_the_same_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    words = f"{ROOT} --models gpt --preset tiny --contenders zb-v --passes 1 --save {path}"
    assert module(["parts.versions"]).main(words.split()) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    complete(found, capsys.readouterr().out)
    assert [row["way"] for row in found["tables"]["versions, gpt"]] == ["zb-v"]


def test_another_version_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module(["parts.versions"]).main([str(tmp_path)])
    assert f"found no splitpipe/__init__.py in {tmp_path}: expected the root of another" in capsys.readouterr().err


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


SPY = """#!/bin/sh
while [ "$1" != --output ]; do shift; done
printf '%s\\n' 'process 1:"x";run (a/b.py:1);step (/there/splitpipe/c.py:12) 200' 'run (a/b.py:3) 50' > "$2"
"""


@pytest.mark.thorough
@pytest.mark.parametrize("there", [True, False])
def test_a_profile_says_who_holds_the_lock(
    there: bool, threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(SPY)
    spy.chmod(0o755)
    host = module(["parts.host"])
    monkeypatch.setattr(shutil, "which", lambda *_, **__: str(spy) if there else None)
    monkeypatch.setattr(host, "cost", lambda *_: [{"devices": 2}])
    words = "--kind cpu --devices 2 --blocks 4 --chunks 2 --profile 1".split()
    assert host.main([*words, "--save", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    if not there:
        assert found["environment"]["left_out"] == ["py-spy is not installed: pip install py-spy"]
        return
    rows = [(row["who"], row["function"], row["of the time, %"]) for row in found["tables"]["who holds the lock"]]
    assert rows == [(who, *its) for who in ("Sequential", "cuts") for its in (
        ("all", 25), ("splitpipe/c.py: step", 20), ("a/b.py: run", 5))]


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

    return tensor_memory.peak(step, prepare=kept.clear).total


@pytest.mark.thorough
def test_bytes_of_a_step_are_those_of_its_tensors() -> None:
    assert 4 * 1200 <= fresh(counted) < 4 * 1300
