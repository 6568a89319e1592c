"""Random forwards on simulated devices: by cuts a pipeline over three of them is its module on the CPU."""
from __future__ import annotations

import traceback
import warnings
from collections import Counter

from hypothesis import HealthCheck, Phase, example, given, reject, seed, settings

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


def wrong(count: int, number: int) -> list[str]:
    """What is wrong, with the scene that shows it, of so many random ones; the same for each number."""

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=[*HealthCheck],
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(scenes())
    @example(Scene((Layer("linear"), Layer("lstm")), (Act("call"), Act("call", 1)), BOTH, flat=False))
    @example(Scene((Layer("total"),), (Act("call"), Act("total")), BOTH[:1], steps=(Step(rows=2),), flat=False))
    def tried(scene: Scene) -> None:
        if any(act.kind == "autocast" for act in scene.acts):  # Which is the CPU's.
            reject()
        if kinds(scene.blocks) & UNMOVED or made(scene) or not sound(scene):
            reject()
        try:
            check(scene, Party(scene, pipeline_of(scene, "sim")))
        except RuntimeError as error:
            if writes(scene) and any(words in str(error) for words in REFUSED):
                reject()
            if "which has a copy for the time of a call" in str(error):  # A buffer that several devices write to.
                reject()
            if again(scene) and "have different metadata than during the forward" in str(error):
                reject()
            raise

    try:
        with warnings.catch_warnings():
            # Of as many rows by chance, and in the first call.
            warnings.filterwarnings("ignore", "the forward left .* a tensor of", UserWarning)
            warnings.filterwarnings("ignore", ".* named in cuts=, and not called", UserWarning)
            tried()
    except Exception:
        return [traceback.format_exc()]
    return []
