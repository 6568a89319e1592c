"""Models of transformers on CUDA devices, drop-in and scheduled, and loaded by a device map: as on the CPU."""
from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from tests.clients.test_transformers import FAMILIES, FAMILY_WAYS, trained
from tests.clients.tiny import FOUR, MORE, Tiny

pytestmark = [pytest.mark.cuda, pytest.mark.devices(2), pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]
#: What Gemma 3n's blocks hand on is of a class of their own, which can't be run again.
WAYS = [(name, way) for name in (*FOUR, *MORE) for way in FAMILY_WAYS[name] if (name, way) != ("gemma3n", "always")]


def verify(tiny: Tiny, plain: nn.Module, model: nn.Module) -> None:
    """Two steps of the model are those of the plain one on the CPU."""
    batch = tiny.batch()
    expected, grads = trained(plain, batch)
    for _ in range(2):
        found, own = trained(model, {name: x.to("cuda:0") for name, x in batch.items()})
        for one, other in (found.loss, expected.loss), (found.logits, expected.logits), (own, grads):
            torch.testing.assert_close(one, other, check_device=False)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_model_that_is_cut_by_names(name: str, way: str) -> None:
    tiny = FAMILIES[name]
    plain = tiny.made()
    devices = [f"cuda:{number % torch.cuda.device_count()}" for number in range(len(tiny.cuts) + 1)]
    verify(tiny, plain, SplitPipe(copy.deepcopy(plain), cuts=tiny.cuts, devices=devices, chunks=2,
                                  **FAMILY_WAYS[name][way]))


@pytest.mark.parametrize("by", ["balanced", "splitpipe"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # The head of one is its own, that of the other the embedding's.
def test_a_model_that_accelerate_has_loaded(name: str, by: str, tmp_path: Path) -> None:
    tiny, plain = FOUR[name], FOUR[name].made()
    with torch.device("meta"):
        empty = tiny.made()
    plain.save_pretrained(tmp_path)
    device_map = by if by == "balanced" else splitpipe.device_map(empty)
    model = type(plain).from_pretrained(tmp_path, device_map=device_map, dtype=torch.float64).train()
    verify(tiny, plain, splitpipe.attach(model))
