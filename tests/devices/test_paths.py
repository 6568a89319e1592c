"""All paths between stages and all layers, in every way: as the unwrapped module, and no access without an order."""
from __future__ import annotations

import os

import pytest

from tests.devices.cases import COMPILED, PATHS, wrong
from tests.promise.layers import LAYERS

pytestmark = [
    pytest.mark.cuda,
    # The sanitizer knows one device alone (tests/gpu/parts.py).
    pytest.mark.devices(1 if "TORCH_CUDA_SANITIZER" in os.environ else 4),
    # Of torch.compile, of what it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


@pytest.mark.parametrize("subject",
                         [pytest.param(name, marks=[pytest.mark.compiles] * (name in COMPILED)) for name in PATHS])
def test_a_path_between_stages(subject: str) -> None:
    assert wrong(subject) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_between_other_stages(layer: str) -> None:
    assert wrong(f"layers: {layer}") == {}
