"""First page in a real browser: the finding, and filters, brushes, legends and CSV that act on every panel."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from atma_sweep.reports.dashboard.gallery import draw_picture
from atma_sweep.reports.dashboard.page import write_dashboard
from atma_sweep.results.paper import open_published
from pages import Page


def printed_needles(path: Path, **levels: str) -> dict[tuple[str, ...], float]:
    """Return the printed needle accuracies at 64K in % by the levels of the other axes, of cells with `levels`."""
    axes = ("attn_type", "reg_mode", "distractor", "memory", "window")
    cells = Page(path.read_text()).core()
    key = next(
        index
        for index, key in enumerate(cells["keys"])
        if (key["probe"], key["metric"], key["length"]) == ("needle", "digit_accuracy", 65536)
    )
    return {
        tuple(cell["axes"][axis] for axis in axes if axis not in levels): 100 * value[1]
        for cell in cells["cells"]
        if all(cell["axes"][axis] == level for axis, level in levels.items())
        for value in cell["values"]
        if value[0] == key
    }


@pytest.mark.thorough
def test_first_screen_opens_with_the_finding(visit: Any, printed_page: Path) -> None:
    page = visit(f"{printed_page.as_uri()}#tab=answer", height=900)
    polar, rope = printed_needles(printed_page, attn_type="polar"), printed_needles(printed_page, attn_type="rope")
    mean = fmean(polar[rest] - rope[rest] for rest in polar)
    text = page.locator("#finding .finding").text_content()
    assert text.startswith(
        f"Needle accuracy at 64K tokens is {mean:.1f} points higher with PoLAR than with RoPE (95% interval "
    )
    assert text.endswith(f"{len(polar)} pairs): the largest significant effect.")
    assert page.locator("#care details").get_attribute("open") is None
    assert page.locator("#care summary").text_content() == "10 cautions on these numbers"
    for part in ("#finding", "#needle-chart-0 canvas", "#needle-chart-2 canvas", "#effects-matrix thead"):
        assert page.locator(part).bounding_box()["y"] < 700, part


@pytest.mark.thorough
def test_a_filter_acts_on_every_panel(visit: Any, printed_page: Path) -> None:
    page = visit(f"{printed_page.as_uri()}#tab=answer", height=900)
    page.wait_for_selector("#loss-chart[data-traces]")
    page.get_by_role("button", name="Only Mixer PoLAR").click()
    assert page.locator("#matches").text_content() == "40 of 120 cells match"
    page.wait_for_selector("#needle-chart-1[data-traces='1']")  # the constant answer alone
    on, off = (
        printed_needles(printed_page, attn_type="polar", memory="on"),
        printed_needles(printed_page, attn_type="polar", memory="off"),
    )
    mean = fmean(on[rest] - off[rest] for rest in on)
    assert page.get_by_role("button", name="with memory against no memory").first.inner_text().split("\n") == [
        f"+{mean:.1f}",
        "20 pairs",
    ]
    drawn = page.evaluate("charts.get('needle-chart-0').series.map((line) => [line.group, line.y.at(-1)])")
    truth = fmean(printed_needles(printed_page, attn_type="polar", memory="on", window="off").values())
    assert dict(map(tuple, drawn))["memory on, window off"] == pytest.approx(truth)
    assert page.locator("#parallel .course:not(.off)").count() == 40
    page.wait_for_function("() => charts.get('loss-chart').series.every(({ group }) => group === 'PoLAR')")
    best = max(printed_needles(printed_page, attn_type="polar").values())
    assert page.locator("#best td strong").first.text_content() == f"{best:.1f}"
    page.get_by_role("tab", name="Cells").click()
    assert page.get_by_role("grid").get_attribute("aria-rowcount") == "41"
    page.get_by_role("tab", name="Results").click()
    page.get_by_role("button", name="Only Mixer PoLAR").click()
    page.get_by_role("button", name="Only Mixer RoPE").click()
    best = max(printed_needles(printed_page, attn_type="rope").values())
    assert page.locator("#best td strong").first.text_content() == f"{best:.1f}"
    page.get_by_role("button", name="Show all cells").click()
    assert page.locator("#matches").text_content() == "120 of 120 cells match"


@pytest.mark.thorough
def test_brush_of_a_measure_keeps_its_cells(visit: Any, printed_page: Path) -> None:
    page = visit(f"{printed_page.as_uri()}#tab=answer", height=900)
    rule = page.locator(".axis-rule.brushed[data-axis='Ndl@64K']")
    rule.scroll_into_view_if_needed()
    box = rule.bounding_box()
    x, top = box["x"] + box["width"] / 2, box["y"]
    page.mouse.move(x, top + 1)
    page.mouse.down()
    page.mouse.move(x, top + box["height"] / 2, steps=5)
    page.mouse.up()
    low, high = page.evaluate("view.ranges['Ndl@64K']")
    inside = sum(low <= value <= high for value in printed_needles(printed_page).values())
    assert 40 < low < 55
    assert page.locator("#matches").text_content() == f"{inside} of 120 cells match"
    field = page.get_by_label("Ndl@64K, least, %")
    assert float(field.input_value()) == low
    field.fill("80")
    field.press("Tab")
    assert (
        page.locator("#matches").text_content()
        == f"{sum(v >= 80 for v in printed_needles(printed_page).values())} of 120 cells match"
    )


@pytest.mark.thorough
def test_legend_hover_and_csv_of_a_chart(visit: Any, printed_page: Path) -> None:
    page = visit(f"{printed_page.as_uri()}#tab=answer", height=900)
    page.wait_for_selector("#needle-chart-0[data-traces='5']")
    entry = page.locator("#needle .legend").get_by_role("button", name="with memory, no window")
    shown = "charts.get('needle-chart-0').plot.series.filter(({ show }) => show).length"
    assert page.evaluate(shown) == 6  # with the context lengths
    entry.click()
    assert page.evaluate(shown) == 5
    assert entry.get_attribute("aria-pressed") == "false"
    page.locator("#needle-chart-0").focus()
    page.keyboard.press("ArrowRight")
    assert " at 2K" in page.locator("#said").text_content()
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV of Needle accuracy over context length").click()
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert len(table) == 3 * 4 * 6
    truth = fmean(printed_needles(printed_page, attn_type="nope", memory="on", window="on").values())
    line = next(
        row
        for row in table
        if (row["Mixer"], row["Line"], row["Context length"]) == ("NoPE", "with memory, with window", "65536")
    )
    assert float(line["Needle accuracy, %"]) == pytest.approx(truth, abs=0.05)


@pytest.mark.thorough
def test_two_picked_cells_show_their_difference(visit: Any, printed_page: Path) -> None:
    core = Page(printed_page.read_text()).core()
    first, second = core["cells"][0]["id"], core["cells"][50]["id"]
    page = visit(f"{printed_page.as_uri()}#tab=curves&pick={first}&pick={second}")
    page.wait_for_selector("#difference td")
    numbers = {row["cells"][0]: row["numbers"] for row in core["tables"]["mean"]["rows"]}
    lines = [line.locator("td").all_text_contents() for line in page.locator("#difference tbody tr").all()]
    for column, line in zip(core["columns"], lines, strict=True):
        index = core["columns"].index(column)
        difference = float(numbers[50][index][0]) - float(numbers[0][index][0])
        assert float(line[3].replace("\u2212", "-")) == pytest.approx(
            difference, abs=0.11 if column["percent"] else 0.011
        )
    page.locator("#smooth").fill("0.9")
    assert "smooth=0.9" in page.url
    page.get_by_label("log y").check()
    page.wait_for_function("() => charts.get('chart-training').plot.scales.y.distr === 3")


@pytest.mark.thorough
def test_figures_of_a_page_load_in_sight(visit: Any, tmp_path: Path) -> None:
    store = open_published()
    pictures = [draw_picture(store, "printed-v2", name) for name in ("needle", "effects", "length")]
    write_dashboard(store, tmp_path / "page.html", "printed-v2", pictures=pictures)
    page = visit((tmp_path / "page.html").as_uri(), height=700)
    assert page.locator("#figure-list img").count() == 0, "none before its tab is open"
    page.get_by_role("tab", name="Figures").click()
    first = page.locator("#figure-of-needle img")
    first.wait_for()
    assert first.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
    assert page.locator("#figure-of-needle figcaption").text_content() == pictures[0].caption
    page.locator("#figure-of-length").scroll_into_view_if_needed()
    page.locator("#figure-of-length img").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
