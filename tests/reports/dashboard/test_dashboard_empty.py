"""Sweeps that have little to show, in a real browser: every part says why it is empty, and nothing breaks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.dashboard.page import write_dashboard
from atma_sweep.results.store.records import CellRecord
from atma_sweep.results.store.store import Store, open_store

Make = tuple[Callable[..., CellRecord], Callable[..., Any]]
Run = Callable[..., None]


def single_cell(store: Store, make: Make, run: Run) -> None:
    cell = make[0](1)
    store.record_revision("small", grid_text="x", grid_file="x", cells=[cell])
    run(store, cell.id, "done", make[1](1.5))


def no_pairs(store: Store, make: Make, run: Run) -> None:
    cells = [make[0](1), make[0](2, attn_type="rope", memory="off", window="on")]
    store.record_revision("small", grid_text="x", grid_file="x", cells=cells)
    for index, cell in enumerate(cells):
        run(store, cell.id, "done", make[1](1.5 + index))


def all_diverged(store: Store, make: Make, run: Run) -> None:
    cells = [make[0](index, memory=("off", "on")[index % 2]) for index in range(2)]
    store.record_revision("small", grid_text="x", grid_file="x", cells=cells)
    for cell in cells:
        run(store, cell.id, "diverged", [])


def seeds_missing(store: Store, make: Make, run: Run) -> None:
    cells = [make[0](3 * memory + seed, seed=seed, memory=("off", "on")[memory], axes={"seed": str(seed)}) for memory in range(2) for seed in range(3)]  # fmt: skip
    store.record_revision("small", grid_text="x", grid_file="x", cells=cells)
    for index, cell in enumerate(cells):
        if index not in (1, 5):
            run(store, cell.id, "done", make[1](1.5 + index / 8))


def a_constant_number(store: Store, make: Make, run: Run) -> None:
    cells = [make[0](index, memory=("off", "on")[index % 2], window=("off", "on")[index // 2]) for index in range(4)]
    store.record_revision("small", grid_text="x", grid_file="x", cells=cells)
    for cell in cells:
        run(store, cell.id, "done", make[1](2.0))


def nothing_finished(store: Store, make: Make, run: Run) -> None:
    cells = [make[0](index, memory=("off", "on")[index % 2]) for index in range(2)]
    store.record_revision("small", grid_text="x", grid_file="x", cells=cells)
    run(store, cells[0].id, "running", [])


def strange_names(store: Store, make: Make, run: Run) -> None:
    """Record a sweep whose levels are names of a JavaScript object's own properties."""
    cells = [make[0](index, memory=("off", "on")[index % 2], window=("__proto__", "constructor")[index // 2]) for index in range(4)]  # fmt: skip
    store.record_revision("small", grid_text="x", grid_file="x", cells=cells)
    for cell in cells:
        run(store, cell.id, "done", make[1](2.0))


NONE_YET = "No cell has a number yet."
NO_NEEDLE = "No cell has needle accuracies yet."
NO_LOSS = "No attempt has recorded a loss during training."
SAME = "configurations have the same number"
SAYS: list[tuple[Callable[..., None], dict[str, str]]] = [
    (single_cell, {"best": "the only configuration", "effects-matrix": "No axis varies: the sweep has one configuration.", "loss": NO_LOSS}),
    (no_pairs, {"effects-matrix": "No matched pairs yet", "care": "(n = 1)"}),
    (all_diverged, {"best": NONE_YET, "effects-matrix": "No matched pairs yet", "needle": NO_NEEDLE, "care": "2 of 2 cells lack numbers (2 diverged)"}),
    (seeds_missing, {"best": "Val", "care": "2 of 6 cells lack numbers (2 new)"}),
    (a_constant_number, {"best": f"All 4 {SAME}, 2.000: none is the best.", "effects-matrix": "0.000"}),
    (nothing_finished, {"best": NONE_YET, "effects-matrix": "No matched pairs yet", "needle": NO_NEEDLE, "progress": "1 running", "loss": NO_LOSS}),
    (strange_names, {"design": "__proto__", "effects-matrix": "constructor"}),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("fill", "says"), SAYS, ids=[fill.__name__ for fill, _ in SAYS])
def test_a_part_that_is_empty_says_why(
    visit: Any, blank: Path, tmp_path: Path, make: Make, run: Run, fill: Callable[..., None], says: dict[str, str]
) -> None:
    store = open_store(shutil.copy(blank, tmp_path / "small.db"))
    fill(store, make, run)
    another_cell = make[0](99)
    store.record_revision("other", grid_text="x", grid_file="x", cells=[another_cell])
    write_dashboard(store, tmp_path / "page.html", "small", compare="other")
    page = visit((tmp_path / "page.html").as_uri() + "#tab=answer", width=390)
    for part, text in says.items():
        page.locator(f"#{part}", has_text=text).wait_for(state="attached")
    for name in ("Cells", "Curves", "Effects", "Compare", "Failures", "Provenance", "Metrics", "Results"):
        page.get_by_role("tab", name=name).click()
        panel = page.locator("[role=tabpanel]:visible")
        page.wait_for_timeout(50)
        assert panel.inner_text().strip(), name
    page.get_by_role("tab", name="Cells").click()
    page.locator("#panel-cells tbody th button").first.click()
    assert page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    page.locator("#panel-cells tbody input").first.check()
    page.get_by_role("tab", name=re.compile(r"^Curves \(")).click()
    page.wait_for_selector("#chart-training[data-traces], #curves-hint")
    page.wait_for_timeout(300)
    assert page.locator("#trouble").is_hidden()
