"""A module that runs by cuts in place can be copied and pickled, before its first call and after."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch

from splitpipe import attach
from tests.segments.models import Stack, batch


@pytest.mark.parametrize("called", [False, True])
def test_a_copy_is_a_pipeline_of_its_own(called: bool) -> None:
    model = attach(Stack(), cuts=["layers.1", "layers.3"], devices=["cpu"] * 3, chunks=2)
    arguments = batch()
    expected = model(**arguments)["loss"] if called else None
    for made in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert made.forward.runtime.module is made
        found = made(**arguments)["loss"]
        found.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.testing.assert_close(found, model(**arguments)["loss"] if expected is None else expected)
