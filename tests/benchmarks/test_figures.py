"""Pictures of made-up results: each is drawn, repeats, is text and no date, and says what is better and where from."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHERE = {"cpu": "A chip", "cores": 2, "python": "3.11.7", "torch": "2.13.0", "date": "2026-11-21 10:00:00 +0000"}
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib, of the extra bench, is not installed"
)


def quartiles(name: str, value: float) -> dict[str, float]:
    return {name: value, f"{name}: 25%": 0.9 * value, f"{name}: 75%": 1.2 * value}


def speeds(unit: str) -> list[dict[str, Any]]:
    who = {"splitpipe, drop-in, split": "own", "splitpipe, zb-h1": "own", "torchgpipe, GPipe": "peer",
           "torch.distributed, 1F1B": "peer", "unwrapped, whole batch, 2 threads": "bound"}
    return [{"contender": name, "as": role, **quartiles(unit, 10.0 + 10 * number)}
            for number, (name, role) in enumerate(who.items())]


VARIANTS = ("baseline", "+ dependency", "+ streams", "+ skips", "+ split")

#: For each part of the benchmarks whose results are drawn: tables with the columns that its script gives.
MADE_UP: dict[str, dict[str, list[dict[str, Any]]]] = {
    "compute": {"compute, gpt": speeds("tokens a second"), "compute, unet": speeds("images a second")[:3], "best": []},
    "memory-peers": {"memory": [
        {"model": "gpt", "chunks": chunks, "checkpoint": mode, "torchgpipe, MiB": 10.0, "split, MiB": 9.0,
         "split / torchgpipe": 0.9, "autograd, MiB": 10.0, "autograd / torchgpipe": 1.0}
        for chunks in (4, 8) for mode in ("always", "never")
    ]},
    "overhead": {"overhead": [
        {"layer": "linear", "checkpoint": "never", "stages": stages, "chunks": 8, "pipeline": who,
         "us a microbatch and stage": 50.0, "25 %": 45.0, "75 %": 60.0}
        for stages in (2, 4) for who in ("splitpipe, split", "torchgpipe")
    ]},
    "ablation": {f"unet, copies {copy}": [
        {"variant": name, "makespan": 40.0, "least": 30.0, "most": 44.0}
        for name in (*VARIANTS, "+ schedule: zb-h1", "split, without skips")
    ] for copy in (0, 0.25)},
    "scaling": {
        "chunks": [
            *({"contender": "splitpipe, 1f1b", "chunks": chunks, **quartiles("step, ms", 8.0)} for chunks in (1, 4)),
            {"contender": "unwrapped, 1 thread", "chunks": "", **quartiles("step, ms", 9.0)},
        ],
        "stages": [
            {"schedule": name, "devices": devices, "chunks": 8, "ideal": devices, **quartiles("speed-up", devices)}
            for name, devices in {"one device": 1, "1f1b": 2}.items()
        ],
    },
    "schedules": {"small": [
        {"costs": costs, "devices": 4, "chunks": chunks, "memory": memory, "search": "184", "with OR-Tools": "180",
         "bound": "165.5", "reference search": "204"}
        for costs, chunks in {"F, B, W = 3, 4, 2": 16, "F = B = W": 8}.items() for memory in (2, 2.5)
    ]},
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("figures")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with all the results that are drawn."""
    for part, tables in MADE_UP.items():
        (tmp_path / f"{part}-cpu.json").write_text(json.dumps({"environment": WHERE, "tables": tables}))
    return tmp_path


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter() if element.tag.endswith("}text")]


def test_there_are_results_for_every_picture(script: ModuleType) -> None:
    assert {picture.part for picture in script.PICTURES.values()} == MADE_UP.keys()


def test_the_repositorys_pictures_are_of_its_results(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = script.main(["--check"])
    assert code == 0, capsys.readouterr().err


@needs_matplotlib
def test_every_picture_says_what_is_better_where_and_when(script: ModuleType, results: Path) -> None:
    assert script.main(["--results", str(results)]) == 0
    for name in script.PICTURES:
        title, *_ = [text for text in texts(results / f"{name}-cpu.svg") if " is better" in text]
        assert "less" in title or "more" in title
        assert "A chip, 2 cores, Python 3.11.7, torch 2.13.0, 2026-11-21" in texts(results / f"{name}-cpu.svg")


@needs_matplotlib
def test_the_same_results_give_the_same_file_without_a_date(script: ModuleType, results: Path) -> None:
    path = results / "stages-cpu.svg"
    found = []
    for _ in range(2):
        script.main(["--results", str(results), "--only", "stages"])
        found.append(path.read_text())
    assert found[0] == found[1]
    assert "dc:date" not in found[0] and "<svg" in found[0]


@needs_matplotlib
def test_speed_is_that_of_torchgpipe_on_each_model(script: ModuleType, results: Path) -> None:
    script.main(["--results", str(results), "--only", "throughput"])
    found = texts(results / "throughput-cpu.svg")
    # 10 (drop-in), 20 (scheduled), 40 and 50 by 30; the second model has the first three of five contenders.
    assert [found.count(each) for each in ("0.33", "0.67", "1.00", "1.33", "1.67")] == [2, 2, 2 + 1, 1, 1]
    assert {"gpt", "unet", "splitpipe, drop-in", "splitpipe, scheduled", "torch.distributed"} <= set(found)


@needs_matplotlib
def test_without_torchgpipe_speed_is_that_of_the_module_alone(script: ModuleType, results: Path) -> None:
    rows = [row for row in speeds("tokens a second") if row["contender"] != "torchgpipe, GPipe"]
    text = json.dumps({"environment": WHERE, "tables": {"compute, gpt": rows}})
    (results / "compute-cpu.json").write_text(text)
    assert script.main(["--results", str(results), "--only", "throughput"]) == 0
    assert "times unwrapped" in texts(results / "throughput-cpu.svg")


@needs_matplotlib
def test_a_picture_is_left_out_where_its_table_is(script: ModuleType, results: Path) -> None:
    tables = {"chunks": MADE_UP["scaling"]["chunks"]}
    (results / "scaling-cpu.json").write_text(json.dumps({"environment": WHERE, "tables": tables}))
    assert script.main(["--results", str(results), "--only", "chunks", "stages"]) == 0
    assert (results / "chunks-cpu.svg").exists() and not (results / "stages-cpu.svg").exists()


@needs_matplotlib
def test_memory_without_torchgpipe_can_not_be_drawn(
    script: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {"memory": [{"chunks": 4}]}
    (results / "memory-peers-cpu.json").write_text(json.dumps({"environment": WHERE, "tables": tables}))
    assert script.main(["--results", str(results), "--only", "memory"]) == 1
    assert "memory-cpu.svg, of memory-peers-cpu.json: found no memory of torchgpipe's" in capsys.readouterr().err


@needs_matplotlib
def test_a_picture_that_is_older_than_its_results_is_found(
    script: ModuleType, results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--results", str(results), "--only", "stages", "overhead"]
    assert script.main(options) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # What checks does not draw.
    assert script.main([*options, "--check"]) == 0
    path = results / "scaling-cpu.json"
    path.write_text(path.read_text() + "\n")
    assert script.main([*options, "--check"]) == 1
    said = capsys.readouterr().err
    assert said == "stages-cpu.svg: is not of this scaling-cpu.json; run python benchmarks/figures.py\n"


def test_without_matplotlib_it_says_what_to_install(
    script: ModuleType, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert script.main(["--results", str(results)]) == 1
    assert "matplotlib is not installed; expected what python -m pip install" in capsys.readouterr().err


@needs_matplotlib
def test_results_of_a_gpu_have_pictures_of_their_own(script: ModuleType, results: Path) -> None:
    (results / "ablation-cpu.json").rename(results / "ablation-cuda.json")
    rows = [{"variant": name, "ms": 3.0, "least": 2.0, "most": 4.0} for name in VARIANTS]
    (results / "ablation-cuda.json").write_text(json.dumps({"environment": WHERE, "tables": {"unet, large": rows}}))
    assert script.main(["--results", str(results), "--only", "ablation"]) == 0
    assert "ms" in texts(results / "ablation-cuda.svg") and not (results / "ablation-cpu.svg").exists()
