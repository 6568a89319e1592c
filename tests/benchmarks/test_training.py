"""train_gpt.py and train_parallel.py train, resume, and refuse in one line what makes no run."""
from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from benchmarks import train_gpt
from tests.doors.test_examples import torchrun

TINY = "--batch 5 --chunks 2 --context 16 --width 16 --heads 2 --layers 2 --lr 0.1 --devices cpu cpu".split()
TWO = "--nproc-per-node", "2"

gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


@pytest.fixture
def script(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less of the text is held out, and one thread computes: the models are tiny."""
    train, held_out = train_gpt.text.load()
    monkeypatch.setattr(train_gpt.text, "load", lambda: (train, held_out[:400]))
    torch.set_num_threads(1)


def losses(printed: str) -> list[float]:
    """The held-out losses."""
    return [float(found) for found in re.findall(r"^step \d+: held-out (\S+)", printed, flags=re.MULTILINE)]


@pytest.mark.parametrize("mode", [pytest.param(["--schedule", "v-half"], id="v-half"),
                                  pytest.param([], id="drop-in", marks=pytest.mark.thorough)])
def test_it_learns_and_a_resumed_run_equals_a_straight_one(script, tmp_path, capsys, mode):
    straight, half, resumed = (str(tmp_path / name) for name in ("straight.pt", "half.pt", "resumed.pt"))
    assert train_gpt.main([*TINY, *mode, "--steps", "8", "--eval-every", "4", "--save", straight]) == 0
    before, _, after = losses(capsys.readouterr().out)
    assert after < before
    assert train_gpt.main([*TINY, *mode, "--steps", "4", "--save", half]) == 0
    assert train_gpt.main([*TINY, *mode, "--steps", "8", "--save", resumed, "--resume", half]) == 0
    one, other = (torch.load(path, weights_only=True)["model"] for path in (straight, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("options", "said"),
                         [("--lr 0", "argument --lr: expected more than 0, and finite; found 0"),
                          ("--width 10 --heads 4", "width must be a multiple of heads; found width 10 and 4 heads"),
                          ("--resume nowhere.pt", "--resume nowhere.pt: no such file")])
def test_options_that_make_no_run_are_refused_in_one_line(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        train_gpt.main(options.split())
    found = capsys.readouterr().err
    assert ended.value.code == 2 and said in found and found.count("\n") == 1


@gloo
@pytest.mark.thorough
def test_two_processes_train_to_the_losses_of_one(script, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()  # All of the text, as in the processes.
    words = "--steps 3 --eval-every 3 --batch 64 --chunks 2 --context 128 --width 16 --heads 2 --layers 2".split()
    words += ["--lr", "0.1", "--schedule", "v-half"]
    here, there = tmp_path / "one.pt", tmp_path / "two.pt"
    assert train_gpt.main([*words, "--save", str(here)]) == 0
    one = losses(capsys.readouterr().out)
    two = losses(torchrun(*TWO, "benchmarks/train_gpt.py", *words, "--save", str(there)))
    assert two == pytest.approx(one, abs=2e-4) and len(two) == 2
    assert torch.load(there, weights_only=True)["step"] == 3


@gloo
@pytest.mark.thorough
def test_layers_that_processes_share_have_the_gradients_of_one() -> None:
    printed = torchrun(*TWO, "benchmarks/train_parallel.py", "--steps", "2", "--check", "--schedule", "zb-v")
    found = re.search(r"largest difference between gradients: (\S+)", printed)
    assert found is not None and float(found[1]) <= 1e-6, printed
