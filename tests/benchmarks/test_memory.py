"""The benchmarks of memory and of checkpointing: a case in its own process, and the arithmetic. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--preset", "tiny", "--models", "unet"]

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch's threads join its profiler on Linux")
peer = pytest.mark.skipif(find_spec("torchgpipe") is None, reason="needs torchgpipe to compare with")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("memory")


@pytest.fixture
def checkpointing(memory: ModuleType) -> ModuleType:
    """The script as a module."""
    return importlib.import_module("checkpointing")


@pytest.fixture
def bytes_of(memory, checkpointing, monkeypatch) -> dict[str, dict[str, int]]:
    """What each case is said to take, by the contender's name; 2 MiB unless the test says otherwise."""
    sizes: dict[str, dict[str, int]] = {}

    def apart(call, arguments, device):
        return [sizes.get(contender.name, {device: 2 * 2**20}) for contender, *_ in arguments]

    monkeypatch.setattr(memory, "apart", apart)
    monkeypatch.setattr(checkpointing, "apart", apart)
    monkeypatch.setattr(memory.contenders, "find_spec", lambda _: True)
    monkeypatch.setattr(memory, "version", lambda _: "0.0")
    monkeypatch.setattr(checkpointing, "version", lambda _: "0.0")
    return sizes


def saved(script: ModuleType, path: Path, *options: str) -> dict[str, Any]:
    assert script.main([*TINY, *options, "--save", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@linux
def test_a_case_is_counted_in_a_fresh_process(memory):
    subject = memory.Subject("unet", "tiny", 4)
    split = memory.contenders.drop_ins("never")[0]
    (checked, kept) = memory.apart(
        memory.counted, [(memory.contenders.drop_ins("always")[0], subject, 1), (split, subject, 2)], "cpu"
    )
    weights = sum(4 * parameter.numel() for parameter in split.built(subject)[0].parameters())
    assert weights < checked["cpu"] < kept["cpu"]


@linux
def test_the_step_that_takes_most_counts(memory):
    subject = memory.Subject("unet", "tiny", 4)
    assert memory.fresh(uneven, subject) == 3 * 2**20


def uneven(subject: Any) -> int:
    """What is counted of steps that take 1, 3 and 2 MiB, after a first one that takes 9."""
    memory = importlib.import_module("memory")
    sizes = iter([9, 1, 3, 2])

    def make(case: Any) -> Any:
        return case.layers, lambda: torch.empty(next(sizes) * 2**18)

    found: int = memory.counted(memory.Contender("nobody", "nowhere", "own", make), subject, 3)["cpu"]
    return found


@linux
def test_what_fails_in_a_fresh_process_is_said(memory):
    with pytest.raises(RuntimeError, match=r"(?s)int\('x',\): its process has failed.*ValueError: invalid literal"):
        memory.fresh(int, "x")


@linux
def test_a_process_that_is_gone_is_said(memory):
    with pytest.raises(RuntimeError, match="its process has failed:\nexit code 3"):
        memory.fresh(sys.modules["os"]._exit, 3)


def test_rows_compare_with_torchgpipe(memory, bytes_of, tmp_path):
    bytes_of["splitpipe, drop-in, split"] = {"cpu": 3 * 2**20}
    found = saved(memory, tmp_path / "memory.json", "--chunks", "4", "--checkpoint", "never")
    assert found["tables"]["memory"] == [{
        "model": "unet", "chunks": 4, "checkpoint": "never", "torchgpipe, MiB": 2.0, "split, MiB": 3.0,
        "split / torchgpipe": 1.5, "autograd, MiB": 2.0, "autograd / torchgpipe": 1.0,
    }]


def test_the_worst_ratio_is_judged(memory, bytes_of, tmp_path, capsys):
    bytes_of["splitpipe, drop-in, split, always"] = {"cpu": 3 * 2**20}
    bytes_of["splitpipe, drop-in, autograd, always"] = {"cpu": 21 * 2**20 // 10}
    found = saved(memory, tmp_path / "memory.json", "--chunks", "4", "8")
    assert [(row["drop-in"], row["worst ratio"], row["checkpoint"], row["target"]) for row in found["tables"]["worst"]
            ] == [("split", 1.5, "always", "missed"), ("autograd", pytest.approx(1.05), "always", "met")]
    assert "unet, split: 1.500 of torchgpipe's at worst; missed" in capsys.readouterr().out


def test_with_one_microbatch_except_last_is_never(memory, bytes_of, tmp_path):
    found = saved(memory, tmp_path / "memory.json", "--chunks", "1", "4")
    assert [(row["chunks"], row["checkpoint"]) for row in found["tables"]["memory"]] == [
        (1, "always"), (1, "never"), (4, "always"), (4, "except_last"), (4, "never"),
    ]


def test_schedules_are_beside_the_drop_in_pipeline_that_keeps_all(memory, bytes_of, tmp_path):
    bytes_of["splitpipe, 1f1b"] = {"cpu": 2**20}
    found = saved(memory, tmp_path / "memory.json", "--schedules", "1f1b", "zb-v")
    assert found["tables"]["schedules"] == [
        {"model": "unet", "chunks": 8, "schedule": "1f1b", "MiB": 1.0, "/ drop-in, split, never": 0.5},
        {"model": "unet", "chunks": 8, "schedule": "zb-v", "MiB": 2.0, "/ drop-in, split, never": 1.0},
    ]


def test_each_device_of_several_has_a_row(memory, bytes_of, tmp_path):
    bytes_of["splitpipe, drop-in, split"] = {"cuda:0": 2**20, "cuda:1": 3 * 2**20}
    bytes_of["splitpipe, drop-in, autograd"] = {"cuda:0": 2**20, "cuda:1": 2**20}
    bytes_of["torchgpipe, GPipe"] = {"cuda:0": 2**20, "cuda:1": 2 * 2**20}
    found = saved(memory, tmp_path / "memory.json", "--device", "cuda", "--chunks", "4", "--checkpoint", "never")
    rows = found["tables"]["memory"]
    assert [(row["device"], row["split / torchgpipe"]) for row in rows] == [("cuda:0", 1.0), ("cuda:1", 1.5)]


def test_without_torchgpipe_the_rest_is_counted(memory, bytes_of, monkeypatch, tmp_path):
    monkeypatch.setattr(memory.contenders, "find_spec", lambda _: None)
    found = saved(memory, tmp_path / "memory.json", "--chunks", "4", "--checkpoint", "never", "--schedules", "1f1b")
    (why,) = found["environment"]["left_out"]
    assert why == "torchgpipe: torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"
    assert found["tables"]["memory"] == [
        {"model": "unet", "chunks": 4, "checkpoint": "never", "split, MiB": 2.0, "autograd, MiB": 2.0}
    ]
    assert found["tables"]["worst"] == []
    assert len(found["tables"]["schedules"]) == 1


@pytest.fixture
def here(checkpointing, monkeypatch) -> None:
    """Steps are taken in this process; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(checkpointing, "fresh", lambda call, *arguments: call(*arguments))
    yield
    torch.set_num_threads(threads)


@peer
def test_all_modes_train_alike(checkpointing, here):
    subject = checkpointing.Subject("resnet101", "tiny", 4)
    who, left_out = checkpointing.cases(subject, checkpointing.MODES)
    found = checkpointing.timed(who, subject, passes=2)
    assert left_out == [] and len(found) == 9
    assert {len(its.timings.wall) for its in found.values()} == {2}
    assert {len(its.losses) for its in found.values()} == {3}
    assert checkpointing.strayed({str(key): its.losses for key, its in found.items()}, 1e-5) == []


def timed(script: ModuleType, *wall: float, loss: float = 2.0) -> Any:
    return script.Timed(script.Timings(wall=list(wall)), [loss])


def test_modes_are_beside_never_and_beside_torchgpipe(checkpointing):
    found = {
        ("always", "split"): timed(checkpointing, 0.003, 0.003, 0.006),
        ("always", "torchgpipe"): timed(checkpointing, 0.002, 0.002, 0.002),
        ("never", "split"): timed(checkpointing, 0.001, 0.002, 0.002),
    }
    rows = checkpointing.rows(
        checkpointing.Subject("unet", "tiny", 4), found, dict.fromkeys(found, {"cuda:0": 2**20, "cuda:1": 2**20})
    )
    assert rows[0] == {
        "model": "unet", "checkpoint": "always", "drop-in": "split", "step, ms": 3.0, "step, ms: 25%": 3.0,
        "step, ms: 75%": 4.5, "/ its never": 3.0, "/ torchgpipe": 1.5, "peak, MiB": 2.0,
    }
    assert "/ its never" not in rows[1] and "/ torchgpipe" not in rows[2]


def test_checkpointing_without_torchgpipe_measures_the_rest(checkpointing, here, bytes_of, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpointing.contenders, "find_spec", lambda _: None)
    found = saved(checkpointing, tmp_path / "checkpointing.json", "--passes", "1", "--checkpoint", "always", "never")
    assert [(row["checkpoint"], row["drop-in"]) for row in found["tables"]["checkpointing"]] == [
        ("always", "split"), ("always", "autograd"), ("never", "split"), ("never", "autograd"),
    ]
    assert "torchgpipe is not installed" in found["environment"]["left_out"][0]


def test_another_loss_is_exit_code_1_and_is_not_saved(checkpointing, bytes_of, monkeypatch, capsys, tmp_path):
    def fresh(call, who, subject, passes):
        return {key: timed(checkpointing, 1.0, loss=2.1 if key[1] == "autograd" else 2.0) for key in who}

    monkeypatch.setattr(checkpointing, "fresh", fresh)
    path = tmp_path / "checkpointing.json"
    assert checkpointing.main([*TINY, "--checkpoint", "never", "--save", str(path)]) == 1
    assert "unet, never, autograd: loss 2.100000 at step 0; expected 2.000000" in capsys.readouterr().out
    assert not path.exists()


@pytest.mark.parametrize("name", ["memory", "checkpointing"])
def test_scripts_run_from_the_root_of_the_repository(name):
    command = [sys.executable, f"benchmarks/{name}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "--checkpoint" in done.stdout) == (0, True), done.stderr
