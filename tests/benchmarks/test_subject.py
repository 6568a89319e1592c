"""What the benchmarks train: the same every time, and cut the same for everyone."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]

models = pytest.mark.parametrize("model", ["gpt", "resnet101", "unet", "amoebanet"])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("subject")


def tiny(script: ModuleType, model: str = "gpt") -> Any:
    return script.Subject(model, "tiny", 4)


@models
def test_a_model_says_whether_it_has_batch_norm(script, model):
    what = tiny(script, model)
    assert what.its.normed == any(isinstance(layer, nn.BatchNorm2d) for layer in script.case(what).layers.modules())


def test_stages_share_the_blocks_evenly(script):
    it = script.case(tiny(script))
    assert (it.balance(2), it.balance(4)) == ([3, 3], [2, 1, 1, 2])
    it = script.case(script.Subject("gpt", "small", 8))
    assert (it.balance(2), it.balance(4)) == ([5, 5], [3, 2, 2, 3])


@models
def test_stages_are_the_same_for_torchgpipe(script, model):
    skip = pytest.importorskip("torchgpipe.skip", reason="needs torchgpipe to compare with")
    own, theirs = script.case(tiny(script, model)), script.case(tiny(script, model), skip)
    for stages in (2, 4):
        assert own.balance(stages) == theirs.balance(stages)
        assert sum(own.balance(stages)) == len(own.layers)


def test_no_cut_goes_through_a_block_of_a_resnet(script):
    it = script.case(tiny(script, "resnet101"))
    open_, cuts = 0, set(itertools.accumulate(it.balance(4)))
    for number, layer in enumerate(it.layers):
        assert not (open_ and number in cuts)
        open_ += len(list(getattr(layer, "stashable", list)())) - len(list(getattr(layer, "poppable", list)()))


def test_stages_are_of_equal_work(script):
    it = script.case(tiny(script, "unet"))
    work = it.subject.its.costs(it.layers, it.subject.size)
    first = it.balance(2)[0]
    sums = [abs(sum(work[:end]) - sum(work[end:])) for end in range(1, len(work))]
    assert sums[first - 1] == min(sums)


def test_work_is_multiplications(script):
    layers = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 7))
    preset = script.Preset(lambda: layers, (3, 4, 4), 1, 0.1)
    assert script.operations(layers, preset) == [16 * 5 * 27, 0, 0, 5 * 16 * 7]
    assert layers.training


@models
def test_a_case_is_the_same_every_time(script, model):
    first, second = (script.case(tiny(script, model)) for _ in range(2))
    torch.testing.assert_close(first.layers.state_dict(), second.layers.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close([first.input, first.target], [second.input, second.target], rtol=0, atol=0)
