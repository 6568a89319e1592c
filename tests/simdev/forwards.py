"""Random forwards on simulated devices: by cuts a pipeline over three of them is its module on the CPU."""
from __future__ import annotations

import traceback
import warnings
from collections import Counter

from hypothesis import HealthCheck, Phase, given, reject, seed, settings

from tests.helpers.randomized_models import kinds
from tests.helpers.scripted import CALLS, SOMETIMES, Scene, scenes
from tests.helpers.scripted_runs import Party, check, pipeline_of, sound, writes
from tests.promise.test_forwards import REFUSED

#: Blocks with a tensor that is neither parameter nor buffer: their module itself could not go to a device.
UNMOVED = {"closure"}


def again(scene: Scene) -> bool:
    """True if a block that the module checkpoints itself is called elsewhere, too: then it may be on another device."""
    called = Counter(act.which % len(scene.blocks) for act in scene.acts if act.kind in CALLS + SOMETIMES)
    return any(act.kind == "checkpoint" and called[act.which % len(scene.blocks)] > 1 for act in scene.acts)


def wrong(count: int, number: int) -> list[str]:
    """What is wrong, with the scene that shows it, of so many random ones; the same for each number."""

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=[*HealthCheck],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(scenes())
    def tried(scene: Scene) -> None:
        if kinds(scene.blocks) & UNMOVED or not sound(scene):
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
            warnings.filterwarnings("ignore", "the forward left .* a tensor of", UserWarning)  # Of those rows by chance.
            warnings.filterwarnings("ignore", ".* named in cuts=, and not called", UserWarning)  # In the first call.
            tried()
    except Exception:
        return [traceback.format_exc()]
    return []
