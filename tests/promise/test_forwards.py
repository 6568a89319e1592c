"""The promise for random forwards: whatever Python a module's forward is, by cuts a pipeline is its module.

More of it: pytest tests/promise/test_forwards.py --hypothesis-profile thorough --timeout 0 -o faulthandler_timeout=0.
"""
from __future__ import annotations

from hypothesis import HealthCheck, given, reject, settings

from tests.helpers.scripted import Scene, scenes
from tests.helpers.scripted_runs import Party, check, pipeline_of, sound, writes


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(scenes())
def test_a_random_forward_by_cuts_is_its_module(scene: Scene) -> None:
    if not sound(scene):
        reject()
    try:
        check(scene, Party(scene, pipeline_of(scene)))
    except RuntimeError as error:
        if writes(scene) and "another value from there has the same memory" in str(error):
            reject()
        raise
