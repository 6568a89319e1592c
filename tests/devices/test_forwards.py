"""Random forwards on several devices: by cuts a pipeline over three of them is its module on the CPU."""
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, example, given, reject, settings

from tests.helpers.randomized import Act, Case, Layer, Reference, Side, Step, forwards, pipeline_of, sound, writes
from tests.helpers.randomized_models import CALLS, SOMETIMES
from tests.promise.test_properties import CHANGED, REFUSED

BOTH = "blocks.0", "blocks.1"


def twice(case: Case) -> set[int]:
    """The blocks that are called more than once, and so may be on several devices."""
    called = Counter(act.which % len(case.layers) for act in case.acts if act.kind in CALLS + SOMETIMES)
    return {number for number, count in called.items() if count > 1}


def again(case: Case) -> bool:
    """True if the module checkpoints one of them itself."""
    return any(act.kind == "checkpoint" and act.which % len(case.layers) in twice(case) for act in case.acts)


@pytest.mark.cuda
@pytest.mark.devices(3)
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* named in cuts=, but not called:UserWarning")
@settings(max_examples=15, phases=[Phase.explicit, Phase.generate], suppress_health_check=[*HealthCheck])
@given(forwards())
@example(Case((Layer("linear"), Layer("lstm")), acts=(Act("call"), Act("call", 1)), cuts=BOTH, chunks=2))
@example(Case((Layer("total"),), acts=(Act("call"), Act("total")), cuts=BOTH[:1], chunks=2, steps=(Step(rows=2),)))
def test_random_forwards_on_several_devices_are_their_modules(case: Case) -> None:
    if not sound(case):
        reject()
    try:
        Reference(case).check(Side(case, pipeline_of(case, kind="cuda")))
    except RuntimeError as error:
        if CHANGED in str(error) or writes(case) and any(words in str(error) for words in REFUSED):
            reject()
        if "which has a copy during a call" in str(error):  # A buffer that several devices write to.
            reject()
        if again(case) and "have different metadata than during the forward" in str(error):
            reject()
        raise
