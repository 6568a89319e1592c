"""The benchmark of the split backward: each part runs on tiny sizes, and the arithmetic is right. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from splitpipe import SplitPipe

ROOT = Path(__file__).resolve().parents[2]
TINY = "--preset tiny --passes 2 --threads 1".split()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("backward")
    torch.set_num_threads(threads)


def test_step_compares_both_engines_and_the_unwrapped_module(script, capsys):
    assert script.main(["step", *TINY, "--chunks", "1", "3", "--stash-limits", "0"]) == 0
    printed = capsys.readouterr().out
    assert "| model | chunks | variant |" in printed
    assert "split / autograd" in printed and "split / unwrapped" in printed
    for row in ("| mlp | 1 | split |", "| mlp | 3 | split 0 MiB |", "| gpt | 3 | split |"):
        assert row in printed


def test_the_three_of_a_step_compute_the_same_gradients(script):
    preset = script.PRESETS["tiny"]
    options = script.parser().parse_args(["step", *TINY])
    for name in ("mlp", "gpt"):
        found = []
        for backward in ("split", "autograd", None):
            it = script.case(name, preset, "cpu")
            it.layers.double()
            it = script.Case(it.layers, it.input.double() if name == "mlp" else it.input, it.target)
            chunks = {"chunks": 2, "checkpoint": "never"}
            model = it.layers if backward is None else script.wrapped(it, options, backward, **chunks)
            assert backward is None or isinstance(model, SplitPipe)
            it.step(model)()
            found.append([parameter.grad for parameter in it.layers.parameters()])
        torch.testing.assert_close(found[0], found[1])
        torch.testing.assert_close(found[0], found[2])


def test_step_can_tell_what_the_products_give(script, capsys, monkeypatch):
    monkeypatch.setattr(script.products.own, "_available", lambda: True)
    assert script.main(["step", *TINY, "--chunks", "2", "--models", "mlp", "--plain-products"]) == 0
    assert "| mlp | 2 | split, torch's products |" in capsys.readouterr().out
    with script.products.without():
        assert not script.products.own._available()
    assert script.products.own._available()


def test_product_measures_both_gradients(script, capsys):
    assert script.main(["product", *TINY, "--rows", "3"]) == 0
    printed = capsys.readouterr().out
    assert "| 4 to 8 | 3 |" in printed and "weight's, own / mm" in printed and "input's, own / mm" in printed


def test_cost_names_caught_and_uncaught_calls(script, capsys, monkeypatch):
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # Of all that the other tests have left, again and again.
    assert script.main(["cost", *TINY, "--calls", "3"]) == 0
    printed = capsys.readouterr().out
    for row in ("| a linear layer each | 8 |", "| one linear layer again and again | 1 |", "| F.layer_norm |"):
        assert row in printed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a process is read from /proc")
def test_memory_measures_each_case_in_a_process_of_its_own(script, capsys, monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "3000000" if "split" in command else "2000000", "")

    platform.processor()  # It asks a process, the first time.
    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.main(["memory", *TINY, "--models", "mlp"]) == 0
    assert "| mlp | always | 8 | 2.861 | 1.907 | 1.500 |" in capsys.readouterr().out
    assert len(ran) == 3 * 2 * 2  # modes, engines, allocators


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a process is read from /proc")
def test_peak_prints_bytes(script, capsys):
    assert script.main(["peak", *TINY, "--models", "mlp", "--checkpoint", "always", "--stash-limits", "1"]) == 0
    assert int(capsys.readouterr().out) >= 0


def test_memory_says_what_its_process_said(script, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "RuntimeError: no room")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="no room"):
        script.main(["memory", *TINY])


def test_merge_measures_each_kind_of_layer(script, capsys):
    assert script.main(["merge", *TINY, "--chunks", "4"]) == 0
    printed = capsys.readouterr().out
    for row in ("| linear | 8 to 8 | 32 | 4 |", "| convolution |", "| embedding |"):
        assert row in printed


def test_ways_to_merge_agree(script):
    for shape in script.merging.grid(True, device="cpu", dtype=torch.float64):
        pairs = [shape.make(3) for _ in range(5)]
        first, *others = [way(pairs) for way in shape.ways.values()]
        for other in others:
            torch.testing.assert_close(other, first)


def test_all_runs_each_part_and_joins_the_tables(script, tmp_path, monkeypatch):
    ran = []

    def run(command, **_):
        part = " ".join(command[2 : command.index("--device")])
        ran.append(part)
        Path(command[command.index("--save") + 1]).write_text(json.dumps({"tables": {part: [{"a": 1}]}}))

    platform.processor()  # It asks a process, the first time.
    monkeypatch.setattr(script.subprocess, "run", run)
    path = tmp_path / "all.json"
    assert script.main(["all", "--save", str(path)]) == 0
    assert ran == ["step", "cost", "memory", "merge", "merge --cold", "product"]
    assert list(json.loads(path.read_text())["tables"]) == ran


def test_saved_result_has_its_environment(script, tmp_path):
    path = tmp_path / "step.json"
    assert script.main(["step", *TINY, "--models", "mlp", "--chunks", "2", "--save", str(path)]) == 0
    saved = json.loads(path.read_text())
    assert {"date", "command", "cpu", "cores", "threads", "python", "torch"} <= saved["environment"].keys()
    (row,) = saved["tables"]["step"]
    assert (row["model"], row["chunks"]) == ("mlp", 2)


def test_each_round_calls_all_in_an_order_of_its_own(script):
    order = []
    things = {name: lambda name=name: order.append(name) for name in "abc"}
    found = script.measure.interleaved(things, passes=20, warm_up=0, prepare=lambda: order.append("-"))
    text = "".join(order)
    rounds = [text[start : start + 6] for start in range(0, len(text), 6)]
    assert {"".join(sorted(each)) for each in rounds} == {"---abc"}
    assert len(set(rounds)) == 6  # All orders there are.
    assert [len(found[name].wall) for name in "abc"] == [20, 20, 20]


def test_warm_up_is_not_timed(script):
    calls = []
    found = script.measure.interleaved({"a": lambda: calls.append(1)}, passes=2, warm_up=3)
    assert (len(calls), len(found["a"].cpu), len(found["a"].faults)) == (5, 2, 2)


def test_ratio_is_the_median_of_the_rounds(script):
    assert script.measure.ratio([1.0, 4.0, 100.0], [2.0, 4.0, 10.0]) == 1.0


def test_overlap_counts_time_beside_the_busiest_stream(script):
    def kernel(stream, start, duration):
        return {"ts": start, "dur": duration, "args": {"stream": stream}}

    kernels = [kernel(7, 0.0, 4000.0), kernel(7, 5000.0, 5000.0), kernel(9, 3000.0, 3000.0)]
    found = script.measure.overlap(kernels)
    assert [row["stream"] for row in found] == [7, 9]
    assert found[1]["beside, ms"] == 2.0
    assert found[0]["busy, ms"] == 9.0


def test_help_names_every_part(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for part in ("step", "cost", "memory", "merge", "trace", "all"):
        assert f"    {part} " in printed


@pytest.mark.parametrize("options", [[], ["fast"], ["step", "--preset", "huge"], ["step", "--models", "lstm"]])
def test_bad_options_are_refused(script, capsys, options):
    with pytest.raises(SystemExit) as stopped:
        script.main(options)
    assert stopped.value.code == 2
    assert "backward.py" in capsys.readouterr().err


def test_script_runs_from_the_root_of_the_repository():
    command = [sys.executable, "benchmarks/backward.py", "step", *TINY, "--models", "mlp", "--chunks", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "split / autograd" in done.stdout) == (0, True), done.stderr
