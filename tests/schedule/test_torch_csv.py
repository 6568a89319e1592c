"""Schedules as torch.distributed.pipelining's text, both ways."""
from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from splitpipe.schedule import Op, Schedule, build, from_csv, names


def test_what_is_written_is_read_again_by_a_path_or_its_text(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    for schedule in build("zb-v", 3, 5), Schedule([[Op("F", 0, 0), Op("BW", 0, 0)], []], [0]):  # One without ops.
        schedule.to_csv(path)
        assert from_csv(path) == from_csv(str(path)) == schedule


@pytest.mark.parametrize("name", names())
def test_torch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    ours, path = build(name, 4, 8), tmp_path / "schedule.csv"
    ours.to_csv(path)
    with open(path, newline="") as file:
        cells = list(csv.reader(file))
    actions = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(cells)}
    where = schedules._validate_schedule(actions, ours.devices, ours.stages, ours.microbatches)
    assert [where[stage] for stage in range(ours.stages)] == list(ours.placement)
    kinds = {"F": "FORWARD", "B": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT", "BW": "FULL_BACKWARD"}
    for rank, row in enumerate(ours.rows):
        for op, action in zip(row, actions[rank], strict=True):
            assert (action.stage_index, action.microbatch_index) == (op.stage, op.microbatch)
            assert action.computation_type is getattr(schedules._ComputationType, kinds[op.kind])


@pytest.mark.parametrize(("text", "schedule"), [
    ("0F0,0F1,,, 0B0,,0B1\n,1F0,1B0,1F1,1B1,,\n", build("1f1b", 2, 2)),  # Torch's own, with idle slots and spaces.
    ('\ufeff"0F0","0B0"\r\n', build("gpipe", 1, 1)),
])
def test_idle_slots_spaces_quotes_and_a_mark_at_the_start_are_read(text, schedule, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    assert from_csv(path) == schedule


@pytest.mark.parametrize(("text", "message"), [
    ("0F0,0B0\n1F0,1X0", "line 2, cell 2: '1X0' isn't an op: expected stage, letter and microbatch, as in 2F0"),
    ("0F٣,0B٣", "line 1, cell 1: '0F٣' isn't an op"),
    ("0SEND_F0", "line 1, cell 1: '0SEND_F0' isn't an op"),
    ("0F99999999999999999999", "isn't an op"),
    ("0F0,0B0\n0F1,0B1", "line 2, cell 1: expected '0F1' on line 1, that of its stage"),
    ("0F0,0B0\n999999999F0", "has no op of stage 1"),
    ("1F0,1B0", "has no op of stage 0: expected stages counted from 0"),
    ("", "has no stages"),
    ("0F0,0B0,0F999999999,0B999999999", "0F1 and 0B1 and 0W1 are missing on device 0"),
    ("0F0,0I0", "0W0 is missing on device 0"),
    ("0B0,0F0", "has a deadlock"),
    ('0F0,"0B0', "isn't a CSV file"),
    ("0F0\udcff\udcfe\0", "isn't a CSV file"),  # No text.
])
def test_junk_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "junk.csv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        from_csv(path)
    assert str(path) in str(caught.value)
