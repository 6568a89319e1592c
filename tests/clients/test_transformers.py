"""Models of transformers, as they are: by cuts, drop-in and by schedules, they train and generate as unwrapped."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.tiny import FOUR, MORE, ROWS, VISION, Tiny, images, text
from tests.helpers.covering import graded

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


def piped(model: nn.Module, cuts: list[str], **options: Any) -> SplitPipe:
    return SplitPipe(model, cuts=cuts, devices=["cpu"] * (len(cuts) + 1), chunks=options.pop("chunks", 2), **options)


def trained(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor | None]]:
    """The output and the gradients of a step."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {name: x.grad for name, x in model.named_parameters()}


def verify(tiny: Tiny, options: dict[str, Any], **more: Any) -> None:
    plain, batch = tiny.made(), tiny.batch()
    model = piped(copy.deepcopy(plain), tiny.cuts, **options, **more)
    output, grads = trained(plain, batch)
    for _ in range(2):
        found, own = trained(model, batch)
        assert type(found) is type(output)
        torch.testing.assert_close(found.loss, output.loss)
        torch.testing.assert_close(found.logits, output.logits)
        torch.testing.assert_close(own, grads)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FOUR)
def test_four_models_have_their_losses_logits_and_gradients_in_all_ways(name: str, way: str) -> None:
    verify(FOUR[name], WAYS[way], chunks=4)  # Rows 2, 2, 2: fewer than asked for.


@graded({"way": [*TWO], "name": [name for name in MORE if name != "gemma3n"]}, [["way"], ["name"]])
def test_other_families_have_them_too(name: str, way: str) -> None:
    verify(MORE[name], TWO[way])


@pytest.mark.filterwarnings("ignore:no accelerator is available")
@pytest.mark.parametrize("name", [*FOUR, *(name for name in MORE if name != "gemma3n")])
def test_attach_alone_cuts_every_family_between_its_blocks(name: str) -> None:
    tiny = {**FOUR, **MORE}[name]
    plain, batch = tiny.made(), tiny.batch()
    model = splitpipe.attach(copy.deepcopy(plain))
    output, grads = trained(plain, batch)
    found, own = trained(model, batch)
    torch.testing.assert_close(found.loss, output.loss)
    torch.testing.assert_close(own, grads)
    assert len(vars(model)["forward"].runtime.options.cuts) == 1


def test_an_object_of_its_own_class_that_blocks_write_to_crosses_where_nothing_is_run_again() -> None:
    verify(MORE["gemma3n"], {"schedule": "1f1b"})
    plain, batch = MORE["gemma3n"].made(), MORE["gemma3n"].batch()
    with pytest.raises(TypeError, match="KVSharingDict, which can't be split"):
        piped(plain, MORE["gemma3n"].cuts, checkpoint="always")(**batch)


@pytest.mark.parametrize("wrap", ["attach", "wrapped"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generate_gives_the_same_words(name: str, wrap: str) -> None:
    tiny = FOUR[name]
    plain = tiny.made().eval()
    ids = text()["input_ids"][:2]
    asked = {"max_new_tokens": 5, "do_sample": False}
    expected = plain.generate(ids, **asked)
    model: Any = copy.deepcopy(plain)
    if wrap == "attach":
        model = splitpipe.attach(model, tiny.cuts, devices=["cpu"] * (len(tiny.cuts) + 1), chunks=2)
    else:
        model = piped(model, tiny.cuts)
    assert torch.equal(model.generate(ids, **asked), expected)
    assert torch.equal(model.generate(ids, num_beams=2, **asked), plain.generate(ids, num_beams=2, **asked))


@pytest.mark.parametrize("way", ["drop-in", "zb-h1"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_the_models_own_gradient_checkpointing_changes_nothing_dropout_included(name: str, way: str) -> None:
    tiny = FOUR[name]
    drops = {
        "llama": {"attention_dropout": 0.3}, "gpt2": {"resid_pdrop": 0.3}, "bert": {"hidden_dropout_prob": 0.3},
        "t5": {"dropout_rate": 0.3},
    }
    plain, batch = tiny.made(**drops[name]), tiny.batch()
    model, other = (
        piped(copy.deepcopy(plain), tiny.cuts, checkpoint="never", **WAYS[way]) for _ in range(2)
    )
    other.gradient_checkpointing_enable()
    other.train()
    for seed in range(3):
        torch.manual_seed(seed)
        output, grads = trained(model, batch)
        torch.manual_seed(seed)
        found, own = trained(other, batch)
        torch.testing.assert_close(found.loss, output.loss)
        torch.testing.assert_close(own, grads)


CLIP = {"text_config": {**FOUR["llama"].arguments, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 16}


def test_logits_that_compare_rows_with_each_other_are_refused_with_the_reason() -> None:
    clip = Tiny("CLIPModel", "CLIPConfig", CLIP, ["vision_model.encoder.layers.1", "text_model.encoder.layers.1"])
    words, pixels = text(), images()
    batch = {"input_ids": words["input_ids"], "pixel_values": pixels["pixel_values"]}
    plain = clip.made()
    with pytest.raises(ValueError, match="each row is compared with all others, as in a contrastive loss"):
        piped(copy.deepcopy(plain), clip.cuts, chunks=4)(**{name: x[:5] for name, x in batch.items()})
    model = piped(copy.deepcopy(plain), clip.cuts, chunks=1)
    torch.testing.assert_close(model(**batch).logits_per_text, plain(**batch).logits_per_text)


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_a_tower_of_clip_runs(tower: str) -> None:
    name = tower.capitalize()
    tiny = Tiny(f"CLIP{name}ModelWithProjection", f"CLIP{name}Config", CLIP[f"{tower}_config"], [
        f"{tower}_model.encoder.layers.{number}" for number in (1, 3)
    ])
    plain = tiny.made(projection_dim=16)
    batch = text() if tower == "text" else images()
    del batch["labels"]
    model = piped(copy.deepcopy(plain), tiny.cuts)
    field = f"{tower}_embeds" if tower == "text" else "image_embeds"
    found = [each(**batch)[field] for each in (plain, model)]
    torch.testing.assert_close(*found)
    for made in found:
        made.sin().sum().backward()
    torch.testing.assert_close(
        [x.grad for x in model.parameters()], [x.grad for x in plain.parameters()]
    )
    assert found[0].shape == (ROWS, 16)
