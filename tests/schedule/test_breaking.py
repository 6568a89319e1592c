"""Attempts to break schedules: a second simulator, every order of tiny cases, odd numbers, odd files."""
from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from xml.dom import minidom

import pytest

from splitpipe.schedule import BlockOp, BuildingBlock, Costs, Op, Schedule, build, check, simulate
from splitpipe.schedule.bounds import bounds
from splitpipe.schedule.op import dependencies, source_of
from tests.schedule.test_draw import page_data


def settled(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """A second simulator: moves the ends of ops until none ends later than before. In a deadlock, some never settle."""
    times, hops, ends = costs.times(schedule), costs.hops(schedule), dict[Op, float]()
    for _ in range(sum(map(len, schedule.rows)) + 1):
        before = dict(ends)
        for row in schedule.rows:
            now = 0.0
            for op in row:
                for need in dependencies(op, schedule.stages):
                    hop = 0.0 if need.stage == op.stage else hops[min(need.stage, op.stage)]
                    now = max(now, ends.get(need, 0.0) + hop)
                now += times[op.kind][op.stage]
                ends[source_of(op)] = ends[op] = now
        if ends == before:
            return [[ends[op] for op in row] for row in schedule.rows]
    raise RecursionError("a deadlock")


def any_schedule(chance: random.Random, devices: int, stages: int, microbatches: int) -> Schedule:
    """Stages anywhere, some microbatches split, in some order that can run."""
    placement = [chance.randrange(devices) for _ in range(stages)]
    left = []
    for stage, k in itertools.product(range(stages), range(microbatches)):
        left += [Op(kind, stage, k) for kind in chance.choice([("F", "BW"), ("F", "B", "W")])]  # type: ignore[arg-type]
    rows: list[list[Op]] = [[] for _ in range(devices)]
    done: set[Op] = set()
    while left:
        op = chance.choice([op for op in left if done.issuperset(dependencies(op, stages))])
        left.remove(op)
        done.add(source_of(op))
        rows[placement[op.stage]].append(op)
    return Schedule(rows, placement)


@pytest.mark.parametrize("seed", range(25))
def test_a_second_simulator_finds_the_same(seed: int) -> None:
    chance = random.Random(seed)
    schedule = any_schedule(chance, chance.randint(1, 4), chance.randint(1, 5), chance.randint(1, 4))
    f, b, w = ([chance.choice([0, 0.5, 1, 2, 7]) for _ in schedule.placement] for _ in range(3))
    copy = chance.choice([0, 0, 0.25, 3])
    costs = Costs(f, b, w, copy)
    timeline = simulate(schedule, costs)
    ends = settled(schedule, costs)
    assert [[span.end for span in row] for row in timeline.spans] == ends
    assert timeline.makespan == max(end for row in ends for end in row) >= timeline.longest >= max(timeline.work)
    assert max(timeline.bounds.values()) <= timeline.makespan and 0 <= timeline.bubble_longest <= timeline.bubble <= 1
    for device, row in enumerate(schedule.rows):
        alive: set[tuple[int, int]] = set()
        most = 0
        for kind, stage, k in row:
            if kind == "F":
                alive.add((stage, k))
            most = max(most, len(alive))
            if kind in ("W", "BW"):
                alive.remove((stage, k))
        assert timeline.peak_activations[device] == most / max(1, schedule.placement.count(device))


def least(schedule: Schedule, took: dict[str, list[float]], copy: float, caps: list[int]) -> float:
    """The least makespan of all orders that can run with so many stages' activations a device: by trying them."""
    placement, every = schedule.placement, [op for row in schedule.rows for op in row]
    best = math.inf

    def place(ends: dict[Op, float], free: list[float], alive: list[int]) -> None:
        nonlocal best
        work = [free[d] + sum(took[op.kind][op.stage] for op in row if op not in ends)
                for d, row in enumerate(schedule.rows)]
        if max(work) >= best:
            return
        if all(op in ends for op in every):
            best = max(free)
            return
        for op in every:
            device = placement[op.stage]
            if op in ends or (op.kind == "F" and alive[device] == caps[device]):
                continue
            start = free[device]
            for need in dependencies(op, schedule.stages):
                hop = copy if placement[need.stage] != device else 0
                start = max(start, ends.get(need, math.inf) + hop)
            if start < math.inf:
                end = start + took[op.kind][op.stage]
                change = {"F": 1, "B": 0}.get(op.kind, -1)
                later = [end if d == device else each for d, each in enumerate(free)]
                held = [each + change if d == device else each for d, each in enumerate(alive)]
                place({**ends, op: end, source_of(op): end}, later, held)

    place({}, [0.0] * schedule.devices, [0] * schedule.devices)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_orders_is_at_no_time_below_a_bound(seed: int) -> None:
    chance = random.Random(seed)
    stages, microbatches = chance.choice([(1, 2), (2, 1), (2, 2), (3, 1)])
    schedule = any_schedule(chance, 2, stages, microbatches)
    f, b, w = ([chance.choice([0, 1, 2, 5]) for _ in range(stages)] for _ in range(3))
    copy = chance.choice([0, 1, 3])
    own = [schedule.placement.count(device) for device in range(2)]
    caps = [chance.randint(each, each * microbatches) for each in own]
    best = least(schedule, {"F": f, "B": b, "W": w, "BW": [x + y for x, y in zip(b, w)]}, copy, caps)
    cap = [most / max(1, each) for most, each in zip(caps, own)]
    for reason, bound in bounds(schedule, Costs(f, b, w, copy), cap).items():
        assert bound <= best, reason


def test_a_name_with_marks_of_html_breaks_no_picture(tmp_path: Path) -> None:
    name = "\"'<>&</script><script>alert(1)</script><!--<script>"
    timeline = simulate(replace(build("zb-v", 2, 3), name=name))
    timeline.to_svg(tmp_path / "a.svg")
    assert minidom.parse(str(tmp_path / "a.svg")).getElementsByTagName("title")[0].firstChild.data.startswith(name)
    timeline.to_html(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text("utf-8")
    assert page_data(page)["schedules"][0]["title"].startswith(name) and "<script>alert" not in page


@pytest.mark.parametrize(
    "costs", [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1e-9, 1e12, 1, 0), (1e-300, 1e-300, 0, 0), (1e290, 0, 0, 0)]
)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_odd_times_are_drawn(name: str, costs: tuple[float, ...], tmp_path: Path) -> None:
    timeline = simulate(build(name, 2, 3), Costs(*costs))
    assert str(timeline).startswith(f"{name}: 2 devices, 3 microbatches")
    timeline.to_svg(tmp_path / "a.svg")
    minidom.parse(str(tmp_path / "a.svg"))
    timeline.to_html(tmp_path / "a.html")
    page_data((tmp_path / "a.html").read_text("utf-8"))


def test_passes_without_time_that_start_at_once_can_run_however_they_are_named() -> None:
    ops = [BlockOp("F", 1, 0), BlockOp("F", 0, 0), BlockOp("BW", 0, 2), BlockOp("BW", 1, 1)]
    tiling = BuildingBlock(ops, placement=[0, 0], interval=2, costs=Costs([0, 0], [1, 1], [0, 0])).repeat(2)
    assert str(tiling) == "0F0 1F0 1BW0 0F1 1F1 0BW0 1BW1 0BW1"


LINK = re.compile(r"(\S+) on device (\d+) waits for (\S+), which (?:comes after (\S+)|is next) on device (\d+)")


@pytest.mark.parametrize("seed", range(20))
def test_a_shuffled_schedule_is_refused_if_it_deadlocks_and_the_cycle_is_one(seed: int) -> None:
    chance = random.Random(seed)
    schedule = any_schedule(chance, 3, 4, 3)
    rows = [list(row) for row in schedule.rows]
    for row in rows:
        if len(row) > 1 and chance.random() < 0.7:
            one, other = sorted(chance.sample(range(len(row)), 2))
            row[one], row[other] = row[other], row[one]
    mixed = Schedule(rows, schedule.placement)
    try:
        settled(mixed, Costs())
    except RecursionError:
        with pytest.raises(ValueError, match="has a deadlock") as caught:
            check(mixed)
    else:
        check(mixed)
        return
    links = LINK.findall(str(caught.value))
    where = {str(op): (device, place) for device, row in enumerate(rows) for place, op in enumerate(row)}
    ops = {str(op): op for row in rows for op in row}
    for (op, device, need, head, other), following in zip(links, links[1:] + links[:1]):
        assert (where[op][0], where[need][0]) == (int(device), int(other))
        assert source_of(ops[need]) in dependencies(ops[op], 4)
        assert (head or need, other) == following[:2]
        assert not head or where[head][1] < where[need][1], "an op comes after itself"
