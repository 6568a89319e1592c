"""The benchmark of step time against microbatches and stages: its tables are whole, its arithmetic is right.

Nothing is timed.
"""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from splitpipe import schedule

ROOT = Path(__file__).resolve().parents[2]
TINY = "--preset tiny --chunks 2 3 --passes 1 --stages 2 --each 1 --work 0.01 --schedules 1f1b zb-v".split()
PIPELINES = ["splitpipe, drop-in, split", "splitpipe, drop-in, autograd", "splitpipe, 1f1b", "splitpipe, zb-h1"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    platform.processor()  # It asks a process, the first time.
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("scaling")
    torch.set_num_threads(threads)


@pytest.fixture
def alone(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script where torchgpipe is missing."""
    monkeypatch.setattr(script.chunked, "find_spec", lambda _: None)
    return script


def things(script: ModuleType, name: str, chunks: list[int], order: str | None = None) -> list[object]:
    it = script.chunked.Contender(name, schedule=order)
    return [script.chunked.Thing(it, number, None, None) for number in chunks]


def test_all_is_measured_printed_and_saved(alone, capsys, tmp_path):
    path = tmp_path / "scaling.json"
    assert alone.main([*TINY, "--save", str(path)]) == 0
    saved = json.loads(path.read_text())
    tables = saved["tables"]
    assert list(tables) == ["chunks", "best chunks", "stages", "drop-in"]
    pairs = [(name, number) for name in PIPELINES for number in (2, 3)]
    pairs += [("unwrapped, 1 thread", ""), ("unwrapped, 2 threads", "")]
    assert [(row["contender"], row["chunks"]) for row in tables["chunks"]] == pairs
    assert [row["contender"] for row in tables["best chunks"]] == PIPELINES
    found = [(row["schedule"], row["devices"], row["chunks"]) for row in tables["stages"]]
    assert found == [("one device", 1, 1), ("1f1b", 2, 2), ("zb-v", 2, 2)]
    assert [row["pipeline"] for row in tables["drop-in"]] == ["splitpipe, split", "splitpipe, autograd"]
    assert {"date", "command", "cpu", "torch", "preset", "devices", "left_out"} <= saved["environment"].keys()
    printed = capsys.readouterr().out
    for title, rows in tables.items():
        assert f"\n{title}\n\n| {' | '.join(rows[0])}" in printed


def test_missing_torchgpipe_is_named(alone, tmp_path, capsys):
    path = tmp_path / "scaling.json"
    assert alone.main([*TINY, "--tables", "chunks", "--save", str(path)]) == 0
    line = "torchgpipe, GPipe: torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"
    assert json.loads(path.read_text())["environment"]["left_out"] == [line]
    assert f"left out: {line}" in capsys.readouterr().err


def test_why_drop_in_pipelines_have_no_emulated_stages_is_said(alone, tmp_path):
    path = tmp_path / "scaling.json"
    assert alone.main([*TINY, "--tables", "stages", "--save", str(path)]) == 0
    (line,) = json.loads(path.read_text())["environment"]["left_out"]
    assert line.startswith("drop-in pipelines") and "one thread" in line


@pytest.mark.skipif(find_spec("torchgpipe") is None, reason="torchgpipe is not installed")
def test_torchgpipe_computes_what_the_module_does(script):
    devices = ["cpu", "cpu"]
    known, left_out = script.chunked.contenders("cpu", devices)
    assert left_out == []
    one, other = (
        script.chunked.things(each, script.chunked.PRESETS["tiny"], "cpu", devices, [3])[0].results()
        for each in known if each.name in ("torchgpipe, GPipe", "unwrapped, 1 thread")
    )
    assert one == pytest.approx(other, rel=1e-5)


def test_other_gradients_are_exit_code_1_and_are_not_saved(alone, monkeypatch, capsys, tmp_path):
    path = tmp_path / "scaling.json"
    results = alone.chunked.Thing.results

    def strange(self):
        loss, norm = results(self)
        return loss, norm * (1.001 if self.name == "splitpipe, zb-h1, 3" else 1)

    monkeypatch.setattr(alone.chunked.Thing, "results", strange)
    assert alone.main([*TINY, "--tables", "chunks", "--save", str(path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("splitpipe, zb-h1, 3: loss ") and line.endswith("those of unwrapped, 2 threads, 0")
    assert not path.exists()


def test_a_loss_that_is_no_number_strays(script):
    found = script.chunked.strayed({"a": (float("nan"), 1.0), "b": (2.0, 1.0), "c": (2.0, 1.0)}, 0.1)
    assert [line.partition(":")[0] for line in found] == ["a"]


def test_chunks_are_compared_with_the_fewest_and_with_no_pipeline(script):
    who = [*things(script, "own", [2, 8], "1f1b"), *things(script, "unwrapped", [0])]
    walls = {"own, 2": [4.0, 6.0, 8.0], "own, 8": [3.0, 3.0, 2.0], "unwrapped, 0": [1.0, 2.0, 2.0]}
    few, many, none = script.chunked.chunked(who, walls, 2)
    assert (many["step, ms"], many["step, ms: 25%"], many["step, ms: 75%"]) == (3e3, 2.5e3, 3e3)
    assert (few["/ chunks=2"], many["/ chunks=2"], many["/ chunks=2: 25%"]) == (1.0, 0.5, 0.375)
    assert (many["/ unwrapped"], none["/ unwrapped"]) == (1.5, 1.0)
    ideal = schedule.simulate(schedule.build("1f1b", 2, 8)).makespan / 8
    assert many["its schedule's / chunks=2"] == ideal / (schedule.simulate(schedule.build("1f1b", 2, 2)).makespan / 2)


def test_best_is_the_least_median_and_the_slope_is_of_what_lies_beyond(script):
    who = things(script, "own", [1, 2, 4, 8])
    walls = {"own, 1": [9.0, 9.0, 9.0], "own, 2": [2.0, 1.0, 3.0], "own, 4": [4.0, 3.0, 5.0], "own, 8": [8.0, 7.0, 9.0]}
    (row,) = script.chunked.best(who, walls)
    assert (row["best chunks"], row["step, ms"], row["quartiles that meet its"]) == (2, 2e3, "2")
    assert (row["us a microbatch more"], row["% of the step"]) == (pytest.approx(1e6), pytest.approx(50))


def test_best_of_all_that_were_tried_has_no_slope(script):
    walls = {"own, 1": [3.0, 3.0, 4.0], "own, 2": [2.0, 2.0, 9.0]}
    (row,) = script.chunked.best(things(script, "own", [1, 2]), walls)
    assert (row["best chunks"], row["quartiles that meet its"]) == (2, "1, 2")
    assert "us a microbatch more" not in row


def test_ideal_of_stages_is_what_simulate_says(script):
    rows = script.staged.scheduled([2, 3], ["1f1b", "zb-h1", "zb-v"], each=2, work=0.03, passes=1)
    assert rows[0]["ideal"] == pytest.approx(1)
    for row in rows[1:]:
        n, m = row["devices"], row["chunks"]
        spans = schedule.simulate(schedule.build(row["schedule"], n, m)).makespan
        assert row["ideal"] == pytest.approx(3 * m * n / spans), row["schedule"]
        assert row["op, ms"] == pytest.approx(30 / (3 * m * n))


def test_speed_up_is_over_one_device_in_the_same_round(script):
    staged = script.staged
    plan = schedule.build("1f1b", 2, 2)
    nap = importlib.import_module("emulation").Nap
    naps = [staged.Naps([nap(kind, 0, 0.0, 1.0) for kind in "FBW"])]
    it = staged.Runner("1f1b", plan, None, runs=[staged.Took(wall, naps) for wall in (9.0, 18.0, 36.0)])
    row = staged.row(it, 1.0, alone=[12.0, 12.0, 36.0], work=12.0)
    found = (row["speed-up"], row["speed-up: 25%"], row["speed-up: 75%"])
    assert found == pytest.approx((1, 5 / 6, 7 / 6))
    assert (row["ideal"], row["speed-up / ideal"]) == pytest.approx((12 / 9, 9 / 12))
    assert row["wall / ideal of measured sleeps"] == 2.0


def test_abreast_counts_sleeps_of_a_kind_by_the_time_that_they_span(script):
    nap = importlib.import_module("emulation").Nap
    naps = [nap("F", 0, 0.0, 2.0), nap("F", 1, 1.0, 4.0), nap("B", 1, 4.0, 5.0), nap("W", 1, 6.0, 7.0)]
    took = script.staged.Took(7.0, [script.staged.Naps(naps)])
    assert (script.staged.abreast(took, "F"), script.staged.abreast(took, "BW")) == (5 / 4, 2 / 3)


def test_quartiles_of_one_value_are_that_value(script):
    quartiles = importlib.import_module("quartiles").quartiles
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert quartiles([9.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("there", "device", "count", "found"),
    [
        (8, "cuda", None, [f"cuda:{number}" for number in range(8)]),
        (8, "cuda", 2, ["cuda:0", "cuda:1"]),
        (8, "cuda:1", None, ["cuda:1"] * 4),
        (1, "cuda", None, ["cuda"] * 4),
        (1, "cuda", 2, ["cuda"] * 2),
        (0, "cpu", None, ["cpu"] * 2),
    ],
)
def test_stages_are_on_all_gpus_or_on_parts_of_one(script, monkeypatch, there, device, count, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(script.chunked, "parts", lambda device, count: [device] * count)
    assert script.chunked.places(device, count) == found


def test_parts_of_a_gpu_are_nothing_for_torchgpipe(script):
    stream = torch.Stream(device="cpu")
    known, (line,) = script.chunked.contenders("cuda", [stream, stream])
    assert [each.name for each in known] == [*PIPELINES, "unwrapped, one whole GPU"]
    assert line.endswith("takes no streams, so no parts of a GPU as devices")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chunks", "64"], "--chunks: found 64, expected at most 32, the rows of a batch"),
        (["--chunks", "0"], "--chunks: found [0], expected more than 0"),
        (["--parts", "5"], "--parts: found 5, expected at most 4, the blocks of the model"),
        (["--schedules", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_bad_options_are_refused(script, capsys, options, said):
    with pytest.raises(SystemExit) as stopped:
        script.main(options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_help_names_what_can_be_varied(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for name in ("tables", "passes", "device", "preset", "chunks", "parts", "stages", "work", "save"):
        assert f"--{name}" in printed
