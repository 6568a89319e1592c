"""Pictures of a schedule show every op where and when it ran, in each of their forms."""
from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from splitpipe.schedule import Costs, Op, Schedule, simulate
from splitpipe.schedule.draw import html, measures, svg, text
from tests.helpers.recording import played

SVG = "{http://www.w3.org/2000/svg}"


def rows(picture: str, devices: int = 4) -> list[str]:
    return picture.split("\n")[3 : 3 + devices]


def page_data(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert match is not None
    return json.loads(match[1], parse_constant=lambda what: pytest.fail(f"{what} isn't JSON"))


def test_a_printed_timeline_ends_with_its_measures() -> None:
    picture = str(played("zb-h1"))
    assert "makespan 27, bubble 11.11%; longest 27, bubble 11.11%" in picture
    assert "idle on the devices: 3 each" in picture
    assert "peak activations, in microbatches: 4 each" in picture
    assert "lower bound for any order: work 24, head + work + tail 27, " in picture


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("chunks", [8, 64])
@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("costs", [Costs(), Costs(18.5, 18.1, 9.3, 0.6)], ids=["even", "odd"])
def test_rows_fit_the_width(name: str, chunks: int, width: int, costs: Costs) -> None:
    picture = text.draw([played(name, chunks=chunks, costs=costs)], width)
    assert max(map(len, rows(picture))) <= width


def test_where_there_is_room_every_op_is_named() -> None:
    timeline = played("dualpipe-v", costs=Costs(3, 4, 2, 0.5))
    found = [re.findall(r"[A-Za-z]+\d+", line) for line in rows(text.draw([timeline], 400))]
    first = timeline.schedule.devices
    expected = [[(op.kind if op.stage < first else op.kind.lower()) + str(op.microbatch) for op in row]
                for row in timeline.schedule.rows]
    assert found == expected


def test_several_are_on_one_scale_with_a_table() -> None:
    picture = text.draw([played("1f1b"), played("zb-h1")], 110)
    lines = picture.split("\n")
    assert lines[2].startswith(lines[10]) and lines[3].index("F3") == lines[11].index("F3")
    assert [line.split()[:4] for line in lines if "%" in line] == [
        ["1f1b", "33", "27.27%", "33"], ["zb-h1", "27", "11.11%", "27"]
    ]


@pytest.mark.parametrize("draw", [text.draw, svg.draw, html.draw])
def test_a_schedule_without_end_is_refused(draw: Any) -> None:
    with pytest.raises(ValueError, match="has no scale: expected smaller costs"):
        draw([played("zb-h1", costs=Costs(1e308, 1e308, 1e308))])


def test_an_svg_names_each_op_with_its_times() -> None:
    timeline = played("zb-v", costs=Costs(3, 4, 2, 0.5))
    root = ElementTree.fromstring(svg.draw([timeline]))
    titles = [element.text for element in root.iterfind(f".//{SVG}path/{SVG}title")]
    expected = [f"{op}: {measures.short(start)} to {measures.short(end)}, takes {measures.short(end - start)}"
                for row in timeline.spans for op, start, end in row]
    assert sorted(map(str, titles)) == sorted(expected)


def test_an_svg_stands_alone_and_has_a_view_box() -> None:
    picture = svg.draw([played("zb-h1")])
    root = ElementTree.fromstring(picture)
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    assert "href" not in picture and re.findall(r"https?://[^\"]*", picture) == ["http://www.w3.org/2000/svg"]


def test_a_page_has_the_times_of_every_op() -> None:
    timeline = played("zb-v", costs=Costs(3, 4, 2, 0.5))
    data = page_data(html.draw([timeline]))
    kinds = data["kinds"]
    (schedule,) = data["schedules"]
    for row, flat in zip(timeline.spans, schedule["rows"]):
        ops = [flat[at : at + 5] for at in range(0, len(flat), 5)]
        assert [(Op(kinds[kind], stage, k), start, end) for kind, stage, k, start, end in ops] == list(row)


def test_a_page_has_what_is_alive() -> None:
    timeline = played("zb-v")
    (schedule,) = page_data(html.draw([timeline]))["schedules"]
    assert tuple(max(curve[1::2]) for curve in schedule["activations"]) == timeline.peak_activations


def test_a_page_has_a_table_of_measures() -> None:
    page = html.draw([played("1f1b"), played("zb-h1")])
    table = [re.findall(r"<td>(.*?)</td>", line) for line in page.split("\n") if "<td>" in line]
    assert [cells[:3] for cells in table] == [["1f1b", "33", "27.27%"], ["zb-h1", "27", "11.11%"]]
    assert page.count('class="best"') == 1


def test_a_page_forbids_the_network() -> None:
    page = html.draw([played("zb-h1")])
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none'; style-src 'sha256-")
    assert not re.search(r"https?:|//[a-z]+\.|src=|@import|url\(", page.replace("default-src", ""))


@pytest.mark.parametrize("draw", [text.draw, svg.draw, html.draw])
def test_a_device_without_ops_is_drawn(draw: Any) -> None:
    ops = [Op("F", 0, 0), Op("BW", 0, 0)]
    assert draw([simulate(Schedule([ops, []], [0]))])
