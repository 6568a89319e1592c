"""The planner's benchmark: it runs through, and its tables hold what they say. Nothing is timed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

QUICK = "--models gpt --preset tiny --passes 1 --seconds 0 --chunks 2 --schedules 1f1b zb-h1 --rivals 1".split()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    yield importlib.import_module("planner")
    torch.set_num_threads(threads)


def test_it_prints_and_saves_predictions_and_balances(script, capsys, tmp_path):
    path = tmp_path / "planner.json"
    assert script.main([*QUICK, "--save", str(path)]) == 0
    tables = json.loads(path.read_text())["tables"]
    assert [row["as"] for row in tables["steps"]][0] == "planned"
    for row in tables["steps"]:
        assert row["error"] == pytest.approx(row["predicted, ms"] / row["measured, ms"] - 1, abs=1e-2)
    assert [row["balance"] for row in tables["balances"]] == ["planned", "balance_by_time", "even"]
    assert tables["balances"][0]["step / planned"] == 1
    assert "stage 1 on cpu, F ms" in capsys.readouterr().out


def test_even_stages_differ_by_a_layer_at_most(script):
    assert script.even(10, 4) == [3, 3, 2, 2]
