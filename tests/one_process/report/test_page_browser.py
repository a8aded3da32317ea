"""A report page in a browser: nothing fails or leaves the machine, and hover, zoom and themes work."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from support.reports.pages import subject

from autopipe.report.page import page_of, render

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 300_000  # milliseconds, for machines that do other work
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
PAPER = "getComputedStyle(document.body).backgroundColor"
ZOOM = """async () => {
  const { chart, zoom } = Page.ganttChart;
  for (let i = 0; i < 40; i += 1) {
    const width = 100 * Math.pow(0.9, i), start = 40 * (1 - width / 100);
    zoom.go(start, start + width);
    chart.getZr().flush();
    await new Promise(requestAnimationFrame);
  }
}"""
FIRST_BAR = """() => {
  const { chart } = Page.ganttChart, row = Page.decoded.predicted[0];
  const box = document.getElementById("gantt").getBoundingClientRect();
  const [x, y] = chart.convertToPixel({ gridIndex: 0 }, [(row.start[0] + row.end[0]) / 2, 0]);
  return { x: box.left + x, y: box.top + y - 3, stage: row.stage[0], microbatch: row.microbatch[0] };
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS), timeout=PATIENCE)
        yield running
        running.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a function that writes the page of a subject, once for each name."""
    folder = tmp_path_factory.mktemp("pages")

    def write(name, *args, **options):
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(render(page_of(subject(*args, **options))), encoding="utf-8")
        return path

    return write


@pytest.fixture
def visit(browser):
    """Open a file without a network. An error, a dialog or a request for anything else fails the test at its end."""
    wrong, contexts = [], []

    def requested(request):
        if not request.url.startswith(("file:", "data:")):
            wrong.append(request.url)

    def visit(path, width=1280, scheme="light", scripts=True):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, java_script_enabled=scripts
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", requested)
        page.goto(f"file://{path}")
        if scripts:
            page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


def zoomed(page, chart="gantt"):
    data = page.evaluate(f"({{...document.getElementById('{chart}').dataset}})")
    return float(data["start"]), float(data["end"])


def until(page, holds):
    """Return the range once it has changed: the page's policy forbids Playwright's own way to wait for a condition."""
    for _ in range(200):
        if holds(*zoomed(page)):
            break
        page.wait_for_timeout(50)
    assert holds(*zoomed(page))
    return zoomed(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_opens_without_errors_and_fits_the_window(visit, files, width, scheme):
    page = visit(files("small", 4, 8), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate("[...document.querySelectorAll('.chart canvas')].map((c) => c.clientWidth * c.clientHeight)")
    assert len(sizes) == 6
    assert min(sizes) > 10_000
    assert (page.evaluate(PAPER) == "rgb(251, 251, 250)") == (scheme == "light")


def test_pointing_at_a_bar_shows_its_instruction(visit, files):
    page = visit(files("small", 4, 8))
    assert page.locator("#tip").is_hidden()
    page.locator("#gantt").scroll_into_view_if_needed()
    point = page.evaluate(FIRST_BAR)
    page.mouse.move(point["x"], point["y"])
    page.wait_for_selector("#tip:not([hidden])")
    assert page.locator("#tip b").inner_text() == "forward"
    lines = page.locator("#tip span").all_text_contents()
    for expected in (f"stage{point['stage']}", f"microbatch{point['microbatch']}", "instruction0F0", "weight version0"):
        assert expected in lines
    assert any(line.startswith("takes") and line.endswith(" us") for line in lines)


def test_wheel_buttons_keys_and_drag_change_the_range(visit, files):
    page = visit(files("small", 4, 8))
    chart = page.locator("#gantt")
    chart.scroll_into_view_if_needed()
    assert zoomed(page) == (0, 100)
    page.locator("#schedule [data-zoom=in]").click()
    assert zoomed(page) == (25, 75)
    page.locator("#schedule [data-zoom=left]").click()
    assert zoomed(page) == (12.5, 62.5)
    chart.focus()
    page.keyboard.press("+")
    assert zoomed(page) == (25, 50)
    page.keyboard.press("ArrowRight")
    assert zoomed(page) == (31.25, 56.25)
    box, row = chart.bounding_box(), page.evaluate(FIRST_BAR)["y"]
    middle = box["x"] + box["width"] / 2
    page.mouse.move(middle, row)
    page.mouse.down()
    page.mouse.move(middle - 60, row, steps=4)
    page.mouse.up()
    before = until(page, lambda start, end: start > 31.5)
    page.mouse.wheel(0, -300)
    until(page, lambda start, end: end < before[1] - 0.5)
    chart.focus()
    page.keyboard.press("0")
    assert zoomed(page) == (0, 100)
    assert zoomed(page, "modules") == (0, 100)


def test_both_panels_have_one_time_scale(visit, files):
    page = visit(files("small", 4, 8))
    for start, end in ((0, 100), (20, 30)):
        page.evaluate(f"Page.ganttChart.zoom.go({start}, {end})")
        places = page.evaluate(
            "[0, 1].map((x) => [0.001, 0.004].map((t) => Page.ganttChart.chart.convertToPixel({ xAxisIndex: x }, t)))"
        )
        assert places[0] == places[1]


def test_the_theme_can_be_chosen(visit, files):
    page = visit(files("small", 4, 8))
    papers = [page.evaluate(PAPER)]
    for _ in range(2):
        page.locator("#theme").click()
        papers.append(page.evaluate(PAPER))
    assert papers[0] == papers[2] != papers[1]
    assert page.locator(".chart canvas").count() == 6


def test_colours_by_stage_and_microbatch(visit, files):
    page = visit(files("small", 4, 8))
    page.locator("#colour").select_option("stage")
    assert page.locator("#legend span").all_inner_texts() == [f"stage {k}" for k in range(4)]
    page.locator("#colour").select_option("microbatch")
    assert "numbers appear" in page.locator("#legend").inner_text()


def test_a_plan_without_measurements(visit, files):
    page = visit(files("plan", 2, 4, measured=False))
    assert page.locator("#loss").is_hidden()
    assert page.locator(".lacks:visible").count() == 4


def test_names_of_users_are_never_run(visit, tmp_path):
    shown = subject(2, 4, name=EVIL)
    stages = tuple(dataclasses.replace(stage, modules=EVIL) for stage in shown.plan.stages)
    shown = dataclasses.replace(shown, plan=dataclasses.replace(shown.plan, stages=stages), facts=((EVIL, EVIL),))
    path = tmp_path / "evil.html"
    path.write_text(render(page_of(shown)), encoding="utf-8")
    page = visit(path)
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    assert page.locator("h1").inner_text() == EVIL
    for chart in ("#modules", "#bytes", "#times"):
        page.locator(chart).hover()
    assert page.locator("img").count() == 0
    assert dialogs == []


def test_without_scripts_the_tables_remain(visit, files):
    page = visit(files("small", 4, 8), scripts=False)
    assert page.locator("noscript").is_visible()
    assert page.locator("#model table").first.is_visible()


@pytest.mark.parametrize(("ranks", "microbatches", "frame"), [(16, 200, 0.06), (64, 256, 0.12)])
def test_large_runs_are_fluid(visit, files, ranks, microbatches, frame):
    """In seconds of processor time, which other work on the machine hardly changes."""
    path = files(f"large{ranks}", ranks, microbatches)
    assert path.stat().st_size < 5 * 2**20
    page = visit(path)
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent():
        metrics = client.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert (ready := spent()) < 2
    page.evaluate(ZOOM)
    assert (spent() - ready) / 40 < frame
