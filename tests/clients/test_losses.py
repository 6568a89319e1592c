"""Models of transformers have the loss of the batch, where rows ignore different numbers of labels.

Direct, and trained by transformers' Trainer with SGD: what AdamW makes of a gradient does not show a factor in it.
"""
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.tiny import BART, DECODER, ENCODER, FOUR, MORE, VISION, WORDS, Tiny, at
from tests.helpers.covering import graded

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

#: Microbatches have 3, 3 and 1 rows.
ROWS, CHUNKS, LENGTH, IGNORED = 7, 3, 8, -100
Batch = dict[str, Tensor]


def words(even: bool = False) -> Tensor:
    return torch.randint(4, WORDS - 4, (ROWS, LENGTH))


def some(labels: Tensor, even: bool) -> Tensor:
    """Labels of which rows ignore different numbers, and the second microbatch all; or each row ignores two."""
    if even:
        labels[:, 3:5] = IGNORED
    else:
        labels[0, 2:] = IGNORED
        labels[2, 5:] = IGNORED
        labels[3:6] = IGNORED
        labels[6, 1:4] = IGNORED
    return labels


def text(even: bool) -> Batch:
    ids = words()
    mask = torch.ones_like(ids)
    mask[2, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": some(ids.clone(), even)}


def tagged(even: bool) -> Batch:
    return {"input_ids": words(), "labels": some(torch.randint(3, (ROWS, LENGTH)), even)}


def classes(even: bool) -> Batch:
    labels = torch.randint(3, (ROWS,))
    if not even:
        labels[[1, 3, 4, 5]] = IGNORED
    return {"input_ids": words(), "labels": labels}


def numbers(even: bool) -> Batch:
    return {"input_ids": words(), "labels": torch.randn(ROWS).double()}


def several(even: bool) -> Batch:
    return {"input_ids": words(), "labels": torch.randint(2, (ROWS, 3)).double()}


def answers(even: bool) -> Batch:
    """Where answers begin and end; a place behind the last word is ignored."""
    start, end = torch.randint(LENGTH, (2, ROWS))
    if not even:
        start[[0, 3, 4, 5]] = LENGTH + 1
        end[[1, 2]] = LENGTH + 1
    return {"input_ids": words(), "start_positions": start, "end_positions": end}


def sentences(even: bool) -> Batch:
    return {**text(even), "next_sentence_label": torch.randint(2, (ROWS,))}


def pictures(even: bool) -> Batch:
    labels = torch.randint(3, (ROWS,))
    if not even:
        labels[[1, 3, 4, 5]] = IGNORED
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16).double(), "labels": labels}


def patches(even: bool) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16).double(), "noise": torch.rand(ROWS, 16).double()}


def sounds(even: bool) -> Batch:
    labels = torch.randint(1, 31, (ROWS, 5))
    labels[::2, 2:] = IGNORED
    labels[4 if even else slice(3, 6)] = IGNORED
    return {"input_values": torch.randn(ROWS, 400).double(), "labels": labels}


class Family(NamedTuple):
    """A tiny model, its batch, and whether its loss has terms whose counts differ between uneven microbatches."""

    tiny: Tiny
    batch: Callable[[bool], Batch]
    terms: int = 1


def bert(name: str, batch: Callable[[bool], Batch], terms: int = 1, **more: Any) -> Family:
    return Family(Tiny(f"BertFor{name}", "BertConfig", {**ENCODER, **more}, at("bert.encoder.layer")), batch, terms)


def ctc(reduction: str) -> Family:
    arguments = {**MORE["wav2vec2"].arguments, "ctc_loss_reduction": reduction, "pad_token_id": 0, "final_dropout": 0.0}
    return Family(Tiny("Wav2Vec2ForCTC", "Wav2Vec2Config", arguments, at("wav2vec2.encoder.layers")), sounds)


FAMILIES = {
    "llama": Family(FOUR["llama"], text),
    "gpt2": Family(FOUR["gpt2"], text),
    "t5": Family(FOUR["t5"], text),
    "bart": Family(Tiny("BartForConditionalGeneration", "BartConfig", {**BART, "max_position_embeddings": 64}, [
        "model.encoder.layers.1", "model.decoder.layers.0"]), text),
    "llama classes": Family(Tiny("LlamaForSequenceClassification", "LlamaConfig", {
        **DECODER, "num_labels": 3, "pad_token_id": 0}, at("model.layers")), classes),
    "bert classes": bert("SequenceClassification", classes, num_labels=3),
    "bert regression": bert("SequenceClassification", numbers, num_labels=1),
    "bert several labels": bert(
        "SequenceClassification", several, num_labels=3, problem_type="multi_label_classification"),
    "bert masked": bert("MaskedLM", text),
    "bert tokens": bert("TokenClassification", tagged, num_labels=3),
    "bert answers": bert("QuestionAnswering", answers, terms=2),
    "bert pretraining": bert("PreTraining", sentences, terms=2),
    "distilbert": Family(Tiny("DistilBertForSequenceClassification", "DistilBertConfig", {
        "vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4, "num_labels": 3, "dropout": 0.0,
        "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "max_position_embeddings": 64,
    }, at("distilbert.transformer.layer")), classes),
    "vit": Family(Tiny("ViTForImageClassification", "ViTConfig", {
        **VISION, "num_labels": 3}, at("vit.layers")), pictures),
    "vit mae": Family(Tiny("ViTMAEForPreTraining", "ViTMAEConfig", {
        **VISION, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16,
    }, ["vit.layers.2", "decoder.decoder_layers.1"]), patches),
    "ctc sum": ctc("sum"),
    "ctc mean": ctc("mean"),
}
ONE = [name for name, family in FAMILIES.items() if family.terms == 1]
MORE_TERMS = [name for name, family in FAMILIES.items() if family.terms > 1]
SCHEDULES = ["1f1b", "zb-h1"]
#: With Trainer's argument and without; as a number for a few.
ITEMS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "without": lambda labels: {},
    "items": lambda labels: {"num_items_in_batch": labels.ne(IGNORED).sum()},
    "items as a number": lambda labels: {"num_items_in_batch": int(labels.ne(IGNORED).sum())},
}


def piped(model: nn.Module, family: Family, schedule: str, **options: Any) -> SplitPipe:
    cuts = family.tiny.cuts
    return SplitPipe(model, cuts=cuts, devices=["cpu"] * (len(cuts) + 1), chunks=CHUNKS, schedule=schedule, **options)


@contextmanager
def said(count: int) -> Iterator[None]:
    """So many warnings of a loss that is not understood."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert ["reduction=" in str(w.message) for w in caught if "reduction" in str(w.message)] == [True] * count


def given(family: Family, even: bool, items: str = "without") -> dict[str, Any]:
    batch = family.batch(even)
    return {**batch, **ITEMS[items](batch.get("labels", batch[next(iter(batch))]))}


def step(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    loss = model(**batch).loss
    (2 * loss).backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def assert_close(found: Any, expected: Any) -> None:
    """Losses of language models are in float32."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def verify(name: str, schedule: str, items: str, evens: tuple[bool, ...]) -> None:
    family = FAMILIES[name]
    plain = family.tiny.made()
    model = piped(copy.deepcopy(plain), family, schedule)
    with said(0):
        for even in evens:
            batch = given(family, even, items)
            assert_close(step(model, batch), step(plain, batch))


@graded({"name": [*FAMILIES], "items": ["without", "items"]}, [["name"], ["items"]])
def test_drop_in_the_loss_and_gradients_are_those_of_the_batch(name: str, items: str) -> None:
    verify(name, "gpipe", items, (False, True, False))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert classes", "bert masked"])
def test_the_number_of_items_may_be_a_number_of_pythons(name: str, schedule: str) -> None:
    verify(name, schedule, "items as a number", (True, False))


@pytest.mark.parametrize(("schedule", "items"), [*zip(SCHEDULES, ["without", "items"])])
@pytest.mark.parametrize("name", ONE)
def test_scheduled_they_are_so_for_a_loss_of_one_term(name: str, schedule: str, items: str) -> None:
    verify(name, schedule, items, (True, False))


@pytest.mark.parametrize(("schedule", "items"), [*zip(SCHEDULES, ["items", "without"])])
@pytest.mark.parametrize("name", MORE_TERMS)
def test_scheduled_several_terms_are_exact_if_counts_are_proportional_else_an_error(
    name: str, schedule: str, items: str
) -> None:
    verify(name, schedule, items, (True, True))
    family = FAMILIES[name]
    model = piped(family.tiny.made(), family, schedule)
    with pytest.raises(ValueError, match="count") as error:
        model(**given(family, False, items))
    assert "cross_entropy" in str(error.value)
    assert all(x.grad is None for x in model.parameters())
    step(model, given(family, True, items))


ROUTED = Family(MORE["mixtral"], text)


@pytest.mark.parametrize("items", ["without", "items"])
@pytest.mark.parametrize("schedule", ["gpipe", *SCHEDULES])
def test_a_balancing_loss_of_experts_compares_rows_which_is_said_once(schedule: str, items: str) -> None:
    """It is a mean over microbatches; the other term stays exact."""
    plain = ROUTED.tiny.made(output_router_logits=True, router_aux_loss_coef=0.1)
    model = piped(copy.deepcopy(plain), ROUTED, schedule)
    with said(1):
        for _ in range(2):
            batch = given(ROUTED, True, items)
            assert step(model, batch)[0].item() == pytest.approx(step(plain, batch)[0].item(), rel=2e-2)


STEPS = 3
#: One of each kind of loss.
BY_TRAINER = ["llama", "t5", "llama classes", "bert classes", "bert regression", "bert masked", *MORE_TERMS[:1]]
WAYS = {"attach": "gpipe", "attach-1f1b": "1f1b", "attach-zb-h1": "zb-h1"}


def rows(family: Family, even: bool) -> list[Batch]:
    torch.manual_seed(3)
    batches = [family.batch(even) for _ in range(STEPS)]
    return [{name: x[i] for name, x in batch.items()} for batch in batches for i in range(ROWS)]


def trained(model: nn.Module, family: Family, even: bool, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Parameters after some steps; rows come in their order, so that microbatches are those of the batches above."""
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return None

    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=ROWS, report_to=[], seed=5,
        disable_tqdm=True, save_strategy="no", optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        max_grad_norm=0.0, **options,
    )
    InOrder(model, arguments, train_dataset=rows(family, even)).train()
    return {name: x.detach() for name, x in model.named_parameters()}


def verify_trainer(name: str, ways: Iterable[str], even: bool, folder: Path, **options: Any) -> None:
    family = FAMILIES[name]
    plain = family.tiny.made()
    start = {key: x.detach().clone() for key, x in plain.named_parameters()}
    cuts = family.tiny.cuts
    devices = ["cpu"] * (len(cuts) + 1)
    models = [splitpipe.attach(copy.deepcopy(plain), cuts, devices=devices, chunks=CHUNKS, schedule=WAYS[way])
              for way in ways]
    expected = trained(plain, family, even, folder, **options)
    for model in models:
        with said(0):
            found = trained(model, family, even, folder, **options)
        assert_close(found, expected)
    moved = [(expected[key] - x).abs().max().item() for key, x in start.items()]
    assert max(moved) > 1e-3, "parameters that don't move show nothing"


@pytest.mark.parametrize("name", BY_TRAINER)
def test_trainer_with_sgd_leaves_the_parameters_of_the_unwrapped_model(name: str, tmp_path: Path) -> None:
    scheduled = "attach-zb-h1" if [*BY_TRAINER].index(name) % 2 else "attach-1f1b"
    if name in MORE_TERMS:  # By a schedule of equal counts alone.
        verify_trainer(name, ["attach"], False, tmp_path)
        verify_trainer(name, [scheduled], True, tmp_path)
    else:
        verify_trainer(name, ["attach", scheduled], False, tmp_path)


@pytest.mark.parametrize("name", ["llama", "bert classes", "bert masked"])
def test_trainer_that_accumulates_leaves_them_too(name: str, tmp_path: Path) -> None:
    verify_trainer(name, WAYS, False, tmp_path, gradient_accumulation_steps=3)
