"""LoRA adapters of PEFT, over plain and quantised weights, train alone and as in the unwrapped model."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.test_transformers import WAYS
from tests.clients.tiny import FOUR

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

LLAMA = FOUR["llama"]
INNER = [f"base_model.model.{cut}" for cut in LLAMA.cuts]
PIPE: dict[str, Any] = {"devices": ["cpu"] * 3, "chunks": 2}


def adapted(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """The model with adapters whose second factors are not 0, as they would be after some steps."""
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=2, lora_dropout=0.0)
    torch.manual_seed(2)
    with_adapters = peft.get_peft_model(model, config)
    for name, x in with_adapters.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(x)
    return with_adapters.to(dtype)


def inside(model: nn.Module, **options: Any) -> Any:
    """Adapters, then cuts of the model that they are in."""
    with_adapters = adapted(model)
    splitpipe.attach(with_adapters.base_model.model, LLAMA.cuts, **PIPE, **options)
    return with_adapters


ORDERS: dict[str, Callable[..., Any]] = {
    "adapters, then attach": lambda model, **options: splitpipe.attach(adapted(model), INNER, **PIPE, **options),
    "adapters, then attach inside": inside,
    "attach, then adapters": lambda model, **options: adapted(splitpipe.attach(model, LLAMA.cuts, **PIPE, **options)),
    "SplitPipe": lambda model, **options: SplitPipe(adapted(model), cuts=INNER, **PIPE, **options),
}


def assert_trains_as(model: nn.Module, plain: nn.Module) -> None:
    """Two steps, whose gradients add up."""
    batch = LLAMA.batch()
    for _ in range(2):
        expected, found = plain(**batch), model(**batch)
        expected.loss.backward()
        found.loss.backward()
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits)
    grads = [(x.requires_grad, x.grad) for x in plain.parameters()]
    assert sum(grad is not None for _, grad in grads) == 2 * 3 * 4
    torch.testing.assert_close([(x.requires_grad, x.grad) for x in model.parameters()], grads)


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}], ids=["drop-in", "zb-h1"])
@pytest.mark.parametrize("order", ORDERS)
def test_adapters_have_the_gradients_of_the_unwrapped_model(order, options, tmp_path):
    plain = LLAMA.made()
    model = ORDERS[order](copy.deepcopy(plain), **options)
    assert_trains_as(model, adapted(plain))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


def exchange(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Puts another layer in the place of each linear one within blocks."""
    for part in [*model.get_submodule("model").modules()]:
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, make(child))


def by_bitsandbytes(model: nn.Module, bits: int) -> None:
    """As ``BitsAndBytesConfig`` has it: of another class is each linear layer but the head."""
    bnb: Any = pytest.importorskip("bitsandbytes")

    def make(layer: nn.Linear) -> nn.Module:
        size = layer.in_features, layer.out_features, layer.bias is not None
        other = (bnb.nn.Linear4bit(*size, compute_dtype=torch.float32, quant_type="nf4") if bits == 4
                 else bnb.nn.Linear8bitLt(*size, has_fp16_weights=False))
        other.load_state_dict(layer.state_dict())
        quantised: nn.Module = other.to("cpu")
        return quantised

    exchange(model, make)


def by_torchao(model: nn.Module, bits: int) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.get_submodule("model"), (
        quantization.Int8WeightOnlyConfig() if bits == 8 else
        quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(16))
    ))


def by_hqq(model: nn.Module, bits: int) -> None:
    hqq: Any = pytest.importorskip("hqq.core.quantize")
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=16)
    exchange(model, lambda layer: hqq.HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize("way", ["always", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("quantise", "bits"), [
    (by_bitsandbytes, 4), (by_bitsandbytes, 8), (by_torchao, 8), (by_torchao, 4), (by_hqq, 4),
])
def test_adapters_over_quantised_weights_train_as_in_the_plain_model(quantise, bits, way):
    base = LLAMA.made().float()
    quantise(base, bits)
    plain = adapted(base, torch.float32)
    assert_trains_as(splitpipe.attach(copy.deepcopy(plain), INNER, **PIPE, **WAYS[way]), plain)
