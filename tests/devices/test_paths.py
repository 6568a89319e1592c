"""All paths between stages and all layers, in every way: as the unwrapped module, and no access without an order."""
from __future__ import annotations

import pytest

from tests.devices.cases import CAST, COMPILED, PATHS, cast, of, wrong
from tests.promise.layers import LAYERS

pytestmark = [
    pytest.mark.cuda, pytest.mark.devices(4),
    # Of mkldnn.flags on every CPU, and of torch.compile, of what it traces.
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


@pytest.mark.parametrize("subject", [name for name in PATHS if name not in COMPILED])
def test_a_path_between_stages(subject: str) -> None:
    assert wrong(of(subject)) == {}


@pytest.mark.compiles
@pytest.mark.parametrize("subject", COMPILED)
def test_compiled_layers_between_stages(subject: str) -> None:
    assert wrong(of(subject, few=True)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_with_a_skip_past_all_stages(layer: str) -> None:
    assert wrong(of(f"layers: {layer}")) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("subject", CAST)
def test_a_layer_under_autocast(subject: str) -> None:
    assert wrong(case for case in cast() if case.subject == subject) == {}
