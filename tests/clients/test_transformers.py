"""Models of transformers, as they are: with cuts, drop-in and scheduled, they train and generate as unwrapped."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.tiny import FOUR, HEADS, IGNORED, MORE, ROWS, VISION, Batch, Tiny, images, text

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

WAYS: dict[str, dict[str, Any]] = {
    "drop-in": {},
    "always": {"checkpoint": "always"},
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h1-always": {"schedule": "zb-h1", "checkpoint": "always"},
}
#: Two of the ways have all mechanisms.
TWO = {name: WAYS[name] for name in ("always", "zb-h1")}
FAMILIES = {**FOUR, **MORE, **HEADS}
#: Gemma 3n's blocks write to an object of a class of their own, and aren't run again.
FAMILY_WAYS = {**dict.fromkeys(MORE, TWO), **dict.fromkeys(HEADS, TWO), **dict.fromkeys(FOUR, WAYS),
               "gemma3n": {name: WAYS[name] for name in ("always", "1f1b")},
               **{f"ctc {how}": {name: {**TWO[name], "reduction": how} for name in TWO} for how in ("sum", "mean")}}
#: Models whose loss takes the number of labels of the whole batch, as Trainer gives it.
COUNTED = (*FOUR, *HEADS)


def piped(model: nn.Module, cuts: list[str], **options: Any) -> SplitPipe:
    return SplitPipe(model, cuts=cuts, devices=["cpu"] * (len(cuts) + 1), chunks=options.pop("chunks", 3), **options)


def trained(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor | None]]:
    """The output and the gradients of a step."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {name: x.grad for name, x in model.named_parameters()}


@contextmanager
def understood(warned: int = 0) -> Iterator[None]:
    """Fails unless there are this many warnings of a loss that is averaged by rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert ["reduction=" in str(w.message) for w in caught if "reduction" in str(w.message)] == [True] * warned


def same(plain: nn.Module, model: nn.Module, batch: dict[str, Any], exact: bool = False) -> None:
    """Losses of language models are in float32, where sums of other numbers of labels round otherwise."""
    close: dict[str, float] = {} if exact else {"rtol": 1e-4, "atol": 1e-6}
    (output, grads), (found, own) = trained(plain, batch), trained(model, batch)
    assert type(found) is type(output)
    torch.testing.assert_close(found.loss, output.loss, **close)
    torch.testing.assert_close(own, grads, **close)
    if hasattr(output, "logits"):
        torch.testing.assert_close(found.logits, output.logits)


def with_count(batch: Batch, kind: type = torch.as_tensor) -> dict[str, Any]:  # type: ignore[assignment]
    labels = batch.get("labels", next(iter(batch.values())))
    return {**batch, "num_items_in_batch": kind(labels.ne(IGNORED).sum())}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in FAMILIES for way in FAMILY_WAYS[name]])
def test_losses_logits_and_gradients_are_those_of_the_model(name: str, way: str) -> None:
    """Also where rows ignore different numbers of labels: three microbatches have 3, 3 and 1 rows."""
    tiny, options = FAMILIES[name], FAMILY_WAYS[name][way]
    plain = tiny.made()
    model = piped(copy.deepcopy(plain), tiny.cuts, **options)
    uneven = tiny.batch(tiny.terms > 1 and "schedule" in options)
    with understood():
        same(plain, model, uneven)
        same(plain, model, tiny.batch(), exact=name not in HEADS)
        if name in COUNTED:
            same(plain, model, with_count(uneven))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", [name for name in HEADS if HEADS[name].terms > 1])
def test_scheduled_several_terms_whose_counts_are_not_proportional_are_an_error(name: str, schedule: str) -> None:
    tiny = HEADS[name]
    model = piped(tiny.made(), tiny.cuts, schedule=schedule)
    with pytest.raises(ValueError, match="terms whose counts aren't proportional"):
        model(**tiny.batch(False))
    assert all(x.grad is None for x in model.parameters())
    trained(model, tiny.batch())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["llama", "bert classes"])
def test_the_number_of_items_may_be_a_number_of_pythons(name: str, schedule: str) -> None:
    tiny = FAMILIES[name]
    plain = tiny.made()
    model = piped(copy.deepcopy(plain), tiny.cuts, schedule=schedule)
    with understood():
        same(plain, model, with_count(tiny.batch(False), int))


@pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
def test_a_balancing_loss_of_experts_compares_rows_which_a_schedule_says_once(schedule: str | None) -> None:
    """It is exact drop-in. With a schedule, the whole loss is a mean over microbatches, which is said."""
    tiny = MORE["mixtral"]
    plain = tiny.made(output_router_logits=True, router_aux_loss_coef=0.1)
    model = piped(copy.deepcopy(plain), tiny.cuts, schedule=schedule)
    with understood(schedule is not None):
        for batch in tiny.batch(), with_count(tiny.batch()):
            expected, found = trained(plain, batch)[0], trained(model, batch)[0]
            if schedule is None or "num_items_in_batch" not in batch:
                assert found.loss.item() == pytest.approx(expected.loss.item(), rel=2e-2 if schedule else 1e-5)


@pytest.mark.filterwarnings("ignore:no accelerator is available")
@pytest.mark.parametrize("name", [*FOUR, *(name for name in MORE if name != "gemma3n")])
def test_attach_alone_cuts_every_family_between_its_blocks(name: str) -> None:
    tiny = FAMILIES[name]
    plain = tiny.made()
    model = splitpipe.attach(copy.deepcopy(plain))
    same(plain, model, tiny.batch())
    assert len(vars(model)["forward"].runtime.options.cuts) == 1


@pytest.mark.draws
@pytest.mark.parametrize("way", ["drop-in", "1f1b"])
@pytest.mark.parametrize("name", [*FOUR, *MORE])
def test_the_check_is_quiet(name: str, way: str) -> None:
    tiny = FAMILIES[name]
    found = splitpipe.check(piped(tiny.made(), tiny.cuts, **WAYS[way]), **tiny.batch())
    assert found, str(found)


@pytest.mark.parametrize("wrap", ["attach", "wrapped"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generate_gives_the_same_words(name: str, wrap: str) -> None:
    tiny = FOUR[name]
    plain = tiny.made().eval()
    ids = text()["input_ids"][:2]
    asked = {"max_new_tokens": 5, "do_sample": False}
    model: Any = copy.deepcopy(plain)
    if wrap == "attach":
        model = splitpipe.attach(model, tiny.cuts, devices=["cpu"] * (len(tiny.cuts) + 1), chunks=2)
    else:
        model = piped(model, tiny.cuts, chunks=2)
    for beams in 1, 2:
        assert torch.equal(model.generate(ids, num_beams=beams, **asked), plain.generate(ids, num_beams=beams, **asked))


@pytest.mark.draws
@pytest.mark.parametrize("way", ["drop-in", "zb-h1"])
@pytest.mark.parametrize(("name", "dropout"), [
    ("llama", "attention_dropout"), ("gpt2", "resid_pdrop"), ("bert", "hidden_dropout_prob"), ("t5", "dropout_rate"),
])
def test_the_models_own_gradient_checkpointing_changes_nothing_dropout_included(name, dropout, way):
    tiny = FOUR[name]
    plain, batch = tiny.made(**{dropout: 0.3}), tiny.batch()
    model, other = (piped(copy.deepcopy(plain), tiny.cuts, checkpoint="never", **WAYS[way]) for _ in range(2))
    other.gradient_checkpointing_enable()
    other.train()
    for seed in range(2):  # In a first call, and in threads.
        torch.manual_seed(seed)
        output, grads = trained(model, batch)
        torch.manual_seed(seed)
        found, own = trained(other, batch)
        torch.testing.assert_close(found.loss, output.loss)
        torch.testing.assert_close(own, grads)


CLIP = {"text_config": {**FOUR["llama"].arguments, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 16}


@pytest.mark.parametrize(("tower", "field"), [("text", "text_embeds"), ("vision", "image_embeds")])
def test_a_tower_of_clip_runs(tower: str, field: str) -> None:
    name = tower.capitalize()
    tiny = Tiny(f"CLIP{name}ModelWithProjection", f"CLIP{name}Config", CLIP[f"{tower}_config"], [
        f"{tower}_model.encoder.layers.{number}" for number in (1, 3)
    ])
    plain = tiny.made(projection_dim=16)
    batch = text() if tower == "text" else images()
    del batch["labels"]
    model = piped(copy.deepcopy(plain), tiny.cuts)
    found = [each(**batch)[field] for each in (plain, model)]
    torch.testing.assert_close(*found)
    for output in found:
        output.sin().sum().backward()
    torch.testing.assert_close([x.grad for x in model.parameters()], [x.grad for x in plain.parameters()])
    assert found[0].shape == (ROWS, 16)
