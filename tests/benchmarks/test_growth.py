"""The simulated cost of more devices: it prints and saves a row for each, of what follows from the numbers given."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("growth")


def test_it_prints_and_saves_a_row_for_each_schedule_and_number_of_devices(script, capsys, tmp_path):
    path = tmp_path / "growth.json"
    assert script.main(["--schedules", "1f1b", "zb-h1", "--save", str(path)]) == 0
    rows = json.loads(path.read_text())["tables"]["growth"]
    assert [(row["devices"], row["schedule"]) for row in rows] == [
        (devices, name) for devices in (4, 64, 1024) for name in ("1f1b", "zb-h1")
    ]
    assert all(one["bubble"] > other["bubble"] for one, other in zip(rows[::2], rows[1::2], strict=True))
    assert "16 x 64" in capsys.readouterr().out


def test_traffic_is_what_stages_and_copies_send(script):
    it = script.Setting(width=4, blocks=4, tokens=8, size=2, speed=1e9, bandwidth=1e9, latency=0.0)
    alone, many = script.row("1f1b", 4, 2, it), script.row("1f1b", 64, 2, it)
    # 3 hops there and back, 8 microbatches, 8 tokens of 4 numbers of 2 bytes.
    assert alone["between stages, GiB a pipeline"] * 2**30 == 2 * 3 * 8 * 8 * 4 * 2
    assert alone["gradients, GiB a device"] == 0
    # 8 copies: each sends and takes 7 eighths of its half block's 96 numbers, twice.
    assert many["gradients, GiB a device"] * 2**30 == pytest.approx(2 * 7 / 8 * 12 * 4**2 / 2 * 2)


def test_a_hop_takes_its_latency_and_its_bytes(script):
    it = script.Setting(width=4, blocks=4, tokens=8, size=2, speed=1e9, bandwidth=1e6, latency=1.0)
    assert it.costs(4, 4).copy == pytest.approx(1.0 + 64e-6)
