"""train_gpt.py under torchrun: two processes train to what one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.test_train_gpt import ROOT, losses, refusal
from tests.benchmarks.test_train_gpt import script as script

TINY = "--steps 3 --eval-every 3 --batch 4 --chunks 2 --context 16 --width 16 --heads 2 --layers 2 --lr 0.1".split()
RUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def printed(options: list[str], launcher: list[str]) -> str:
    """What the script says, started in processes of its own."""
    command = [sys.executable, *launcher, "benchmarks/train_gpt.py", *TINY, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes_train_to_the_losses_of_one_and_leave_a_checkpoint_for_it(tmp_path: Path) -> None:
    here, there = tmp_path / "one.pt", tmp_path / "two.pt"
    one = printed(["--schedule", "v-half", "--save", str(here)], [])
    two = printed(["--schedule", "v-half", "--save", str(there)], RUN)
    assert losses(two) == pytest.approx(losses(one), abs=2e-4) and len(losses(two)) == 2
    assert "2 processes" in two.splitlines()[-1]
    first, second = (torch.load(path, weights_only=True) for path in (here, there))
    assert list(second["model"]) == list(first["model"]) and second["step"] == 3
    for name, x in first["model"].items():
        torch.testing.assert_close(second["model"][name], x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--stages 2", "--stages is not for torchrun: there are as many as processes"),
        ("--devices cpu cpu", "--devices is not for torchrun: each process takes its own"),
        ("--checkpoint always --unwrapped", "--unwrapped is not for torchrun: it is one process"),
        ("--balance time", "--balance time is not for torchrun"),
        ("--batch 5 --chunks 2", "--batch must be a multiple of --chunks; found 5 and 2"),
        ("--steps 0 --stages 2", "--steps must be 1 or more; found 0"),
    ],
)
def test_what_has_no_meaning_there_is_refused_in_one_line(script, capsys, monkeypatch, options, said):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert said in refusal(script, options.split(), capsys)
