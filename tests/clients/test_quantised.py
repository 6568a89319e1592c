"""LoRA over quantised weights, of bitsandbytes, torchao and HQQ: losses and gradients are those of the plain model."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from tests.clients.test_peft import LLAMA, adapted

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("default")]

WAYS: dict[str, dict[str, Any]] = {
    "drop-in": {}, "always": {"checkpoint": "always"}, "1f1b": {"schedule": "1f1b"}, "zb-h1": {"schedule": "zb-h1"},
    "zb-h1-always": {"schedule": "zb-h1", "checkpoint": "always"},
}


def by_bitsandbytes(model: nn.Module, bits: int) -> None:
    """As ``BitsAndBytesConfig`` has it: of another class is each linear layer but the head."""
    bnb: Any = pytest.importorskip("bitsandbytes")

    def made(layer: nn.Linear) -> nn.Module:
        size = layer.in_features, layer.out_features, layer.bias is not None
        other = (
            bnb.nn.Linear4bit(*size, compute_dtype=torch.float32, quant_type="nf4") if bits == 4
            else bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
        )
        other.load_state_dict(layer.state_dict())
        quantised: nn.Module = other.to("cpu")
        return quantised

    exchange(model, made)


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


def exchange(model: nn.Module, made: Any) -> None:
    """Puts another layer in the place of each linear one within blocks."""
    for part in [*model.get_submodule("model").modules()]:
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, made(child))


KINDS: dict[str, tuple[Any, int]] = {
    "bitsandbytes-4": (by_bitsandbytes, 4), "bitsandbytes-8": (by_bitsandbytes, 8), "torchao-8": (by_torchao, 8),
    "torchao-4": (by_torchao, 4), "hqq-4": (by_hqq, 4),
}


@pytest.mark.parametrize(("kind", "way"), [
    *(("bitsandbytes-4", way) for way in WAYS), *((kind, way) for kind in [*KINDS][1:] for way in ("always", "zb-h1")),
])
def test_adapters_over_quantised_weights_train_as_in_the_plain_model(kind: str, way: str) -> None:
    quantise, bits = KINDS[kind]
    base = LLAMA.made().float()
    quantise(base, bits)
    plain = adapted(base, torch.float32)
    model = splitpipe.attach(
        copy.deepcopy(plain), [f"base_model.model.{cut}" for cut in LLAMA.cuts], devices=["cpu"] * 3, chunks=2,
        **WAYS[way],
    )
    batch = LLAMA.batch()
    for _ in range(2):
        expected, found = plain(**batch), model(**batch)
        expected.loss.backward()
        found.loss.backward()
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits)
    grads = [x.grad for x in plain.parameters()]
    assert sum(grad is not None for grad in grads) == 2 * 3 * 4
    torch.testing.assert_close([x.grad for x in model.parameters()], grads)
