"""Building by name: what is there, what is refused."""
from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from splitpipe.schedule import Schedule, build, check, names
from splitpipe.schedule.construct.library import options, variants
from tests.helpers.covering import few


@pytest.mark.parametrize("name", few(5, names()))
def test_any_number_of_devices_and_microbatches_is_built_and_can_run(name: str) -> None:
    for devices, chunks in [*product(range(1, 6), [1, 2, 3, 5, 6, 7, 8, 9]), (6, 17)]:
        schedule = build(name, devices, chunks)
        check(schedule)
        assert (schedule.name, schedule.devices, schedule.microbatches) == (name, devices, chunks)
        assert type(schedule) is Schedule and schedule == build(name, devices=devices, chunks=chunks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_split_schedule_has_weight_gradients_of_their_own(name: str) -> None:
    kinds = {op.kind for row in build(name, 3, 4, split=True).rows for op in row}
    assert kinds == {"F", "B", "W"}
    assert {op.kind for row in build(name, 3, 4, split=False).rows for op in row} == {"F", "BW"}


@pytest.mark.parametrize("name", names())
def test_each_option_is_described_and_among_the_variants(name: str) -> None:
    for option in options(name):
        assert f"``{option}" in (build.__doc__ or ""), f"{option}: describe it in the docstring of build"
        tried = {variant.get(option) for variant, _ in variants(name, 4, 8, (1, 2, 3))}
        assert len(tried) > 1, f"{option}: give it values, and its default, in variants"


@pytest.mark.parametrize(("name", "options", "message"), [
    ("1f1", {}, "Did you mean '1f1b'?"),
    ("zb-h1", {"split": True}, "zb-h1 has no option 'split': it has none"),
    ("1f1b", {"split": 2}, "split=2: expected True or False"),
])
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name, 4, 8, **options)
