"""The report as a person meets it: in a real browser, with every request that it makes written down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamgym.cli import app
from dreamgym.data.trajectories import TrajectoryWriter
from tests.report.browser import NAMES, Page, find_browser, open_page
from tests.report.example_run import recorded_episodes, write_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shown")
    asyncio.run(write_run(folder / "agent"))
    with TrajectoryWriter(folder / "recorded") as keeper:
        keeper.append(recorded_episodes())
    out = folder / "report.html"
    words = ["report", str(folder / "agent"), "--out", str(out), "--trajectories", str(folder / "recorded")]
    assert CliRunner().invoke(app, words).exit_code == 0
    return out.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser here (none of {', '.join(NAMES)} on the path, DREAMGYM_BROWSER not set)")
    with open_page(program) as opened:
        yield opened


@pytest.fixture
def page(browser: Page, report: str) -> Iterator[Page]:
    """The report, just opened; whatever a test does with it, nothing may be asked for or complained of."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.resize(1280, 900)
    browser.open(report)
    yield browser
    assert browser.evaluate("document.readyState") == "complete"  # all earlier events have arrived
    assert browser.requests == [report]
    assert browser.complaints == []


def shown(page: Page) -> str:
    return str(page.evaluate("document.getElementById('instruction').textContent"))


def place(page: Page) -> str:
    return str(page.evaluate("document.getElementById('where').textContent"))


def listed(page: Page) -> list[str]:
    found: list[str] = page.evaluate("[...document.querySelectorAll('#list button')].map(b => b.textContent)")
    return found


def search(page: Page, text: str) -> None:
    page.press("/")
    page.write(text)
    page.press("Escape")


def test_every_chart_is_drawn_with_points_inside_its_frame(page: Page) -> None:
    titles = page.evaluate("[...document.querySelectorAll('svg.chart > title')].map(t => t.textContent)")
    assert {"Success while learning", "Reward entropy", "Task pool", "Drift"} <= set(titles)
    boxes = page.evaluate(
        "[...document.querySelectorAll('svg.chart')].map(svg => {const a = svg.getBoundingClientRect();"
        "return [...svg.querySelectorAll('circle')].every(c => {const b = c.getBoundingClientRect();"
        "return b.left >= a.left - 4 && b.right <= a.right + 4 && b.top >= a.top - 4"
        " && b.bottom <= a.bottom}) && a.width > 200 && a.height > 80})"
    )
    assert boxes
    assert all(boxes)
    colours = page.evaluate(
        "[...document.querySelectorAll('.stroke')].map(line => getComputedStyle(line).stroke)"
    )
    assert "none" not in colours  # the style sheet got past the page's own policy


def test_keys_move_through_steps_and_episodes(page: Page) -> None:
    first = shown(page)
    assert place(page) == "step 0 of 5"
    page.press("j")
    page.press("j")
    assert place(page) == "step 2 of 5"
    current = "document.querySelector('#steps > [aria-current=step]')"
    assert page.evaluate(f"{current}.querySelector('.action').textContent") == "go to sidetable 1"
    page.press("k")
    assert place(page) == "step 1 of 5"
    for _ in range(9):
        page.press("ArrowRight")
    assert place(page) == "step 5 of 5"
    page.press("n")
    page.press("n")
    assert shown(page) != first
    assert place(page).startswith("step 0 of")
    page.press("p")
    page.press("p")
    assert shown(page) == first


def test_synthetic_and_real_episodes_are_shown_side_by_side_with_their_first_difference(page: Page) -> None:
    sides = page.evaluate("['dream', 'real'].map(s => document.getElementById('head-' + s).innerText)")
    assert "experience model recited" in sides[0]
    assert "expert after 0 updates" in sides[1]
    page.press("n")  # the dream that forgets the third step
    labels = page.evaluate("[...document.querySelectorAll('#steps .number')].map(n => n.innerText)")
    assert "same state" in labels[2]
    assert "states differ" in labels[3]
    left, right = page.evaluate(
        "[...document.querySelectorAll('#steps li')[3].querySelectorAll('.side')].map(s => s.innerText)"
    )
    assert "I lost it." in left
    assert "You see nothing." in left
    assert "You pick up the laptop" in right


def test_reasoning_demonstrations_and_sheet_changes_can_be_opened(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    text = page.evaluate("document.querySelector('.stage').innerText")
    assert "hand holds laptop 2, needs laptop 2: yes" in text
    assert "similarity 0.875" in text
    assert "− inreceptacle(laptop 2, sidetable 1)" in text
    assert "World sheet at the start: 44 facts" in text
    page.press("n")  # of this one nothing but the trajectory was kept
    assert "Not recorded with this episode: demonstrations" in page.evaluate(
        "document.getElementById('head-dream').innerText"
    )


def test_filters_leave_what_was_asked_for(page: Page) -> None:
    everything = len(listed(page))
    page.press("f")
    won = listed(page)
    page.press("f")
    lost = listed(page)
    assert all(each.startswith("✓") for each in won)
    assert all(each.startswith("✗") for each in lost)
    assert (len(won), len(lost)) == (12, 7)
    assert len(won) + len(lost) == everything
    page.press("f")
    search(page, "LAPTOP armchair")
    assert len(listed(page)) == 3
    search(page, " there is no such thing")
    assert listed(page) == []
    assert page.evaluate("document.getElementById('found').textContent") == f"0 of {everything}"


def test_hostile_text_is_shown_and_does_nothing(page: Page) -> None:
    search(page, "hostile")
    assert shown(page).startswith("hostile </script><script>harmed=1</script><img src=http")
    assert "\\x1b[2J" in shown(page)
    page.press("j")
    assert page.evaluate("typeof harmed") == "undefined"
    assert page.evaluate("document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert page.evaluate("document.scripts.length") == 2


def test_the_pages_own_policy_stops_what_would_act_or_call_out(browser: Page, report: str) -> None:
    """Not by good manners alone: even where text did become markup, it could do nothing."""
    browser.open(report)
    browser.requests.clear()
    browser.complaints.clear()
    browser.evaluate(
        "(() => { const made = document.createElement('div');"
        "made.innerHTML = '<img src=http://127.0.0.1:9/x onerror=harmed=2><style>@import url(http://127.0.0.1:9/y)';"
        "const script = document.createElement('script'); script.textContent = 'harmed = 1';"
        "document.body.append(made, script) })()"
    )
    asked = "fetch('http://127.0.0.1:9/z').then(() => 'went', () => 'blocked')"
    assert browser.evaluate(asked) == "blocked"
    assert browser.evaluate("typeof harmed") == "undefined"
    assert "http://127.0.0.1:9/x" in browser.requests
    assert browser.requests == browser.blocked
    assert any("Content Security Policy" in each for each in browser.complaints)


def test_a_phone_shows_it_without_scrolling_sideways_in_light_and_dark(page: Page, report: str) -> None:
    page.resize(390, 844)
    page.requests.clear()
    page.open(report)
    assert page.evaluate("document.getElementById('list').scrollTop") == 0
    for _ in range(18):
        page.press("n")
    frame, box = page.evaluate(
        "['#list', '#list [aria-current=true]'].map(s => document.querySelector(s).getBoundingClientRect())"
        ".map(b => [b.top, b.bottom])"
    )
    assert frame[0] <= box[0] < box[1] <= frame[1] + 1
    wide = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(wide)
    page.press("j")
    columns = "getComputedStyle(document.querySelector('#steps .pair')).gridTemplateColumns.split(' ').length"
    assert page.evaluate(columns) == 1
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(paper) != light
    assert page.evaluate(wide)


def test_the_browser_is_gone_after_its_block() -> None:
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser here (none of {', '.join(NAMES)} on the path)")
    import psutil

    before = set(psutil.Process().children(recursive=True))
    with open_page(program):
        mine = [each for each in psutil.Process().children(recursive=True) if each not in before]
        assert mine
    _, alive = psutil.wait_procs(mine, timeout=10)
    assert alive == []


def test_the_harness_notices_requests_and_errors(browser: Page, tmp_path: Path) -> None:
    """What the other tests rest on: a page that does ask and does fail is seen doing it."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='other.png'><script>throw new Error('oh')</script>", encoding="utf-8")
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(bad.as_uri())
    assert [each.rpartition("/")[2] for each in browser.requests] == ["bad.html", "other.png"]
    assert any("oh" in each for each in browser.complaints)
