"""LoRA adapters of PEFT, added before the model runs by cuts or after, train alone and as in the unwrapped model."""
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.tiny import FOUR

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

LLAMA = FOUR["llama"]
PIPE: dict[str, Any] = {"devices": ["cpu"] * 3, "chunks": 2}


def adapted(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """The model with adapters whose second factors are not 0, as they would be after some steps."""
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=2, lora_dropout=0.0)
    torch.manual_seed(2)
    made = peft.get_peft_model(model, config)
    for name, x in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(x)
    return made.to(dtype)


def before(model: nn.Module, **options: Any) -> Any:
    """Adapters, then cuts in place."""
    return splitpipe.attach(adapted(model), [f"base_model.model.{cut}" for cut in LLAMA.cuts], **PIPE, **options)


def inside(model: nn.Module, **options: Any) -> Any:
    """Adapters, then cuts of the model that they are in."""
    made = adapted(model)
    splitpipe.attach(made.base_model.model, LLAMA.cuts, **PIPE, **options)
    return made


def after(model: nn.Module, **options: Any) -> Any:
    """Cuts in place, then adapters."""
    return adapted(splitpipe.attach(model, LLAMA.cuts, **PIPE, **options))


def wrapped(model: nn.Module, **options: Any) -> Any:
    """Adapters, and a SplitPipe around them."""
    return SplitPipe(
        adapted(model), cuts=[f"base_model.model.{cut}" for cut in LLAMA.cuts], **PIPE, **options
    )


@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}], ids=str)
@pytest.mark.parametrize("way", [before, inside, after, wrapped], ids=lambda way: way.__name__)
def test_adapters_have_the_gradients_of_the_unwrapped_model(way: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain, batch = LLAMA.made(), LLAMA.batch()
    model, other = way(copy.deepcopy(plain), **options), adapted(plain)
    expected = other(**batch)
    expected.loss.backward()
    found = model(**batch)
    found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits, expected.logits)
    grads = [(x.requires_grad, x.grad) for x in other.parameters()]
    assert sum(grad is not None for _, grad in grads) == 2 * 3 * 4
    torch.testing.assert_close([(x.requires_grad, x.grad) for x in model.parameters()], grads)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
