"""What a recording says of its model: where time is lost, which stage is the bottleneck, and what each takes."""
from __future__ import annotations

import re

import pytest

from splitpipe.schedule import Costs, Recording, Timeline, build
from tests.helpers.recording import near, played, recorded, step

LOST = ["unbalanced stages", "the schedule's own bubble", "copies", "waiting beyond the plan"]


@pytest.mark.parametrize(("timeline", "late", "expected"), [
    pytest.param(played(), 0, [0, 9, 0, 0], id="a bubble that equal stages have, too"),
    pytest.param(played("zb-v", 2, 4, Costs(3, 4, 2)), 0, [0, 2, 0, 0], id="equal work on every device"),
    pytest.param(played("gpipe", 2, 1, Costs([1, 3], [1, 3], 0)), 0, [0, 4, 0, 0], id="unequal stages, one microbatch"),
    # The plan takes 26; with equal stages it would take 20.
    pytest.param(played("gpipe", 2, 4, Costs([1, 3], [1, 3], 0)), 0, [6, 4, 0, 0], id="unequal stages"),
    pytest.param(played("gpipe", 2, 4, Costs(copy=0.5)), 0, [0, 3, 1, 0], id="copies that make the plan longer"),
    pytest.param(played(), 2, [0, 9, 0, 2], id="what no plan explains"),
])
def test_time_is_lost_to(timeline: Timeline, late: float, expected: list[float]) -> None:
    recording = Recording(timeline.schedule)
    recording.add(step(timeline, late=late))
    assert [near(recording.losses[reason]) for reason in LOST] == expected


def test_the_slowest_stage_is_named_with_what_to_do() -> None:
    costs = Costs([1.2, 1.1, 1.9, 1.3], [1.4, 1.3, 2.2, 1.5], [1, 1, 1.6, 1], 0.05)
    remarks = recorded(played("zb-h1", costs=costs), devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3")).remarks
    assert remarks[1] == ("Stage 2 on cuda:2 is the bottleneck: its device computes 93% of the step, the others 59% on "
                          "average.")
    assert re.fullmatch(r".* to unbalanced stages. Move a layer from stage 2 to stage 1 on cuda:1, which computes "
                        r"56%\.", remarks[3])


def test_of_several_stages_on_the_slowest_device_the_one_to_shorten_has_a_neighbour_elsewhere() -> None:
    recording = recorded(played("zb-v", 2, 8, Costs([1, 1, 3, 1], [1, 1, 3, 1], 1)), devices=("cuda:0", "cuda:1"))
    text = str(recording)
    assert "Stages 1 and 2 on cuda:1 are the bottleneck: their device computes " in text
    assert "Move a layer from stage 2 to stage 3 on cuda:0, which computes " in text


def test_equal_stages_have_no_bottleneck() -> None:
    recording = recorded(played("1f1b"))
    assert "No stage is the bottleneck: the devices compute 73% of the step." in recording.remarks
    assert "9 ms (27.3%) to the schedule's own bubble. It shrinks with more chunks" in str(recording)
    assert "unbalanced" not in str(recording)
    assert "There is one device, which computes 100% of the step." in recorded(played("gpipe", 1, 3)).remarks


def tables(recording: Recording) -> tuple[list[list[str]], list[list[str]]]:
    """The cells of the stages' and of the devices' table."""
    stages, devices = str(recording).split("\n\n")[-3:-1]
    return [line.split() for line in stages.split("\n")], [line.split() for line in devices.split("\n")]


def test_a_line_a_stage_has_medians_of_what_was_recorded() -> None:
    timeline = played("zb-v", 2, 3, Costs([1, 2, 3, 4], 5, [1, 1, 1, 1], 0.25))
    stages, _ = tables(recorded(timeline, devices=("cuda:0", "cuda:1")))
    assert stages == [
        ["stage", "device", "F", "ms", "B", "ms", "W", "ms", "copy", "ms"],
        ["0", "cuda:0", "1.000", "2.500", "1.000", "0.250"],
        ["1", "cuda:1", "2.000", "2.500", "1.000", "0.250"],
        ["2", "cuda:1", "3.000", "2.500", "1.000", "0.250"],
        ["3", "cuda:0", "4.000", "2.500", "1.000", "0.250"],
    ]


def test_a_line_a_device_has_its_bubble_and_its_memory() -> None:
    recording = Recording(build("1f1b", 2, 2), ("cuda:0", "cpu"))
    recording.add(step(played("1f1b", 2, 2, Costs(1, 1, [0, 1])), (3 * 2**30, None)))
    assert tables(recording)[1] == [
        ["device", "busy", "bubble", "peak", "memory"],
        ["cuda:0", "50.00%", "50.00%", "3", "GiB"],
        ["cpu", "75.00%", "25.00%", "-"],
    ]
