"""The benchmark of the host's cost runs, and says what it should. Nothing is timed."""
from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--passes 2 --stages 2 --chunks 3 --checkpoint never always".split()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("overhead")
    torch.set_num_threads(threads)


def test_each_case_has_a_line_for_each_pipeline(script: ModuleType, tmp_path: Path) -> None:
    saved = tmp_path / "overhead.json"
    assert script.main([*SMALL, "--save", str(saved)]) == 0
    found = json.loads(saved.read_text())
    pipelines = ["splitpipe, split", "splitpipe, autograd", *(["torchgpipe"] if find_spec("torchgpipe") else [])]
    cases = [(row["layer"], row["checkpoint"], row["pipeline"]) for row in found["tables"]["overhead"]]
    assert cases == [
        (layer, mode, name) for layer in ("linear", "scale") for mode in ("never", "always") for name in pipelines
    ]
    assert all(row["25 %"] <= row["us a microbatch and stage"] <= row["75 %"] for row in found["tables"]["overhead"])


def test_without_torchgpipe_the_rest_is_measured_and_it_says_so(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    saved = tmp_path / "overhead.json"
    assert script.main([*SMALL, "--layers", "scale", "--save", str(saved)]) == 0
    found = json.loads(saved.read_text())
    assert {row["pipeline"] for row in found["tables"]["overhead"]} == {"splitpipe, split", "splitpipe, autograd"}
    assert found["tables"]["targets"] == [] and "torchgpipe is not installed" in found["environment"]["left_out"][0]
    assert "torchgpipe is not installed" in capsys.readouterr().err


def test_all_pipelines_and_the_loop_give_the_same_gradients(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.nn.Module] = []

    def layer() -> torch.nn.Module:
        made.append(script.Scale())
        return made[-1]

    monkeypatch.setitem(script.LAYERS, "scale", layer)
    steps: dict[str, Any] = script.steps("scale", 2, 3, "always", "cpu", find_spec("torchgpipe") is not None)
    for step in steps.values():
        step()
    assert len(made) == 2 * len(steps)
    assert all(one.weight.grad is not None and one.weight.grad.item() == 3 for one in made)


def test_the_worst_case_decides_whether_a_target_is_met(script: ModuleType) -> None:
    row = {"layer": "scale", "checkpoint": "never", "pipeline": "splitpipe, split", "stages": 2}
    rows = [{**row, "chunks": chunks, "/ torchgpipe": ratio} for chunks, ratio in ((8, 0.25), (32, 0.75))]
    (found,) = script.verdict(rows)
    assert (found["worst"], found["where"], found["met"]) == (0.75, "2 stages, 32 chunks", False)
    assert found["of torchgpipe's, median of cases"] == 0.5


def test_help_names_every_option(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    said = capsys.readouterr().out
    for option in ("--device", "--layers", "--checkpoint", "--stages", "--chunks", "--passes", "--threads", "--save"):
        assert option in said
