"""finetune_llama.py lowers the loss and saves a model of transformers; without the library it says what to install."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import finetune_llama

TINY = "--layers 4 --width 16 --batch 4 --chunks 2 --context 16 --lr 0.02 --steps 6".split()


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("schedule", ["gpipe", "zb-v"])
def test_it_learns_and_what_it_saves_goes_on(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", minversion="5")
    train, held_out = finetune_llama.text.load()
    monkeypatch.setattr(finetune_llama.text, "load", lambda: (train, held_out[:400]))
    assert finetune_llama.main([*TINY, "--schedule", schedule, "--save", str(tmp_path)]) == 0
    before, after = map(float, re.findall(r"^held-out (\S+) -> (\S+)", capsys.readouterr().out, flags=re.M)[0])
    assert after < before
    assert finetune_llama.main([*TINY, "--steps", "1", "--pretrained", str(tmp_path)]) == 0
    again = re.findall(r"held-out (\S+) nats", capsys.readouterr().out)[0]
    assert float(again) == pytest.approx(after, abs=2e-4)


@pytest.mark.parametrize(("words", "said"), [
    ([], "needs transformers 5: python -m pip install"),
    pytest.param(["--layers", "1"], "1 layers make no 2 stages", marks=pytest.mark.thorough),
])
@pytest.mark.filterwarnings("default")
def test_what_makes_no_run_is_said_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if words:
        pytest.importorskip("transformers", minversion="5")
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit):
        finetune_llama.main(words)
    assert said in capsys.readouterr().err
