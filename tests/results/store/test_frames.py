"""The frames hold what SQL finds, one row a cell, a value, a point or an item, with the columns that their docstrings name."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from atma_sweep.results import open_store
from atma_sweep.results.errors import StoreError, SweepUnknown
from atma_sweep.results.store import frames as module
from atma_sweep.results.store.frames import CELL, CURVE, EXAMPLE, STATE, VALUE
from atma_sweep.results.store.records import AXES
from histories import at, launch, run
from sqlalchemy import text

pytestmark = pytest.mark.usefixtures("working_folder")


def sql(store, query):
    with store.transaction(write=False) as session:
        return [tuple(row) for row in session.execute(text(query))]


@pytest.fixture
def filled(store, cells):
    """Done twice, failed, running, new, in another order than that of the ids."""
    grid = cells(4)
    launch(store, [grid[index] for index in (2, 0, 3, 1)], 1)
    run(store, grid[0].id, 5, value=1 / 3)
    run(store, grid[0].id, 6, value=2 / 3)
    run(store, grid[1].id, 7, value=0.1, state="failed")
    run(store, grid[3].id, 8, value=0.2, state="running")
    return store


def ids(*indices):
    return [f"c{index:02d}{'0' * 8}0" for index in indices]


def test_cells_in_the_order_of_the_grid(filled):
    frame = filled.frames().cells()
    assert list(frame["cell"]) == ids(2, 0, 3, 1)
    assert list(frame["position"]) == [0, 1, 2, 3]
    assert list(frame["state"]) == ["new", "done", "running", "failed"]
    assert list(frame["standing"]) == ["new", "done", "running", "failed"]
    assert list(frame["attn_type"]) == ["polar2", "polar0", "polar3", "polar1"]
    assert list(frame["tokens_total"]) == [3 * 10**9, 10**9, 4 * 10**9, 2 * 10**9]
    assert frame["attempt"].isna().tolist() == [True, False, False, False]
    assert frame["attempt"][1:].tolist() == [row[0] for row in sql(filled, "SELECT max(id) FROM attempt GROUP BY cell_id ORDER BY CASE cell_id WHEN 'c00000000000' THEN 1 WHEN 'c03000000000' THEN 2 ELSE 3 END")]  # fmt: skip
    assert frame["started_at"][1:].tolist() == [at(6), at(8), at(7)]
    assert frame["finished_at"].isna().tolist() == [True, False, True, False]


def test_measurements_are_those_of_the_view(filled):
    columns = "cell, slug, seed, attn_type, memory, probe, metric, length, value, unit, n"
    expected = sql(filled, f"SELECT {columns} FROM results WHERE probe IS NOT NULL")
    measured = filled.frames("quick").measurements()
    rows = measured[columns.split(", ")].astype(object).where(lambda frame: frame.notna(), None)
    assert sorted(map(repr, rows.itertuples(index=False, name=None))) == sorted(map(repr, expected))
    assert list(measured["value"].dropna()) == [2 / 3]  # of the newer attempt; a failed one counts for nothing
    assert list(measured["reason"].dropna()) == ["oom: no memory"]
    assert measured["n"].dropna().tolist() == [2**40]


def test_curves_of_the_newest_training(filled):
    frame = filled.frames().curves()
    assert list(frame["cell"].unique()) == ids(0, 3, 1)
    names = ", ".join(CURVE).replace("attempt,", "attempt_id,")
    newest = f"SELECT {names} FROM curve_point WHERE attempt_id IN (SELECT max(id) FROM attempt GROUP BY cell_id)"
    expected = pd.DataFrame(sql(filled, newest), columns=list(CURVE)).astype(CURVE)
    sorted_frame = frame[list(CURVE)].sort_values(["attempt", "step"], ignore_index=True)
    pd.testing.assert_frame_equal(sorted_frame, expected.sort_values(["attempt", "step"], ignore_index=True))
    assert list(frame.loc[frame["cell"] == ids(0)[0], "train_loss"]) == [2 / 21] * 3
    assert list(frame["step"]) == [0, 1, 2] * 3


def test_frames_prefer_a_finished_training_to_a_failed_retry(filled, cells):
    run(filled, cells(1)[0].id, 9, value=7.0, state="failed")
    frames = filled.frames()
    curve, values = frames.curves(), frames.measurements()
    assert set(curve.loc[curve["cell"] == ids(0)[0], "train_loss"]) == {2 / 21}
    assert list(values["value"].dropna()) == [2 / 3]


def test_examples_of_the_attempt_that_measured_last(filled, cells):
    frame = filled.frames().examples()
    assert len(frame) == 1  # only one cell is done
    (row,) = frame.to_dict("records")
    last = sql(filled, "SELECT max(id) FROM attempt WHERE cell_id = 'c00000000000'")[0][0]
    assert (row["cell"], row["attempt"], row["item"], row["item_position"]) == (ids(0)[0], last, 1, 0)
    assert (row["probe"], row["metric"], row["length"], row["value"]) == ("clean", "nats", 64, 0.1)
    assert row["detail"] == {"é": "ü\n\u2028"}


def test_wide_has_a_column_a_measurement(filled):
    frame = filled.frames().wide()
    assert list(frame.columns[-2:]) == ["clean.nats@4096", "val.val_loss"]
    assert frame["val.val_loss"].tolist()[1] == 2 / 3
    assert frame["val.val_loss"].isna().tolist() == [True, False, True, True]
    assert frame["clean.nats@4096"].isna().all()
    assert list(frame["cell"]) == ids(2, 0, 3, 1)


def test_axes_that_vary_become_columns(store, cells):
    axes = [{"train.lr": "0.1", "value": "a", "same": "x"}, {"train.lr": "0.2", "value": "b", "same": "x"}]
    launch(store, [replace(cell, axes=cell_axes) for cell, cell_axes in zip(cells(2), axes, strict=True)])
    run(store, cells(2)[1].id, 5)
    frames = store.frames()
    for frame in (frames.cells(), frames.measurements(), frames.curves(), frames.examples()):
        assert list(frame.columns[: len(CELL) + 2]) == [*CELL, "train.lr", "axis.value"]
        assert frame["train.lr"].tolist()[-1] == "0.2"
    assert frames.cells()["axis.value"].tolist() == ["a", "b"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "columns"), [("cells", STATE), ("measurements", VALUE), ("curves", CURVE), ("examples", EXAMPLE)]
)
def test_frame_columns_are_typed_and_documented(filled, cells, name, columns):
    launch(filled, cells(2, prefix="e"), 3, name="empty")
    full, empty = (getattr(filled.frames(sweep), name)() for sweep in ("quick", "empty"))
    launch(filled, [], 3, name="none")
    none = getattr(filled.frames("none"), name)()
    for frame in (full, empty, none):
        assert {column: str(kind) for column, kind in frame.dtypes.items()} == CELL | columns
    assert (len(full) > 0, len(none)) == (True, 0)
    documented = getattr(module.Frames, name).__doc__
    assert [column for column in columns if f"`{column}`" not in documented] == []
    assert [column for column in CELL if f"`{column}`" not in module.__doc__] == []


def test_older_revisions_and_names_that_are_not_there(filled, cells):
    launch(filled, cells(1), 9, grid="newest")
    assert list(filled.frames().cells()["cell"]) == ids(0)
    assert len(filled.frames("quick", revision=1).cells()) == 4
    with pytest.raises(SweepUnknown):
        filled.frames("quik")
    with pytest.raises(StoreError, match="no revision 7"):
        filled.frames("quick", revision=7)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_pandas_is_imported_only_for_frames(filled):
    code = (
        "import sys, json\n"
        "from atma_sweep.results import open_store\n"
        "heavy = ('pandas', 'torch', 'ray', 'matplotlib', 'alembic', 'atma_sweep.sweep', 'atma_sweep.reports')\n"
        "store = open_store(sys.argv[1])\n"
        "first = [name for name in heavy if name in sys.modules]\n"
        "rows = len(store.frames('quick').cells())\n"
        "print(json.dumps([first, rows, [name for name in heavy if name in sys.modules]]))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, str(filled.path)], capture_output=True, text=True, env=os.environ, check=True
    )
    assert json.loads(completed.stdout) == [[], 4, ["pandas"]]


def test_the_package_names_what_it_gives():
    import atma_sweep.results as package
    from atma_sweep.results.store import store

    assert package.open_store is open_store is store.open_store
    assert package.Store is store.Store
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018
    assert tuple(AXES) == tuple(CELL)[3:]


PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "read-the-numbers.md"


@pytest.mark.parametrize("address", ['"atma.db"', '"sqlite:///atma.db"', "url", ""])
def test_the_lines_of_the_page_work_with_every_address(store, filled, url, address, tmp_path):
    """A file, a URL, that of a server, and none at all."""
    (block,) = re.findall(r"```python\n(from atma_sweep\.results import open_store\n.*?)```", PAGE.read_text(), re.S)
    assert 'open_store("atma.db")' in block
    if store.path is None:
        address = "url"  # the only one that a server has
    if store.path is not None:
        os.symlink(store.path, tmp_path / "atma.db")
    space = {"url": url}
    exec(block.replace('open_store("atma.db")', f"open_store({address})"), space)
    losses = {row[0]: row[1] for row in space["losses"][["cell", "value"]].itertuples(index=False)}
    assert losses == {ids(0)[0]: 2 / 3}
