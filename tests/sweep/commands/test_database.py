"""Commands export and import: bundles, tables, and folders for other programs."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from atma_sweep.results import open_store, paper
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Database with the published sweeps; v1 has 100 cells, v2 has 120."""
    path = tmp_path_factory.mktemp("published") / "atma.db"
    store = open_store(path, create=True)
    paper.load_published(store)
    store.close()
    return path


@pytest.fixture
def run(published: Path, tmp_path: Path, run: Run) -> Run:
    """Command runner in a folder with that database."""
    shutil.copy(published, tmp_path / "atma.db")
    return run


@pytest.mark.thorough
def test_exported_bundle_is_imported_into_a_new_database(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("export", "--sweep", "printed-v1", "--json")
    summary = json.loads(out)
    assert (code, summary["file"], summary["added"]["cell"]) == (0, "printed-v1.zip", 100)
    code, out, _ = run("import", "printed-v1.zip", "--db", "other.db", "--name", "theirs")
    assert code == 0
    assert out.startswith("sweep theirs: added 1 sweep, 1 revision, 100 cell, ")
    stored_values = {
        (v.probe, v.metric, v.length, v.cell_id): v.value for v in open_store("atma.db").values("printed-v1")
    }
    there = {(v.probe, v.metric, v.length, v.cell_id): v.value for v in open_store("other.db").values("theirs")}
    assert stored_values == there
    again = json.loads(run("import", "printed-v1.zip", "--db", "other.db", "--name", "theirs", "--json")[1])
    assert (set(again["added"].values()), again["present"]["attempt"]) == ({0}, 100)


def test_export_writes_a_table(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("export", "--sweep", "printed-v2", "--to", "csv")
    with (tmp_path / "printed-v2-measurements.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (code, out) == (0, f"printed-v2-measurements.csv: {len(rows):,} rows of measurements of sweep printed-v2\n")
    losses = sorted(float(row["value"]) for row in rows if (row["probe"], row["metric"]) == ("val", "val_loss"))
    assert losses == sorted(float(row["val_loss"]) for row in paper.rows("complete-v2"))
    summary = json.loads(run("export", "--sweep", "printed-v2", "--to", "jsonl", "--what", "cells", "--json")[1])
    assert summary == {"sweep": "printed-v2", "file": "printed-v2-cells.jsonl", "rows": 120}


def test_export_writes_a_tensorboard_folder(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install -e '.[trackers]'")
    code, out, _ = run("export", "--sweep", "printed-v1", "--to", "tensorboard")
    assert (code, out) == (0, "printed-v1-tensorboard: 100 cells of sweep printed-v1\n")
    assert len(list((tmp_path / "printed-v1-tensorboard").glob("*/*tfevents*"))) == 100
    code, out, err = run("export", "--sweep", "printed-v1", "--to", "tensorboard")
    assert (code, len(err.splitlines()), "--out" in err) == (2, 1, True)


def test_export_format_follows_the_file_suffix(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("export", "--sweep", "printed-v1", "--out", "x.jsonl", "--what", "cells")
    assert (code, out) == (0, "x.jsonl: 100 rows of cells of sweep printed-v1\n")
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 100


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "to"),
    list(product(["bundle", "csv", "parquet"], ["-", "/dev/stdout", "link"])),
)
def test_export_into_a_pipe(run: Run, tmp_path: Path, to: str, kind: str) -> None:
    """The pipe receives the bytes that a file would hold, and /dev/stdout still exists afterwards."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    what = [] if kind == "bundle" else ["--to", kind]
    command = [sys.executable, "-m", "atma_sweep.cli", "export", "--sweep", "printed-v1", *what, "--out", to]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr.count(b"sweep printed-v1")) == (0, 1), done.stderr
    assert Path("/dev/stdout").is_symlink()
    file = tmp_path / f"file.{'zip' if kind == 'bundle' else kind}"
    assert run("export", "--sweep", "printed-v1", *what, "--out", file.name)[0] == 0
    if kind == "bundle":
        (tmp_path / "piped.zip").write_bytes(done.stdout)
        assert run("import", "piped.zip", "--db", "other.db", "--name", "theirs")[0] == 0
        again = json.loads(run("import", file.name, "--db", "other.db", "--name", "theirs", "--json")[1])
        assert set(again["added"].values()) == {0}
    else:
        assert done.stdout == file.read_bytes()


def test_forget_lists_and_deletes_only_with_yes(run: Run, tmp_path: Path) -> None:
    levels = dict.fromkeys(AXES, "off")
    cell = CellRecord(id="0123456789ab", slug="mine", seed=0, levels=levels, config={}, tokens=1)
    store = open_store(tmp_path / "mine.db", create=True)
    store.record_revision("g", grid_text="", grid_file="g", options={"requested": [["clean", 64]]}, cells=[cell])
    attempt = store.start_attempt(cell.id, owner=Owner(name="x", host="here", pid=1, started=0.0), fence=1)
    measurements = [Measurement(probe="clean", metric="nats", length=length, value=1.0) for length in (64, 512)]
    DatabaseRecorder(store, attempt.id, 1).measurements(measurements)
    store.finish_attempt(attempt.id, 1, "done", weights="w")
    arguments = ("db", "forget", "mine", "--db", "mine.db")
    assert run(*arguments) == (
        2, "", "atma-sweep: select measurements with --probe NAME, --length TOKENS (0 for those without a length), or "
            "both\n",
    )  # fmt: skip
    summary = "0123456789ab mine, to delete:\n  clean at 512: 1 number of 1 attempt\n"
    assert run(*arguments, "--length", "512") == (
        2, summary, "atma-sweep: nothing was deleted; confirm with --yes\n",
    )  # fmt: skip
    assert {value.length for value in store.measurements(cell.id)} == {64, 512}
    assert run(*arguments, "--length", "512", "--yes") == (0, summary + "deleted\n", "")
    assert run(*arguments, "--length", "512", "--yes") == (0, "0123456789ab mine: no such measurements\n", "")
    code, out, _ = run(*arguments, "--probe", "clean", "--yes", "--json")
    row = {"probe": "clean", "length": 64, "measurements": 1, "attempts": 1, "examples": 0}
    assert (code, json.loads(out)) == (
        0,
        {"cell": cell.id, "slug": "mine", "rows": [row], "asked_by": {"g": "needs-eval"}, "deleted": True},
    )
    assert store.measurements(cell.id) == []
    code, _, err = run(
        "db", "forget", "polar-baseline-d0-m0-w0-s0", "--sweep", "printed-v1", "--probe", "clean", "--yes"
    )
    assert (code, "whose measurements were imported and cannot be deleted" in err) == (2, True)
