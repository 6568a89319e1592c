"""The benchmark of schedules on parts of a device runs on tiny sizes, and says what it should. Nothing is timed."""
from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import ANY, MagicMock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("parts")
    torch.set_num_threads(threads)


def test_it_compares_schedules_engines_and_the_drop_in(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "parts.json"
    given = "--preset tiny --passes 1 --schedules 1f1b zb-v --threads 1 --chunks 2 --save".split()
    assert script.main([*given, str(saved)]) == 0
    tables = json.loads(saved.read_text())["tables"]
    names = [row["variant"] for row in tables["steps"]]
    assert names == ["drop-in, split", "drop-in, autograd", "1f1b, split", "1f1b, autograd", "zb-v, split",
                     "zb-v, autograd", "unwrapped, the whole device"]
    assert all(0 < row["computing, %"] <= 100 for row in tables["steps"] if "computing, %" in row)
    assert [row["schedule"] for row in tables["recorder"]] == ["1f1b", "zb-v"]
    assert "recorded / not" in capsys.readouterr().out


def test_help_names_every_option(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{option}" in text for option in ("device", "parts", "preset", "chunks", "passes", "schedules"))


def test_parts_of_a_gpu_are_groups_of_one_split(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MagicMock()
    done = driver.CUresult.CUDA_SUCCESS
    driver.cuDeviceGet.return_value = done, "device"
    driver.cuDeviceGetDevResource.return_value = done, SimpleNamespace(sm=SimpleNamespace(smCount=132))
    driver.cuDevSmResourceSplitByCount.return_value = done, ["a", "b", "c", "d"], 4, "rest"
    driver.cuDevResourceGenerateDesc.side_effect = lambda groups, count: (done, groups)
    driver.cuGreenCtxCreate.side_effect = lambda described, device, flags: (done, described)
    driver.cuGreenCtxStreamCreate.side_effect = lambda context, flags, priority: (done, ord(context[0]))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: (chr(number), device))
    assert script.parts("cuda:1", 4) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    driver.cuDevSmResourceSplitByCount.assert_called_once_with(4, ANY, 0, 32)
    driver.cuDevSmResourceSplitByCount.return_value = done, ["a", "b"], 2, "rest"
    with pytest.raises(RuntimeError, match="132 multiprocessors make 2 parts of 32: expected 4"):
        script.parts("cuda:1", 4)
    driver.cuDeviceGet.return_value = ("broken",)
    with pytest.raises(RuntimeError, match="the CUDA driver says broken"):
        script.parts("cuda", 4)
