"""``python -m splitpipe plan``: a plan from the command line."""
from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from splitpipe import Plan
from splitpipe.__main__ import main

TRAIN = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
class Holder:
    batch = torch.randn(4, 6)
def make():
    return model
def fails(output, target):
    raise TypeError("of the user's")
number = 3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, ids, labels=None):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        loss = None if labels is None else nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": hidden}
words = {"ids": torch.zeros(4, 5, dtype=torch.int64)}
"""
QUICK = ("--devices", "cpu,cpu", "--seconds", "0", "--chunks", "1,2", "--schedules", "zb-h1")


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "planned_train", raising=False)
    return tmp_path


@pytest.mark.thorough
def test_it_prints_the_plan_and_writes_what_it_was_asked_for(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "planned_train:model", "--sample", "4x6", "--target", "4x3", "--loss", "mse_loss", *QUICK
    assert main(["plan", *arguments, "--json", "plan.json", "--html", "page.html"]) == 0
    said = capsys.readouterr()
    assert "SplitPipe(module, balance=" in said.out and "schedule='zb-h1', loss_fn=loss_fn)" in said.out
    assert said.err == ""
    assert "<html" in (room / "page.html").read_text().lower()
    assert Plan.from_json(room / "plan.json").layers == ("0", "1", "2")


@pytest.mark.thorough
def test_without_a_loss_it_plans_the_drop_in(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "planned_train:make", "--sample", "planned_train:Holder.batch", *QUICK[:6]]) == 0
    assert "schedule=" not in capsys.readouterr().out
    assert [path.name for path in room.iterdir() if path.suffix != ".py" and path.is_file()] == []


@pytest.mark.parametrize(("sample", "says"), [
    ("ids=4x5:int64:10,labels=4x5:int64:4", "schedule='zb-h1')"), ("planned_train:words", "checkpoint="),
])
@pytest.mark.thorough
def test_a_module_with_a_forward_of_its_own_gets_cuts(sample, says, room, capsys):
    options = QUICK if "labels" in sample else QUICK[:6]
    assert main(["plan", "planned_train:Net", "--sample", sample, *options, "--json", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert "SplitPipe(module, cuts=['layers." in said and says in said and "loss_fn" not in said
    found = Plan.from_json(room / "plan.json")
    assert found.layers == ("(start)", "layers.0", "layers.1", "layers.2") and found.own_loss is ("labels" in sample)


@pytest.mark.thorough
def test_what_does_not_fit_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "planned_train:model", "--sample", "4x6", *QUICK[:6], "--memory", "100B"]) == 1
    said = capsys.readouterr()
    assert "no plan fits" in said.err and "\n  cpu needs" in said.err and said.out == ""


MODEL = "planned_train:model --sample 4x6"


@pytest.mark.parametrize(("line", "message"), [
    ("planned_train:model", "the following arguments are required: --sample"),
    ("planned_train --sample 4x6", "expected an nn.Module"),
    ("planned_nowhere:model --sample 4x6", "No module named 'planned_nowhere'"),
    ("planned_train:Net --sample ids=4x5:int64:10,labels=x", "Expected MODULE:NAME"),
    ("planned_train:Net --sample planned_train:number", "sample is a int"),
    ("planned_train:model --sample 4x6:float33", "torch has no dtype 'float33'"),
    ("planned_train:model --sample 999999999x999999999", "torch can't make such a tensor"),
    (f"{MODEL} --target 4x3 --loss no", "has no attribute 'no'"),
    (f"{MODEL} --chunks 1,x", "expected whole numbers"),
    (f"{MODEL} --memory lots", "'lots' isn't a size"),
    (f"{MODEL} --devices cuda:99", "cuda:99"),
    (f"{MODEL} --html absent/a.html", "'absent/a.html' can't be written"),
    (f"{MODEL} --json .", "'.' can't be written"),
])
def test_what_is_wrong_is_said_in_a_line(line, message, room, capsys):
    assert main(["plan", "--seconds", "0", *shlex.split(line)]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and said.err.startswith("splitpipe plan: ")
    assert said.out == "" and [path.name for path in room.iterdir() if path.is_file()] == ["planned_train.py"]


def test_an_error_of_a_layer_says_where_it_comes_from() -> None:
    arguments = "planned_train:model", "--sample", "4x6", "--target", "4x3", "--loss", "planned_train:fails", *QUICK
    with pytest.raises(TypeError, match="of the user's"):
        main(["plan", *arguments])
