"""The command lines given what makes no sense: a line on the standard error, exit code 2, and no file written."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from splitpipe.__main__ import main

TRAIN = """
from torch import nn
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
"""
SAMPLE = ("--sample", "4x6")


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "wrong_train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "wrong_train", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((".:model", *SAMPLE), "expected MODULE:NAME"),
        (("..wrong_train:model", *SAMPLE), "expected MODULE:NAME"),
        ((":", *SAMPLE), "expected MODULE:NAME"),
        (("", *SAMPLE), "expected MODULE:NAME"),
        (("wrong_train:model.x", *SAMPLE), "has no 'model.x'"),
        (("wrong_train:model", "--sample", f"{10**30}x6"), "torch can't make such a tensor"),
        (("wrong_train:model", "--sample", "999999999x999999999"), "torch can't make such a tensor"),
        (("wrong_train:model", "--sample", f"4x6:int64:{10**30}"), "torch can't make such a tensor"),
        (("wrong_train:model", "--sample", ""), "expected MODULE:NAME"),
        (("wrong_train:model", "--sample", "0x6"), "the sample has no rows"),
        (("wrong_train:model", *SAMPLE, "--html", ""), "'' can't be written"),
        (("wrong_train:model", *SAMPLE, "--html", "absent/a.html"), "'absent/a.html' can't be written"),
        (("wrong_train:model", *SAMPLE, "--json", "."), "'.' can't be written"),
        (("wrong_train:model", *SAMPLE, "--memory", "0"), "expected positive numbers of bytes"),
        (("wrong_train:model", *SAMPLE, "--memory", ""), "isn't a size"),
        (("wrong_train:model", *SAMPLE, "--memory", "nan"), "isn't a size"),
        (("wrong_train:model", *SAMPLE, "--chunks", ""), "expected whole numbers"),
        (("wrong_train:model", *SAMPLE, "--chunks", "9" * 30), "expected numbers from 1"),
        (("wrong_train:model", *SAMPLE, "--chunks", "9" * 5000), "expected whole numbers"),
        (("wrong_train:model", *SAMPLE, "--schedules", "1f1b"), "expected both"),
        (("wrong_train:model", *SAMPLE, "--devices", ""), "devices[0] is ''"),
        (("wrong_train:model", *SAMPLE, "--devices", "9" * 30), "isn't a device here"),
        (("wrong_train:model", *SAMPLE, "--optimizer-state", "nan"), "optimizer_state is nan"),
        (("wrong_train:model", *SAMPLE, "--seconds", "inf"), "seconds is inf"),
        (("wrong_train:model", *SAMPLE, "--target", "4x3", "--loss", "__name__"), "expected a function"),
        (("wrong_train:model", *SAMPLE, "--target", "5x3", "--loss", "mse_loss"), "first dimensions [5]"),
    ],
)
def test_a_plan_of_what_makes_no_sense_is_refused_in_a_line(
    room: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["plan", *arguments, "--seconds", "0"] if "--seconds" not in arguments else ["plan", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and said.err.startswith("splitpipe plan: ")
    assert said.out == ""
    assert sorted(path.name for path in room.iterdir()) == ["wrong_train.py"]


@pytest.mark.parametrize("word", ["Plan", "plans", "", "--version", "-x"])
def test_a_command_that_is_none_is_refused_in_a_line(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main([word]) == 2
    said = capsys.readouterr()
    assert said.err == f"splitpipe: unknown command {word!r}: expected plan or schedule. See --help.\n"
    assert said.out == ""
