"""The page of a sweep in a real browser, offline: what a reader with a mouse, a keyboard or only the address can do."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.dashboard import page as module
from atma_sweep.reports.render import style
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, Measurement, Provenance
from atma_sweep.results.store.store import Store, open_store
from pages import Page
from patience import until
from synthetic import OWNER, synthetic_sweep

HOSTILE = "<img src=x onerror=window.broken=1></script><script>window.broken=1</script>"
FAILED, WILD, FRESH = "f00000000001", "f00000000002", "f00000000003"
COUNT = 27


def extra(name: str, slug: str, **levels: str) -> CellRecord:
    all_levels = dict(zip(AXES, ("rope", "baseline", "off", "off", "off"), strict=True)) | levels
    axes = all_levels | {"train.lr": "0", "seed": "0"}
    return CellRecord(id=name, slug=slug, seed=0, levels=all_levels, config={}, axes=axes, tokens=1)


def fill(store: Store) -> list[CellRecord]:
    """24 finished cells, one out of GPU memory, one with a hostile name, cause and level, one never started."""
    cells = synthetic_sweep(store, 24, 60)
    more = [
        extra(FAILED, "out-of-memory"),
        extra(WILD, HOSTILE, window=HOSTILE),
        extra(FRESH, "not-started", memory="on"),
    ]
    store.record_revision("big", grid_text=HOSTILE, grid_file="big.yaml", cells=[*cells, *more])
    failed = store.start_attempt(FAILED, owner=OWNER, fence=1)
    store.finish_attempt(failed.id, 1, "failed", cause=HOSTILE, traceback=f"line\n{HOSTILE}", failure="cuda_oom")
    wild = store.start_attempt(WILD, owner=OWNER, fence=1)
    recorder = DatabaseRecorder(store, wild.id, 1)
    recorder.provenance(Provenance(config={}, seed=0, git_commit="feedc0de", git_dirty=True, gpu_name="NVIDIA H100"))
    recorder.measurements(
        [
            Measurement(probe="val", metric="val_loss", value=2.125, unit="nats/token", n=777),
            Measurement(probe="junk", metric="nats", length=65536, unit="nats/token", reason=f"oom: {HOSTILE}"),
        ]
    )
    recorder.curve([CurvePoint(step=i, tokens=i * 10, wall_s=float(i), train_loss=3.0) for i in range(5)])
    store.finish_attempt(wild.id, 1, "done")
    return [*cells, *more]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, blank: Path) -> tuple[str, dict[str, Any]]:
    """Return the address of a page and, by slug, the levels and validation loss that its row must show."""
    folder = tmp_path_factory.mktemp("page")
    store = open_store(shutil.copy(blank, folder / "big.db"))
    rows = {}
    for record in fill(store):
        loss = next((v.value for v in store.measurements(record.id) if v.metric == "val_loss"), None)
        rows[record.slug] = {"cell": record.id, "levels": record.levels, "loss": loss}
    module.write_dashboard(store, folder / "page.html")
    return (folder / "page.html").as_uri(), rows


def awaited(page: Any, true: str) -> None:
    """Until an expression holds, asked from without: the page's own policy refuses to evaluate text."""
    until(lambda: page.evaluate(true), true)


def slugs(page: Any) -> list[str]:
    texts: list[str] = page.locator("#panel-cells tbody th button").all_text_contents()
    return texts


def inked(page: Any, selector: str) -> int:
    """Return the number of pixels of a canvas that are not transparent."""
    counted: int = page.locator(selector).evaluate(
        """(canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
          .filter((value, index) => index % 4 === 3 && value > 0).length"""
    )
    return counted


def heading(page: Any, name: str) -> Any:
    return page.locator("#panel-cells thead th", has=page.get_by_role("button", name=name, exact=True))


@pytest.mark.thorough
def test_every_tab_works_offline(visit: Any, site: Any) -> None:
    page = visit(f"{site[0]}#tab=cells&pick={WILD}")
    assert page.locator("h1").text_content() == "big, revision 2"
    assert "25 done, 1 oom, 1 new" in page.locator("#summary").text_content()
    assert len(slugs(page)) == COUNT
    for name in ("Curves (1)", "Effects", "Failures", "Provenance", "Metrics"):
        page.get_by_role("tab", name=name).click()
        page.wait_for_selector("[role=tabpanel]:visible")
    page.get_by_role("tab", name="Effects").click()
    page.locator("#panel-effects tbody th").first.wait_for()
    shown = page.locator("#panel-effects thead th").all_text_contents()
    assert shown[:3] == ["Factor", "Levels", "Within"]
    assert shown[3:8] == ["Pairs", "Mean", "Low", "High", "p corr"]
    assert page.locator("#panel-effects tbody th").all_text_contents().count("on against off") == 3
    page.get_by_role("tab", name="Metrics").click()
    assert "share of digits recalled" in page.locator("#panel-metrics").inner_text()
    page.get_by_role("tab", name="Provenance").click()
    origin = page.locator("#panel-provenance tbody tr", has_text="c0ffeec0ffee")
    assert origin.locator("td").all_text_contents()[-2:] == ["24", "24"]
    page.get_by_role("tab", name="Results").click()
    assert "GPU differs: NVIDIA H200 (24 cells), NVIDIA H100 (1 cell)" in page.locator("#care").text_content()


@pytest.mark.thorough
def test_filters_keep_the_cells_that_have_the_levels(visit: Any, site: Any) -> None:
    page = visit(site[0])
    page.locator("[data-group=Reg] .level[data-level=weak] input").check()
    page.locator("[data-group=Reg] .level[data-level=strong] input").check()
    page.locator("[data-group=Mem] .level[data-level=on] input").check()
    wanted = [
        s
        for s, row in site[1].items()
        if row["levels"]["reg_mode"] in ("weak", "strong") and row["levels"]["memory"] == "on"
    ]
    assert sorted(slugs(page)) == sorted(wanted)
    assert len(wanted) == 8
    assert page.locator("#matches").text_content() == f"8 of {COUNT} cells match"
    count_text = page.locator("[data-group=Reg] .level[data-level=baseline] .count").text_content()
    assert int(count_text) == sum(
        r["levels"]["reg_mode"] == "baseline" and r["levels"]["memory"] == "on" for r in site[1].values()
    )
    page.get_by_role("button", name="Reset view").click()
    page.locator("[data-group=State] .level[data-level=oom] input").check()
    assert slugs(page) == ["out-of-memory"]
    assert set(page.locator("#panel-cells tbody .n button").all_text_contents()) == {"oom"}


@pytest.mark.thorough
def test_sorting_is_pythons_and_what_has_no_number_stands_last(visit: Any, site: Any) -> None:
    page = visit(site[0])
    val = heading(page, "Val")
    assert val.get_attribute("aria-sort") == "none"
    val.locator("button").click()
    have = [slug for slug, row in site[1].items() if row["loss"] is not None]
    without = [slug for slug, row in site[1].items() if row["loss"] is None]
    ascending = sorted(have, key=lambda slug: site[1][slug]["loss"])
    assert slugs(page) == [*ascending, *without]
    assert val.get_attribute("aria-sort") == "ascending"
    assert page.locator("#panel-cells tbody tr:not(.gap)").first.locator(".best").first.text_content() == "2.125"
    val.locator("button").click()
    assert slugs(page) == [*reversed(ascending), *without]
    assert val.get_attribute("aria-sort") == "descending"
    heading(page, "Regularizer").locator("button").click()
    assert slugs(page) == sorted(site[1], key=lambda slug: site[1][slug]["levels"]["reg_mode"])
    assert heading(page, "Val").get_attribute("aria-sort") == "none"


@pytest.mark.thorough
def test_search_wants_every_word(visit: Any, site: Any) -> None:
    page = visit(site[0])
    page.get_by_label("Search cells").fill("Strong  on-on-on")
    assert slugs(page) == [slug for slug in site[1] if "strong" in slug and "on-on-on" in slug]
    assert len(slugs(page)) == 1
    page.get_by_label("Search cells").fill("no such cell")
    assert page.locator("#matches").text_content() == f"0 of {COUNT} cells match"
    assert slugs(page) == []


@pytest.mark.thorough
def test_address_restores_view_of_picked_cells(visit: Any, site: Any) -> None:
    page = visit(site[0])
    names = list(site[1])
    heading(page, "Clean@2K").locator("button").click()
    page.locator("[data-group=Win] .level[data-level=off] input").check()
    for slug in (names[0], names[4]):
        page.get_by_label(f"Draw the curves of {slug}").check()
    page.get_by_role("button", name="Show curves").click()
    page.wait_for_selector("#chart-needle[data-traces]")
    assert page.locator("#chart-training").get_attribute("data-traces") == "4"
    assert (
        page.evaluate("charts.get('chart-training').series.map(t => [t.x.length, t.x.at(-1)])")
        == [[60, 60 * 524_288]] * 2 + [[1, 50 * 524_288]] * 2
    )
    assert inked(page, "#chart-training canvas") > 1000
    assert page.evaluate("charts.get('chart-clean').series[0].x") == [2048, 8192, 65536]
    page.get_by_label("wall time").check()
    awaited(page, "charts.get('chart-training').series[0].x[59] < 200")
    address = page.url

    second_page = visit(address)
    second_page.wait_for_selector("#chart-needle[data-traces]")
    assert second_page.get_by_role("tab", selected=True).text_content() == "Curves (2)"
    assert second_page.get_by_label("wall time").is_checked()
    second_page.get_by_role("tab", name="Cells").click()
    page.get_by_role("tab", name="Cells").click()
    assert slugs(second_page) == slugs(page)
    assert heading(second_page, "Clean@2K").get_attribute("aria-sort") == "ascending"
    assert second_page.locator("#panel-cells tbody input:checked").count() == 2
    second_page.go_back()
    assert second_page.get_by_role("tab", selected=True).text_content() == "Curves (2)"
    assert second_page.url == address


@pytest.mark.thorough
def test_back_button_goes_back_by_single_step(visit: Any, site: Any) -> None:
    page = visit(site[0])
    page.locator("[data-group=Mem] .level[data-level=on] input").check()
    heading(page, "Val").locator("button").click()
    shown = slugs(page)
    page.get_by_label("Search cells").fill("zzz")
    assert slugs(page) == []
    page.go_back()
    awaited(page, "document.getElementById('search').value === ''")
    assert slugs(page) == shown
    page.go_back()
    page.go_back()
    awaited(page, f"document.getElementById('matches').textContent.startsWith('{COUNT} of')")
    assert sorted(slugs(page)) == sorted(site[1])
    assert heading(page, "Ndl@64K").get_attribute("aria-sort") == "descending"


@pytest.mark.thorough
def test_hostile_text_is_shown_as_it_is(visit: Any, site: Any) -> None:
    page = visit(f"{site[0]}#pick={WILD}&tab=curves")
    page.wait_for_selector("#chart-needle[data-traces]")
    assert HOSTILE in page.evaluate("charts.get('chart-training').series[0].name")
    assert page.locator("#picked .chip span").text_content() == HOSTILE
    page.get_by_role("tab", name="Failures").click()
    assert HOSTILE in page.locator("#panel-failures").inner_text()
    page.get_by_role("button", name="Traceback of out-of-memory").click()
    assert page.locator("#sheet pre").text_content() == f"line\n{HOSTILE}"
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Cells").click()
    assert HOSTILE in slugs(page)
    assert page.locator("[data-group=Win] .name", has_text="onerror").text_content() == HOSTILE
    page.get_by_role("button", name="oom", exact=True).last.click()
    assert HOSTILE in page.locator("#sheet-body").inner_text()
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0


@pytest.mark.thorough
def test_a_number_tells_where_it_comes_from(visit: Any, site: Any) -> None:
    page = visit(site[0])
    page.get_by_role("button", name="2.125", exact=True).click()
    dialog_text = page.get_by_role("dialog").inner_text()
    for fact in ("2.125 nats/token", "feedc0de with changes", "NVIDIA H100", "node-1", "777", WILD, "Validation loss"):
        assert fact in dialog_text, fact


@pytest.mark.thorough
def test_sheets_of_fractions_are_in_percent(visit: Any, printed_page: Path) -> None:
    core = Page(printed_page.read_text()).core()
    (needle,) = (i for i, key in enumerate(core["keys"]) if (key["probe"], key["metric"], key["length"]) == ("needle", "digit_accuracy", 65536))  # fmt: skip
    best = max(
        core["cells"], key=lambda cell: max((value[1] for value in cell["values"] if value[0] == needle), default=0)
    )
    ((share, low, high),) = ((value[1], value[3], value[4]) for value in best["values"] if value[0] == needle)
    interval = f"{float(f'{100 * low:.7g}')} to {float(f'{100 * high:.7g}')}"
    page = visit(f"{printed_page.as_uri()}#tab=cells")
    page.get_by_role("button", name=f"{100 * share:.1f}", exact=True).first.click()
    assert f"{100 * share:g} %" in page.get_by_role("dialog").inner_text()
    assert interval in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    page.get_by_role("button", name=best["slug"], exact=True).click()
    shown = page.get_by_role("dialog").inner_text()
    assert f"{100 * share:g}\t%" in shown
    assert interval in shown
    assert "fraction" not in shown


@pytest.mark.thorough
def test_the_keyboard_is_enough(visit: Any, site: Any) -> None:
    page = visit(site[0])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("!!document.activeElement.closest('tbody')"):
            break
    assert page.evaluate("document.activeElement.type") == "checkbox"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Space")
    assert page.locator("#picked .chip").count() == 1
    page.keyboard.press("ArrowDown")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    text = page.evaluate("document.activeElement.textContent")
    assert text == page.locator("#panel-cells tbody tr:not(.gap)").nth(1).locator(".n button").first.text_content()
    page.keyboard.press("Enter")
    assert page.locator("#sheet-title").text_content() == f"Ndl@64K: {text}"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == text
    page.keyboard.press("Control+End")
    assert page.evaluate("document.activeElement.closest('tr').getAttribute('aria-rowindex')") == str(COUNT + 1)
    page.get_by_role("tab", name="Cells").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", selected=True).text_content() == "Curves (1)"
    assert page.evaluate("document.activeElement.id") == "tab-curves"


@pytest.mark.thorough
def test_page_without_figures_says_how_to_have_them(visit: Any, site: Any) -> None:
    page = visit(site[0])
    page.get_by_role("tab", name="Figures").click()
    command = page.locator("#figure-list pre").text_content()
    assert command == "atma-sweep report --sweep big --dashboard FILE.html --figures"


def brightness(page: Any) -> float:
    contrast: float = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) / 765"
    )
    return contrast


@pytest.mark.thorough
def test_theme_follows_system_until_switched(visit: Any, site: Any) -> None:
    page = visit(site[0], color_scheme="dark", reduced_motion="reduce")
    assert brightness(page) < 0.2
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    page.get_by_label("Colours").select_option("light")
    assert brightness(page) > 0.9
    assert brightness(visit(site[0], color_scheme="light")) > 0.9
    assert brightness(visit(f"{site[0]}#theme=dark", color_scheme="light")) < 0.2


OVERLAPS = """() => {
  const seen = (element, box) => {
    let {left, right, top, bottom} = box;
    for (let e = element; e && e !== document.body; e = e.parentElement) if (getComputedStyle(e).overflow !== 'visible') {
      const edge = e.getBoundingClientRect();
      [left, right, top, bottom] = [Math.max(left, edge.left), Math.min(right, edge.right), Math.max(top, edge.top), Math.min(bottom, edge.bottom)];
    }
    return {left, right, top, bottom};
  };
  const boxes = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !element.checkVisibility() || element.closest('.skip, dialog, svg, script, option, .viewport')) continue;
    const range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    for (const box of range.getClientRects()) boxes.push([texts.currentNode.textContent, seen(element, box)]);
  }
  const hit = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  return boxes.flatMap(([text, a], i) => boxes.slice(i + 1).filter(([other, b]) => other !== text && hit(a, b)).map(([other]) => text + ' / ' + other));
}"""


CUT_OFF = """() => [...document.querySelectorAll('.viewport .n button, .viewport thead th, .viewport thead th > *')]
  .filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.thorough
def test_nothing_overlaps_or_runs_out_of_the_page(visit: Any, site: Any, width: int) -> None:
    page = visit(f"{site[0]}#tab=cells&pick={WILD}", width=width, height=900)
    for name in ("Results", "Cells", "Curves (1)", "Effects", "Failures", "Provenance", "Metrics"):
        page.get_by_role("tab", name=name).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(OVERLAPS) == [], name
        assert page.evaluate(CUT_OFF) == [], name


@pytest.mark.thorough
def test_the_complete_table_fits_a_laptop(visit: Any, printed_page: Path) -> None:
    page = visit(printed_page.as_uri(), width=1280, height=900)
    assert page.locator("#panel-cells thead th").count() == 16  # no state
    spare = "(e => e.clientWidth - e.scrollWidth)(document.querySelector('#panel-cells .viewport'))"
    assert page.evaluate(spare) == 0
    assert page.evaluate(CUT_OFF) == []
    # with a scroll bar of 15 pixels, too
    page.set_viewport_size({"width": 1265, "height": 900})
    assert page.evaluate(spare) == 0


@pytest.mark.thorough
def test_each_cell_has_a_sparkline_of_its_loss(visit: Any, printed_page: Path) -> None:
    page = visit(printed_page.as_uri(), height=900)
    losses, core = Page(printed_page.read_text()).block("losses"), Page(printed_page.read_text()).core()
    lines = {core["cells"][cell]["slug"]: (losses["grids"][grid], loss) for cell, grid, loss in losses["lines"]}
    page.wait_for_selector("#panel-cells .spark path")
    rows = page.locator("#panel-cells tbody tr:not(.gap)")
    low, high = page.evaluate("losses().then(({ range }) => range)")
    end = max(tokens[-1] for tokens, _ in lines.values())
    for row in rows.all()[:5]:
        tokens, loss = lines[row.locator("th button").text_content()]
        drawn = np.array(re.findall(r"[-\d.e]+", row.locator(".spark path").get_attribute("d")), float).reshape(-1, 2)
        assert drawn[:, 0] == pytest.approx(100 * np.array(tokens) / end)
        assert high - drawn[:, 1] / 100 * (high - low) == pytest.approx(np.array(loss))
        assert f"{loss[-1]:g}" in row.locator(".spark").get_attribute("aria-label")


@pytest.mark.thorough
def test_a_wider_table_keeps_the_names_in_sight(visit: Any, site: Any) -> None:
    page = visit(site[0], width=1000, height=900)
    header_x = "document.querySelector('#panel-cells tbody th').getBoundingClientRect().left"
    before = page.evaluate(header_x)
    page.evaluate("document.querySelector('#panel-cells .viewport').scrollLeft = 300")
    assert page.evaluate("document.querySelector('#panel-cells .viewport').scrollLeft") == 300
    assert page.evaluate(header_x) == before


@pytest.mark.thorough
def test_of_thousands_of_rows_only_those_in_sight_exist(
    visit: Any, blank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "effects", lambda data: [])  # seconds of statistics that this is not about
    store = open_store(shutil.copy(blank, tmp_path / "big.db"))
    cells = synthetic_sweep(store, 1000, 1)
    module.write_dashboard(store, tmp_path / "page.html")
    page = visit((tmp_path / "page.html").as_uri(), height=900)
    assert page.get_by_role("grid").get_attribute("aria-rowcount") == "1001"
    assert page.locator("#panel-cells tbody tr").count() < 80
    offset = random.Random(0).randrange(300, 900)
    page.evaluate(f"document.querySelector('#panel-cells .viewport').scrollTop = {offset} * 32")
    row = page.locator(f"#panel-cells tr[aria-rowindex='{offset + 2}'] th")
    row.wait_for()
    names = page.evaluate("sorted(matching()).map(rowName)")
    assert row.text_content() == names[offset]
    assert sorted(names) == sorted(cell.slug for cell in cells)
    assert page.locator("#panel-cells tbody tr").count() < 80


REFRESHED = """async () => {
  const core = await inflateJson("core");
  const cell = core.cells.find((cell) => cell.slug === "not-started");
  cell.state = "running";
  core.progress.counts = [["done", 25], ["running", 1], ["oom", 1]];
  core.tables.mean.rows[3].numbers[0] = ["1.234", 1.234, null, 1, false, core.tables.mean.rows[3].numbers[0][5]];
  window.stands = document.querySelector("[data-group=Reg] .level input");
  refresh({ core });
}"""


@pytest.mark.thorough
def test_new_data_leave_the_reader_where_he_is(visit: Any, site: Any) -> None:
    page = visit(site[0], height=700)
    names = list(site[1])
    page.get_by_label(f"Draw the curves of {names[2]}").check()
    page.locator("[data-group=State] .level[data-level=done] input").check()
    heading(page, "Memory").locator("button").click()
    page.evaluate("document.querySelector('#panel-cells .viewport').scrollTop = 170")
    page.wait_for_timeout(100)
    page.locator("#panel-cells tbody th button").nth(9).focus()
    focused = page.evaluate("document.activeElement.textContent")
    page.evaluate("scrollTo(0, 40)")
    seen = "[document.querySelector('#panel-cells .viewport').scrollTop, scrollY, location.hash, document.activeElement.textContent]"
    before = page.evaluate(seen)
    assert before[0] == 170
    page.evaluate(REFRESHED)
    page.wait_for_timeout(200)
    assert page.evaluate(seen) == before
    assert before[3] == focused
    assert page.evaluate("window.stands.isConnected")
    assert "1 running" in page.locator("#summary").text_content()
    assert page.locator("#picked .chip span").text_content() == names[2]
    assert page.get_by_role("button", name="1.234", exact=True).count() == 1
    page.get_by_role("tab", name="Results").click()
    assert "1 running" in page.locator("#progress").inner_text()


@pytest.mark.thorough
def test_on_a_phone_the_numbers_stay_in_sight(visit: Any, printed_page: Path) -> None:
    page = visit(printed_page.as_uri(), width=390, height=800)
    seen = """() => [...document.querySelectorAll('#panel-cells thead th')]
      .filter(e => e.getBoundingClientRect().right <= innerWidth).map(e => e.textContent.trim())"""
    assert page.evaluate(seen)[:4] == ["Cell", "Ndl@64K", "Val", "Clean@64K"]
    best = page.locator("#panel-cells tr", has_text="polar-baseline-d0-m1-w0-s0").locator("td").first
    assert (best.inner_text(), best.get_attribute("class")) == ("92.5", "n heat-good-4")
    shaded = best.evaluate("e => getComputedStyle(e).backgroundColor")
    assert shaded != page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.thorough
def test_shading_shows_better_for_either_sign(visit: Any, printed_page: Path) -> None:
    page = visit(printed_page.as_uri(), height=6000)
    core = Page(printed_page.read_text()).core()
    rows = core["tables"]["mean"]["rows"]
    headings = page.locator("#panel-cells thead th").all_text_contents()
    order = page.evaluate("sorted(matching()).map((row) => row.position)")
    for index, column in enumerate(core["columns"]):
        values = [row["numbers"][index][1] * column["better"] for row in rows]
        best, worst = values.index(max(values)), values.index(min(values))
        for row_index, kind in ((best, "heat-good-4"), (worst, "heat-poor-4")):
            row = page.locator(f"#panel-cells tr[aria-rowindex='{order.index(row_index) + 2}'] > *")
            cell = row.nth(headings.index(column["heading"]))
            assert kind in cell.get_attribute("class"), (column["heading"], kind)
    css = Page(printed_page.read_text()).styles[0]
    for name, color in (("good", style.GOOD), ("poor", style.BAD)):
        assert f"--{name}: light-dark({color.lower()}," in css


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2 of `rgb(r, g, b)` or `color(srgb r g b)`."""
    parts = [float(part) for part in re.findall(r"[\d.]+", color.replace("srgb", ""))[:3]]
    shares = parts if "srgb" in color else [part / 255 for part in parts]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.thorough
def test_text_contrast_suffices_on_every_shade(visit: Any, site: Any, scheme: str) -> None:
    page = visit(site[0], color_scheme=scheme)
    colors = page.evaluate(
        """() => ['good-1', 'good-2', 'good-3', 'good-4', 'poor-1', 'poor-2', 'poor-3', 'poor-4'].map((kind) => {
          const cell = document.querySelector('#panel-cells tbody td.n');
          cell.className = `n heat-${kind}`;
          const style = getComputedStyle(cell);
          return [style.backgroundColor, style.color];
        })"""
    )
    assert len({shade for shade, _ in colors}) == 8
    for shade, ink in colors:
        light, dark = sorted((luminance(shade), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 7, (shade, ink)


@pytest.mark.thorough
def test_no_number_is_longer_than_seven_digits(visit: Any, site: Any) -> None:
    page = visit(site[0])
    page.locator("#panel-cells tbody th button").first.click()
    dialog_text = page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    page.locator("#panel-cells tbody .n button").first.click()
    dialog_text += page.get_by_role("dialog").inner_text()
    assert re.search(r"\d\.\d{3,}", dialog_text)
    assert not re.search(r"\d\.\d{8,}", dialog_text)


@pytest.mark.thorough
def test_loss_overview_and_comparison_are_drawn(visit: Any, published: Store, tmp_path: Path) -> None:
    module.write_dashboard(published, tmp_path / "page.html", "printed-v1", compare="printed-v2")
    page = visit((tmp_path / "page.html").as_uri() + "#tab=answer", width=390)
    page.wait_for_selector("#loss-chart[data-traces]")
    assert page.locator("#loss-chart").get_attribute("data-traces") == str(100 + 3)
    assert inked(page, "#loss-chart canvas") > 1000
    page.locator("#loss-axis").select_option("memory")
    awaited(page, "charts.get('loss-chart').series.length === 102")
    # parts that newer data build anew are drawn anew
    page.evaluate("async () => { const core = await inflateJson('core'); core.charts.pop(); refresh({ core }); }")
    awaited(page, "charts.get('loss-chart').series.length === 102")
    page.get_by_role("tab", name="Compare").click()
    page.wait_for_selector("#square-0[data-traces]")
    assert page.locator("#beside-squares figcaption").all_text_contents() == [
        "Val, nats/token",
        "Clean@64K, nats/token",
        "Junk@64K, nats/token",
        "Ndl@64K, %",
        "MFU, %",
    ]
    page.locator("#beside-measure").select_option("MFU")
    awaited(page, "document.getElementById('beside-all').innerText.includes('not judged')")
    page.locator("#beside-verdict").select_option("beyond")
    awaited(page, "document.querySelectorAll('#beside-all .viewport tbody th').length === 0")
    # the address brings this view back
    second_page = visit(page.url)
    second_page.locator("#beside-verdict").wait_for()
    assert second_page.locator("#beside-measure").input_value() == "MFU"
    assert second_page.locator("#beside-verdict").input_value() == "beyond"
    for width in (390, 768, 1280):
        second_page.set_viewport_size({"width": width, "height": 900})
        assert second_page.evaluate("document.documentElement.scrollWidth") <= width
    assert second_page.evaluate(OVERLAPS) == []


@pytest.mark.thorough
def test_on_paper_stand_all_rows_and_no_switches(visit: Any, printed_page: Path) -> None:
    page = visit(printed_page.as_uri(), height=900)
    assert page.locator("#panel-cells tbody tr").count() < 100
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(slugs(page)) == 120
    for part in (".tools", "aside", "#tabs"):
        assert page.locator(part).is_hidden(), part
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#panel-cells tbody tr").count() < 100
