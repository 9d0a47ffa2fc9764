"""Shipped grids of the rivals' experiments: every configuration matches exactly one published configuration."""

import pytest
from atma_sweep.reports.stats.audit import flatten_config
from atma_sweep.reports.stats.sweep_differences import HARMLESS_SETTINGS, match_configurations
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning.planner import to_record

UNLIKE = {"atlas-170m": ("model.memories.atlas.features", "train.constant", "data.corpus")}
"""Settings of a shipped grid that differ from the published ones."""


@pytest.mark.parametrize(
    ("grid", "sweep", "partners"),
    [
        ("flipflop", "printed-tra", 9),
        pytest.param("wikitext-tra", "printed-tra", 9, marks=pytest.mark.thorough),
        # of nope the page prints nothing
        pytest.param("wall-400m", "printed-wall", 4, marks=pytest.mark.thorough),
        ("atlas-170m", "printed-atlas", 2),
        # the PolySketchFormer has no printed number
        ("atlas-blog", "printed-atlas", 2),
    ],
)
def test_shipped_grids_match_published_sweeps(
    empty: Store, published: Store, grid: str, sweep: str, partners: int
) -> None:
    cells = load_grid(grid).expand(lambda data: "0" * 64)
    empty.record_revision(grid, grid_text="x", grid_file="x", cells=[to_record(cell) for cell in cells])
    mine, theirs = load_sweep_data(empty, grid), load_sweep_data(published, sweep)
    matches = match_configurations(mine, theirs)
    assert len(matches) == partners
    for axis in ("attn_type", "model.positions", "model.mixers.wall.rotary"):
        for pair in matches:
            own_level, there = (
                {**cell.levels, **cell.axes}.get(axis, "none") for cell in (pair.own_cells[0], pair.reference_cells[0])
            )
            assert own_level == there or (grid, own_level, there) == ("atlas-blog", "none", "rope")
    corpora = {pair.reference_cells[0].axes.get("data.corpus") for pair in matches}
    assert corpora <= {None, cells[0].config.data.corpus}
    # nor does anything that is printed of the recipe differ, so that a full run is judged; but for atlas-170m, whose page says so
    for pair in matches:
        own_config = flatten_config(
            next(cell for cell in cells if cell.id == pair.own_cells[0].cell_id).config.model_dump(mode="json")
        )
        printed_config = flatten_config(theirs.configs[pair.reference_cells[0].cell_id])
        differing = {
            path
            for path, value in printed_config.items()
            if not path.startswith(HARMLESS_SETTINGS) and own_config.get(path) != value
        }
        assert differing <= {"model.mixers.wall.rotary", *UNLIKE.get(grid, ())}
