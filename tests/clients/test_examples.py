"""The examples with transformers and PEFT: they learn, and what they save fits the plain model and a later run."""
from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.doors.test_examples import Run, losses
from tests.doors.test_examples import run as run

# Looked for, not imported: that takes seconds, and only the scripts need them.
pytestmark = [
    pytest.mark.thorough, pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(None in map(find_spec, ("transformers", "peft")), reason="needs transformers and peft"),
]


def test_adapters_learn_with_trainer_and_are_saved(run: Run, tmp_path: Path) -> None:
    ((first, last),) = losses(run("lora_trainer.py", "--steps", "4", "--out", str(tmp_path)))
    assert last < first
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_a_loop_learns_and_goes_on_from_what_it_saved(run: Run, tmp_path: Path) -> None:
    half = ["--steps", "4", "--checkpoint", str(tmp_path / "saved.pt")]
    said = "".join(run("own_loop.py", *options) for options in (half, half, ["--steps", "8"]))
    (start, _), (_, resumed), straight = losses(said)
    assert (start, resumed) == pytest.approx(straight, abs=2e-4) and resumed < start
    pairs = re.findall(r"^loss of one more batch: (\S+); that of the plain model: (\S+)$", said, flags=re.MULTILINE)
    assert len(pairs) == 3
    for ours, theirs in pairs:
        assert float(ours) == pytest.approx(float(theirs), abs=2e-4)
