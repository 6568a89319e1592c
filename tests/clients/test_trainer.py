"""transformers.Trainer on models in place and wrapped: train, evaluate, save and resume as on the unwrapped model."""
from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.tiny import FOUR, WORDS

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

STEPS, SAVED = 4, 2
LLAMA = FOUR["llama"]
PIPE: dict[str, Any] = {"cuts": LLAMA.cuts, "devices": ["cpu"] * 3, "chunks": 2}
WAYS: dict[str, Any] = {
    "attach": lambda model: splitpipe.attach(model, **PIPE),
    "attach-1f1b": lambda model: splitpipe.attach(model, schedule="1f1b", **PIPE),
    "wrapped": lambda model: SplitPipe(model, **PIPE),
    "wrapped-zb-h1": lambda model: SplitPipe(model, schedule="zb-h1", **PIPE),
}
#: bfloat16 rounds sums of fewer rows otherwise.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-5), "accumulation": ({"gradient_accumulation_steps": 2}, 1e-5),
    "own checkpointing": ({"gradient_checkpointing": True}, 1e-5), "bf16": ({"bf16": True}, 5e-2),
}


def model() -> nn.Module:
    return LLAMA.made().float()


def rows(number: int) -> list[dict[str, Tensor]]:
    """Rows whose labels are not equally many, so that a mean of means is not the mean."""
    ids = torch.randint(4, WORDS - 4, (number, 8), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[::3, 3:] = -100
    return [{"input_ids": x, "labels": y, "unknown": x} for x, y in zip(ids, labels)]


def trained(module: nn.Module, folder: Path, resumed: bool = False, **options: Any) -> list[dict[str, float]]:
    """What the Trainer logs of each step, and its evaluation at the end."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, save_steps=SAVED,
        report_to=[], seed=5, learning_rate=1e-2, disable_tqdm=True, eval_strategy="steps", eval_steps=STEPS,
        label_names=["labels"], **options,
    )
    trainer = Trainer(module, arguments, train_dataset=rows(24), eval_dataset=rows(7))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resumed else None)
    names = "loss", "grad_norm", "eval_loss"
    return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history[:-1]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_norms_are_those_of_the_unwrapped_model_and_of_a_resumed_run(
    way: str, case: str, tmp_path: Path
) -> None:
    options, close = CASES[case]
    expected = trained(model(), tmp_path / "plain", **options)
    found = trained(WAYS[way](model()), tmp_path / "piped", **options)
    assert [[*log] for log in found] == [["loss", "grad_norm"]] * STEPS + [["eval_loss"]]
    assert found == [pytest.approx(log, rel=close) for log in expected]
    again = trained(WAYS[way](model()), tmp_path / "piped", resumed=True, **options)
    assert again == [pytest.approx(log, rel=close) for log in found]


@pytest.mark.parametrize("way", WAYS)
def test_the_signature_is_the_modules_by_which_columns_are_chosen(way: str) -> None:
    assert inspect.signature(WAYS[way](model()).forward) == inspect.signature(model().forward)


def test_what_trainer_has_saved_is_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own = WAYS["attach"](model())
    trained(own, tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    torch.testing.assert_close(plain.state_dict(), own.state_dict())
