"""The benchmark of split convolutions: it runs on tiny sizes, and compares what it says. Nothing is timed."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from splitpipe.deferral.convolution import Convolution


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    yield importlib.import_module("convolutions")
    torch.set_num_threads(threads)


def test_it_prints_and_saves_a_row_for_each_size(script, capsys, tmp_path):
    path = tmp_path / "found.json"
    given = ["--sizes", "1x2x3x1", "2x4x3x3", "--length", "2", "--chunks", "2", "--passes", "1", "--threads", "1"]
    assert script.main([*given, "--save", str(path)]) == 0
    rows = json.loads(path.read_text())["tables"]["all convolutions split"]
    assert [[row[name] for name in ("samples", "channels", "side", "kernel")] for row in rows] == [
        [1, 2, 3, 1], [2, 4, 3, 3],
    ]
    assert "| drop-in, split / autograd |" in capsys.readouterr().out


def test_the_steps_differ_in_what_they_split(script, monkeypatch):
    given, split = Convolution.forward, []

    def forward(*arguments, **options):
        split.append(1)
        return given(*arguments, **options)

    monkeypatch.setattr(Convolution, "pays", lambda *_: True)
    monkeypatch.setattr(Convolution, "forward", staticmethod(forward))
    found = {}
    for name, step in script.steps(script.Size.of("1x4x3x3"), 2, 2).items():
        step()
        found[name] = len(split)
        split.clear()
    assert found == {"autograd": 0, "split": 4, "1f1b": 0, "zb-h1": 4}


def test_what_is_split_is_as_before_afterwards(script):
    before = Convolution.pays
    script.compare([script.Size.of("1x2x3x1")], 2, 2, 1)
    assert Convolution.pays == before


def test_a_size_that_is_none_is_named(script):
    with pytest.raises(argparse.ArgumentTypeError, match="'1x2': expected samples x channels x side x kernel"):
        script.Size.of("1x2")
