"""The promise for random models: whatever the layers, forwards, cuts, schedules and steps, a pipeline is its module.

More of it, not the same each time: pytest tests/promise/test_properties.py --hypothesis-profile thorough --timeout 0
-o faulthandler_timeout=0 (and --hypothesis-seed to repeat a run). A failing case is printed shrunk, to be pasted below
as an @example.
"""
from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, reject, settings

from tests.helpers.randomized import (
    Act,
    Case,
    Layer,
    Reference,
    Side,
    Skip,
    Step,
    chains,
    forwards,
    pipeline_of,
    sound,
    writes,
)

#: Of blocks that change lists of their caller, on a later stage or checkpointed.
CHANGED = "a block changed a list or dict"
#: What a write to a kept value may be refused with: another has the same memory, or a block is run again with it.
REFUSED = "another value from there shares its memory", "was modified in place between the forward and its recomputat"
#: Of dropout in a block that the module itself checkpoints, and that begins a stage.
INSIDE = "begins inside torch.utils.checkpoint"
#: Two blocks, called by a forward.
called = partial(Case, (Layer("linear"), Layer("linear")), chunks=2)


def share(percent: int) -> settings:
    """A part of the examples that the profile has."""
    return settings(max_examples=max(1, settings().max_examples * percent // 100), suppress_health_check=[
        HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])


def check(case: Case, reference: Reference) -> None:
    """Compares a pipeline of the case with what is right; rejects a case that is refused for its reason."""
    try:
        reference.check(Side(case, pipeline_of(case)))
    except RuntimeError as error:
        due = [CHANGED, INSIDE, *(REFUSED if writes(case) else [])] if case.acts else []
        if any(words in str(error) for words in due):
            reject()
        raise


@share(90)
@given(chains())
@example(Case(layers=(Layer("tied"), Layer("same"), Layer("tied"), Layer("same")), balance=(1, 1, 2), schedule="1f1b",
              chunks=2))
@example(Case(layers=(Layer("batchnorm"), Layer("checkpointed", inside=(Layer("linear"),))), balance=(1, 1), chunks=2,
              steps=(Step("eval grad"), Step("no grad", 3), Step()), deferred=True, schedule="zb-v", input_grad=True))
@example(Case(layers=(Layer("dict"), Layer("linear"), Layer("relu_"), Layer("integers")), balance=(1, 1, 1, 1),
              skips=(Skip(0, 2), Skip(1, 3), Skip(1, 2)), schedule="v-half", chunks=3, hooks=True))
@example(Case(layers=(Layer("linear"), Layer("linear")), balance=(1, 1), schedule="1f1b", chunks=2,
              steps=(Step("retained"),)))
@example(Case(layers=(Layer("total"), Layer("linear"), Layer("batchnorm"), Layer("linear")), balance=(2, 2), chunks=2,
              checkpoint="always"))
@example(Case(layers=(Layer("queries"),), balance=(1,), chunks=2, steps=(Step("no grad", 2),)))
@example(Case(layers=(Layer("tuple"), Layer("queries")), balance=(2,), chunks=2, steps=(Step(rows=2),)))
@example(Case(layers=(Layer("twice"),), balance=(1,), steps=(Step("eval", 1),), input_grad=True))
@example(Case(layers=(Layer("views"),), balance=(1,), steps=(Step("eval", 1),), input_grad=True))
def test_a_random_sequential_is_its_module(case: Case) -> None:
    if not sound(case):
        reject()
    check(case, Reference(case))


@share(100)
@given(forwards())
@example(called(acts=(Act("part"),), cuts=("part.blocks.1",)))
@example(called(acts=(Act("call dataclass"), Act("call dataclass", 1)), cuts=("blocks.1",), schedule="1f1b",
                checkpoint="always"))
@example(called(acts=(Act("call"), Act("sometimes", 1)), cuts=("blocks.0", "blocks.1"), schedule="1f1b",
                output="dataclass"))
@example(called(acts=(Act("checkpoint"), Act("checkpoint", 1)), cuts=("blocks.1",), schedule="zb-h1"))
@example(called(acts=(Act("call"), Act("in training", 1)), steps=(Step("eval"), Step())))
def test_a_random_forward_is_its_module(case: Case) -> None:
    if not sound(case):
        reject()
    check(case, Reference(case))


@pytest.mark.draws
@share(57)
@given(chains(more=("dropout",) * 12) | forwards(more=("dropout",) * 12))
@example(Case(layers=(Layer("checkpointed", inside=(Layer("linear"), Layer("dropout"), Layer("scale"))),) * 4,
              balance=(1, 1, 1, 1), schedule="zb-v", chunks=8, steps=(Step(rows=16),) * 4, checkpoint="never"))
@example(Case(layers=(Layer("dropout"), Layer("linear")), balance=(1, 1), chunks=2, checkpoint="always"))
@example(Case(layers=(Layer("dropout"),), acts=(Act("call"), Act("part"), Act("call keyword", 1)), chunks=2,
              cuts=("blocks.0", "part.blocks.0"), steps=(Step("no grad", 1), Step(rows=6))))
@pytest.mark.thorough
def test_random_masks_are_the_same_from_one_seed_and_in_recomputation(case: Case) -> None:
    if not sound(case) or case.acts and writes(case):
        reject()
    # By cuts each block that is checkpointed draws its own.
    other = pipeline_of(case) if case.acts else pipeline_of(case, plain=True, checkpoint="never")
    check(case, Reference(case, other))
