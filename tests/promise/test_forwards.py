"""The promise for random forwards: whatever Python a module's forward is, by cuts a pipeline is its module.

More of it: pytest tests/promise/test_forwards.py --hypothesis-profile thorough --timeout 0 -o faulthandler_timeout=0.
"""
from __future__ import annotations

from hypothesis import HealthCheck, example, given, reject, settings

from tests.helpers.randomized import Layer, Step
from tests.helpers.scripted import SOMETIMES, Act, Scene, scenes
from tests.helpers.scripted_runs import Party, check, pipeline_of, sound, writes

checked = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
)
L = (Layer("linear"), Layer("linear"))
#: What a write to a kept value may be refused with: another has the same memory, or a block is run again with it.
REFUSED = "another value from there has the same memory", "was modified in place between the forward and its recomputat"


@checked
@given(scenes())
@example(Scene(L, (Act("part"),), ("part.blocks.1",)))
@example(Scene(L, (Act("call list"), Act("call nested", 1), Act("stack")), ("blocks.1",), checkpoint="always"))
@example(Scene(L, (Act("call dataclass"), Act("call dataclass", 1)), ("blocks.1",), "1f1b", checkpoint="always"))
@example(Scene(L, (Act("call"), Act("sometimes", 1)), ("blocks.0", "blocks.1"), "1f1b", output="frozen"))
@example(Scene(L, (Act("checkpoint"), Act("checkpoint", 1)), ("blocks.1",), "zb-h1", flat=False))
@example(Scene(L, (Act("call"), Act("in training", 1)), steps=(Step("eval"), Step())))
def test_a_random_forward_by_cuts_is_its_module(scene: Scene) -> None:
    if not sound(scene):
        reject()
    try:
        check(scene, Party(scene, pipeline_of(scene)))
    except RuntimeError as error:
        if writes(scene) and any(words in str(error) for words in REFUSED):
            reject()
        raise
    except UserWarning as warning:
        if any(act.kind in SOMETIMES for act in scene.acts) and "not called by the forward" in str(warning):
            reject()
        raise


@settings(checked, max_examples=max(1, settings().max_examples * 3 // 10))
@given(scenes(more=("dropout",) * 12))
def test_random_masks_of_a_forward_are_the_same_from_one_seed(scene: Scene) -> None:
    if not sound(scene) or writes(scene):
        reject()
    check(scene, Party(scene, pipeline_of(scene)), Party(scene, pipeline_of(scene)))
