"""Remarks of a launch on a fractional design and on the design launched before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results.designs.design_option import design_from_options
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host.processes import this_process
from atma_sweep.sweep.orchestrator.launch import LaunchRequest, claim_sweep
from atma_sweep.sweep.planning import difference
from bench import Bench
from factories import fingerprint

HEAD = "name: g\nextends: micro\naxes: {attn_type: [polar, nope, rope], memory: [off, on], window: [off, on]}\n"


def test_design_remarks_on_previous_cells(write: Callable[..., Path], tmp_path: Path) -> None:
    store = open_store(tmp_path / "a.db", create=True)

    def launch(text: str) -> list[str]:
        grid = load_grid(write(HEAD + text))
        cells = grid.expand(fingerprint)
        lines = difference.describe_design(grid, cells, store)
        owner = this_process("launch")
        store.release_sweep(
            "g", claim_sweep(LaunchRequest(grid=grid, cells=cells, runs=tmp_path, commit=("c", False)), store, owner)
        )
        return lines

    first = launch("design: {runs: 6}\n")
    assert len(first) >= 3
    assert first[0].startswith("design: 6 of 12 combinations, d-optimal; estimated: attn_type, memory, window")
    stored = design_from_options(store.revision("g").options)
    assert stored is not None
    assert (stored.runs, stored.method, len(stored.space.points)) == (6, "d-optimal", 12)
    assert launch("design: {runs: 9}\n")[-1] == "design: all 6 cells of the last launched design are among these 9"
    second = launch("design: {runs: 10, model: two-way}\n")[-1]
    assert (
        "of the 9 cells of the last launched design are not among these 10; their results stay in the database"
        in second
    )
    # the whole grid holds every design of it, and is no design
    assert launch("") == ["design: all 10 cells of the last launched design are among these 12"]
    assert design_from_options(store.revision("g").options) is None
    assert launch("") == []


@pytest.mark.thorough
def test_design_is_extended_without_retraining(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.edit("[nope, polar]", "[nope, polar]\n  window: [off, on]\ndesign: {runs: 3}")
    assert "design: 3 of 4 combinations, d-optimal" in bench.launch()
    bench.once(3)
    bench.edit("\ndesign: {runs: 3}", "")
    assert bench.plan()["counts"] == {"done": 3, "new": 1}
    bench.launch()
    bench.once(4)
    assert bench.sql("SELECT count(*) FROM attempt") == [(4,)]
