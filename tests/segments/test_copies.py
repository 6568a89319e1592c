"""An attached module, which has its pipeline as its forward, is copied and pickled with it."""
from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import splitpipe
from tests.helpers.modules import Net, batch


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_an_attached_module_is_one_of_its_own(copied: Callable[[Any], Any]) -> None:
    module = splitpipe.attach(Net().eval(), ["blocks.1"], devices=["cpu"] * 2)
    expected = module(**batch())["loss"]
    other = copied(module)
    torch.testing.assert_close(other(**batch())["loss"], expected)
    other(**batch())["loss"].backward()
    assert module.embedding.weight.grad is None and other.embedding.weight.grad is not None
