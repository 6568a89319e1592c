"""transformers.Trainer on models in place and wrapped: train, evaluate, save and resume as on the unwrapped model."""
from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe
from tests.clients.tiny import FOUR, WORDS
from tests.helpers.covering import graded

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

STEPS, SAVED = 4, 2
LLAMA = FOUR["llama"]
SHORT: dict[str, Any] = {"max_steps": 2, "eval_steps": 2, "save_strategy": "no"}
PIPE: dict[str, Any] = {"cuts": LLAMA.cuts, "devices": ["cpu"] * 3, "chunks": 2}
WAYS: dict[str, Any] = {"attach": lambda model: splitpipe.attach(model, **PIPE),
                        "attach-1f1b": lambda model: splitpipe.attach(model, schedule="1f1b", **PIPE),
                        "wrapped": lambda model: SplitPipe(model, **PIPE),
                        "wrapped-zb-h1": lambda model: SplitPipe(model, schedule="zb-h1", **PIPE)}
#: bfloat16 rounds sums of fewer rows otherwise.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-5), "accumulation": ({"gradient_accumulation_steps": 2}, 1e-5),
    "own checkpointing": ({"gradient_checkpointing": True}, 1e-5), "bf16": ({"bf16": True}, 5e-2),
}


def model() -> nn.Module:
    return LLAMA.made().float()


def rows(number: int) -> list[dict[str, Tensor]]:
    """Rows whose labels are not equally many, so that a mean of means is not the mean; with a column to leave out."""
    ids = torch.randint(4, WORDS - 4, (number, 8), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[::3, 3:] = -100
    return [{"input_ids": x, "labels": y, "unknown": x} for x, y in zip(ids, labels)]


def trained(module: nn.Module, folder: Path, resumed: bool = False, loss: Any = None,
            **options: Any) -> list[dict[str, float]]:
    """What the Trainer logs of each step, and its evaluation at the end."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(folder), **{  # type: ignore[arg-type]
        "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": SAVED,
        "report_to": [], "seed": 5, "learning_rate": 1e-2, "disable_tqdm": True, "eval_strategy": "steps",
        "eval_steps": STEPS, "label_names": ["labels"], **options,
    })
    trainer = Trainer(module, arguments, train_dataset=rows(32), eval_dataset=rows(7), compute_loss_func=loss)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resumed else None)
    names = "loss", "grad_norm", "eval_loss"
    return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history[:-1]]


@cache
def expected(case: str) -> list[dict[str, float]]:
    """Of the unwrapped model."""
    with TemporaryDirectory() as folder:
        return trained(model(), Path(folder), **CASES[case][0])


@graded({"way": [*WAYS], "case": [*CASES]}, [["way"], ["case"]])
def test_losses_and_norms_are_those_of_the_unwrapped_model_and_of_a_resumed_run(way, case, tmp_path):
    options, close = CASES[case]
    found = trained(WAYS[way](model()), tmp_path / "piped", **options)
    assert [[*log] for log in found] == [["loss", "grad_norm"]] * STEPS + [["eval_loss"]]
    assert found == [pytest.approx(log, rel=close) for log in expected(case)]
    again = trained(WAYS[way](model()), tmp_path / "piped", resumed=True, **options)
    assert again == [pytest.approx(log, rel=close) for log in found]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_chunks_take_the_place_of_accumulation_steps(schedule: str, tmp_path: Path) -> None:
    expected = trained(model(), tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=16, **SHORT)
    piped = splitpipe.attach(model(), **{**PIPE, "chunks": 16}, schedule=schedule)
    found = trained(piped, tmp_path, per_device_train_batch_size=16, **SHORT)
    assert found == [pytest.approx(log, rel=1e-5) for log in expected]


@pytest.mark.parametrize("way", ["attach", "attach-1f1b"])
def test_evaluation_runs_in_microbatches(way: str, tmp_path: Path) -> None:
    piped, sizes = WAYS[way](model()), list[int]()
    piped.model.layers[0].register_forward_pre_hook(
        lambda layer, args: None if layer.training else sizes.append(len(args[0]))
    )
    trained(piped, tmp_path, per_device_eval_batch_size=4, **SHORT)
    assert sizes == [2, 2, 2, 1]


def negative_log_likelihood(output: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """What users give Trainer as ``compute_loss_func``."""
    values = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return values / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


OF_TRAINER: dict[str, dict[str, Any]] = {
    "label_smoothing_factor": {"label_smoothing_factor": 0.1}, "compute_loss_func": {"loss": negative_log_likelihood},
}


@pytest.mark.parametrize("name", OF_TRAINER)
def test_losses_that_trainer_computes_are_those_of_the_unwrapped_model(name: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, **OF_TRAINER[name], **SHORT}
    expected = trained(model(), tmp_path, **options)
    assert trained(WAYS["attach"](model()), tmp_path, **options) == [pytest.approx(log, rel=1e-5) for log in expected]


def smoothed(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def test_by_a_schedule_a_loss_function_of_the_model_takes_the_place_of_trainers(tmp_path: Path) -> None:
    expected = trained(model(), tmp_path, label_smoothing_factor=0.1, **SHORT)
    piped: Any = WAYS["attach-1f1b"](model())
    piped.loss_function = smoothed
    assert trained(piped, tmp_path, **SHORT) == [pytest.approx(log, rel=1e-5) for log in expected]


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_an_attached_model_is_saved_as_the_plain_one_is(name: str, tmp_path: Path) -> None:
    transformers, tiny = pytest.importorskip("transformers"), FOUR[name]
    plain: Any = tiny.made()
    piped: Any = splitpipe.attach(copy.deepcopy(plain), tiny.cuts, devices=["cpu"] * (len(tiny.cuts) + 1), chunks=2)
    piped(**tiny.batch())
    for each, folder in (plain, "plain"), (piped, "piped"):
        each.save_pretrained(tmp_path / folder)
    files = [{path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("plain", "piped")]
    assert files[0] == files[1] and "model.safetensors" in files[0]
    loaded = getattr(transformers, tiny.name).from_pretrained(tmp_path / "piped", dtype=torch.float64)
    assert type(loaded) is type(plain) and "forward" not in vars(loaded)
    torch.testing.assert_close(loaded.state_dict(), plain.state_dict(), rtol=0, atol=0)
