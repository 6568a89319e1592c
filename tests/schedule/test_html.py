"""In a browser the page draws every op, names what the pointer is on, zooms and moves, and asks nobody for anything."""
from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitpipe.schedule import Costs, Timeline
from splitpipe.schedule.draw import measures
from tests.helpers.recording import played

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright to open a browser")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As in page.js.
LEFT, RIGHT, AXIS, ROW, DEVICE = 76, 84, 22, 22, 52
PIXEL = """(canvas, [x, y]) => {
    const ratio = canvas.width / canvas.clientWidth;
    return [...canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data.slice(0, 3)];
}"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(done))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser, and there is none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Page:
    """A page in a browser, and all that went wrong with it."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))
        page.set_default_timeout(10_000)
        page.goto(path.as_uri())

    def spot(self, time: float, device: int = 0, down: float = ROW / 4, picture: int = 0) -> tuple[float, float]:
        """Where on its canvas a time of a device is, if the view has not moved."""
        canvas = self.page.locator("canvas").nth(picture)
        plot = canvas.evaluate("(canvas) => canvas.clientWidth") - LEFT - RIGHT
        start, end = map(float, self.shown.split(" to "))
        return LEFT + (time - start) / (end - start) * plot, AXIS + device * DEVICE + down

    def colour(self, *spot: Any, **more: Any) -> tuple[int, ...]:
        self.page.evaluate(DRAWN)
        canvas = self.page.locator("canvas").nth(more.get("picture", 0))
        return tuple(canvas.evaluate(PIXEL, self.spot(*spot, **more)))

    def point(self, *spot: Any, **more: Any) -> str:
        """Points at a spot; gives what the page says of it."""
        canvas = self.page.locator("canvas").nth(more.get("picture", 0))
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        x, y = self.spot(*spot, **more)
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        return self.tip

    @property
    def tip(self) -> str:
        tip = self.page.locator("#tip")
        return str(tip.text_content()) if tip.is_visible() else ""

    @property
    def shown(self) -> str:
        return str(self.page.locator("#shown").text_content())


Open = Callable[..., Page]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page of schedules. At the end, nothing has gone wrong there, and nothing was asked for."""
    pages: list[Page] = []

    def open_(*timelines: Timeline, size: tuple[int, int] = (1240, 720), **options: Any) -> Page:
        path = tmp_path / "page.html"
        timelines[0].to_html(path, *timelines[1:])
        page = browser.new_page(viewport=dict(zip(("width", "height"), size)), **options)
        pages.append(Page(page, path))
        return pages[-1]

    yield open_
    for page in pages:
        page.page.close()
        # Of the browser, that these tests read so many pixels.
        assert [text for text in page.complaints if "willReadFrequently" not in text] == []
        assert [url for url in page.requests if not url.startswith("data:")] == [(tmp_path / "page.html").as_uri()]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "1f1b"])
def test_every_op_is_drawn_in_its_colour(opened: Open, name: str) -> None:
    timeline = played(name)
    page = opened(timeline)
    colours = measures.colours(timeline.schedule)
    for device, row in enumerate(timeline.spans):
        for op, start, end in row[::4]:
            expected = tuple(bytes.fromhex(colours[op.kind, op.stage][1:]))
            assert page.colour((start + end) / 2, device, down=3) == expected


def test_hovering_an_op_names_it_with_its_times(opened: Open) -> None:
    page = opened(played("zb-h1", costs=Costs(3, 4, 2, 0.5)))
    assert page.point(1) == "0F0\nforward of microbatch 0, stage 0, device 0\n0 to 3, takes 3"
    assert page.point(12, device=3) == "3F0\nforward of microbatch 0, stage 3, device 3\n10.5 to 13.5, takes 3"


@pytest.mark.thorough
def test_the_wheel_zooms_to_where_the_pointer_is(opened: Open) -> None:
    page = opened(played("zb-h1"))
    before = page.point(20.5)
    page.page.mouse.wheel(0, -600)
    playwright.expect(page.page.locator("#shown")).not_to_have_text("0 to 27")
    start, end = map(float, page.shown.split(" to "))
    assert 0 < start < 20.5 < end < 27 and page.tip == before


@pytest.mark.parametrize("by_keys", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_buttons_keys_and_dragging_zoom_and_move(opened: Open, by_keys: bool) -> None:
    page = opened(played("zb-h1"))
    ways = {"zoom in": "+", "later": "ArrowRight", "earlier": "ArrowLeft", "zoom out": "-", "show all": "0"}
    shown = []
    for name in ("zoom in", "later", "earlier", "zoom out", "zoom in", "show all"):
        if by_keys:
            page.page.keyboard.press(ways[name])
        else:
            page.page.get_by_role("button", name=name, exact=True).click()
        shown.append(page.shown)
    assert shown == ["4.5 to 22.5", "9 to 27", "4.5 to 22.5", "0 to 27", "4.5 to 22.5", "0 to 27"]
    page.page.keyboard.press("+")
    page.point(18)
    page.page.mouse.down()
    page.point(9)
    page.page.mouse.up()
    assert page.shown == "9 to 27"


def test_several_schedules_are_on_one_axis(opened: Open) -> None:
    page = opened(played("1f1b"), played("zb-h1"), played("zb-v"), size=(1240, 1100))
    assert page.page.locator("canvas").count() == 3 and page.shown == "0 to 33"
    assert [page.point(0.25, picture=picture).split("\n")[-1] for picture in range(3)] == [
        "0 to 1, takes 1", "0 to 1, takes 1", "0 to 0.5, takes 0.5"
    ]
    assert page.point(30, picture=1) == "", "after its end"
    assert page.page.locator(".now:visible").count() == 3
    assert page.page.locator(".best").inner_text().split()[:2] == ["zb-v", "25.5"]
