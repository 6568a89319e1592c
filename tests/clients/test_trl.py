"""trl's trainers on an attached model: SFT, DPO and GRPO, which generates, have the losses of the plain one."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from tests.clients.tiny import FOUR, WORDS

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

LLAMA = FOUR["llama"]
PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"


def words(first: int, number: int) -> str:
    """So many words of the vocabulary, others for each first one."""
    return " ".join([f"w{(7 * first + k * (first + 3)) % 60}" for k in range(number)])


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(len, set(each.split())))) for each in completions]


#: What each trainer takes beside a model, its rows, and more settings.
TRAINERS: dict[str, tuple[dict[str, Any], list[dict[str, str]], dict[str, Any]]] = {
    "SFT": ({}, [{"text": words(i, 4 + i % 4)} for i in range(16)], {}),
    "DPO": ({}, [
        {"prompt": words(i, 3), "chosen": words(i + 5, 2 + i % 3), "rejected": words(i + 9, 4)} for i in range(16)
    ], {}),
    "GRPO": ({"reward_funcs": reward}, [{"prompt": words(i, 3 + i % 2)} for i in range(16)],
             {"num_generations": 4, "max_completion_length": 5}),
}


def model(folder: Path) -> Any:
    """One that a trainer can load again, as its reference."""
    made: Any = LLAMA.made(pad_token_id=0, eos_token_id=1).float()
    made.save_pretrained(folder)
    return type(made).from_pretrained(folder)


def tokenizer() -> Any:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    vocabulary = [PAD, END, UNKNOWN, *(f"w{i}" for i in range(WORDS - 3))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


def trained(kind: str, folder: Path, **pipe: Any) -> tuple[list[dict[str, float]], set[int]]:
    """What the trainer logs of each step, and how many rows the first block has been called with in training."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    more, rows, settings = TRAINERS[kind]
    arguments = getattr(trl, f"{kind}Config")(
        str(folder), use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=4, logging_steps=1, seed=5,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2, gradient_checkpointing=False,
        **settings,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model(folder), args=arguments, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(), **more,
    )
    sizes = set[int]()

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            sizes.add(len(args[0]))

    trainer.model.model.layers[0].register_forward_pre_hook(note)
    if pipe:
        splitpipe.attach(trainer.model, LLAMA.cuts, devices=["cpu"] * 3, chunks=2, **pipe)
    trainer.train()
    names = "loss", "grad_norm", "reward"
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [{name: log[name] for name in names if name in log} for log in logs], sizes


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_losses_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    expected, whole = trained(kind, tmp_path)
    for checkpoint in "never", "always":
        found, parts = trained(kind, tmp_path, checkpoint=checkpoint)
        assert len(found) == 2 and found == [pytest.approx(log, rel=1e-4) for log in expected]
        assert {2 * size for size in parts} == whole  # Two microbatches.
