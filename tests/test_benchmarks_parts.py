"""The benchmark of schedules on parts of a device runs on tiny sizes, and says what it should. Nothing is timed."""
from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


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
