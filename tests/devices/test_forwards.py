"""Random forwards on several devices: by cuts a pipeline over three of them is its module on the CPU."""
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, reject, settings

from tests.helpers.randomized import Layer, Step
from tests.helpers.randomized_models import kinds
from tests.helpers.scripted import CALLS, SOMETIMES, Act, Scene, scenes
from tests.helpers.scripted_runs import Party, check, pipeline_of, sound, writes
from tests.promise.test_forwards import REFUSED

#: Blocks with a tensor that is neither parameter nor buffer: their module itself could not go to a device.
UNMOVED = {"closure"}
BOTH = "blocks.0", "blocks.1"


def twice(scene: Scene) -> set[int]:
    """The blocks that are called more than once, and so may be on several devices."""
    called = Counter(act.which % len(scene.blocks) for act in scene.acts if act.kind in CALLS + SOMETIMES)
    return {number for number, count in called.items() if count > 1}


def again(scene: Scene) -> bool:
    """True if the module checkpoints one of them itself."""
    return any(act.kind == "checkpoint" and act.which % len(scene.blocks) in twice(scene) for act in scene.acts)


def made(scene: Scene) -> bool:
    """True if one of them makes parameters in its forward, which are on the device of the first call then."""
    return any(kind.startswith("make ") for number in twice(scene) for kind in kinds([scene.blocks[number]]))


@pytest.mark.cuda
@pytest.mark.devices(3)
@pytest.mark.thorough
# Of as many rows by chance, and in the first call.
@pytest.mark.filterwarnings("ignore:the forward left .* a tensor of:UserWarning")
@pytest.mark.filterwarnings("ignore:.* named in cuts=, and not called:UserWarning")
@settings(max_examples=60, suppress_health_check=[*HealthCheck])
@given(scenes())
@example(Scene((Layer("linear"), Layer("lstm")), (Act("call"), Act("call", 1)), BOTH, flat=False))
@example(Scene((Layer("total"),), (Act("call"), Act("total")), BOTH[:1], steps=(Step(rows=2),), flat=False))
def test_random_forwards_on_several_devices_are_their_modules(scene: Scene) -> None:
    if any(act.kind == "autocast" for act in scene.acts):  # Which is the CPU's.
        reject()
    if kinds(scene.blocks) & UNMOVED or made(scene) or not sound(scene):
        reject()
    try:
        check(scene, Party(scene, pipeline_of(scene, "cuda")))
    except RuntimeError as error:
        if writes(scene) and any(words in str(error) for words in REFUSED):
            reject()
        if "which has a copy for the time of a call" in str(error):  # A buffer that several devices write to.
            reject()
        if again(scene) and "have different metadata than during the forward" in str(error):
            reject()
        raise
