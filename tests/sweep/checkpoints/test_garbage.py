"""Garbage collection: it removes exactly the files that no attempt of the database owns."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from atma_sweep.results.maintenance import deletion
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, Owner, Provenance
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.checkpoints import garbage
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.orchestrator.supervisor import freeze_plugins
from factories import cell_record

OWNER = Owner(name="ada", host="elsewhere", pid=1, started=0.0)
HASHES = {"kept": "a" * 64, "gone": "b" * 64}


def is_held(owner: object, until: object) -> bool:
    return False


def cell(letter: str, plugin: str | None = None) -> CellRecord:
    return cell_record(letter, config={"plugins": [{"path": "x.py", "sha256": HASHES[plugin]}]} if plugin else {})


class GarbageCase:
    """Database with sweep old (cells a, b, c) and sweep new (c, d).

    Every cell has an attempt with files, d's is running.
    """

    def __init__(self, folder: Path) -> None:
        self.runs, self.storage_folder = folder / "atma-runs", folder / "elsewhere"
        self.store: Store = open_store(folder / "atma.db", create=True)
        for name, cells in (
            ("old", [cell("a", "gone"), cell("b"), cell("c")]),
            ("new", [cell("c"), cell("d", "kept")]),
        ):
            self.store.record_revision(name, grid_text="x", grid_file="x", cells=cells)
        for letter in "abcd":
            attempt = self.store.start_attempt(letter * 12, owner=OWNER, fence=1)
            path = str(self.storage_folder) if letter in "bc" else None
            DatabaseRecorder(self.store, attempt.id, 1).provenance(
                Provenance(config={"checkpoint": {"path": path}}, seed=0)
            )
            self.write(self.runs / attempt.run_dir / "checkpoint-00000001" / "model.safetensors", 1000)
            self.write(self.runs / attempt.run_dir / "log.txt", 10)
            if path is not None:
                self.write(self.storage_folder / attempt.run_dir / "weights.safetensors", 500)
            if letter != "d":
                self.store.finish_attempt(attempt.id, 1, "done")
        for name, sha in HASHES.items():
            self.write(self.runs / "plugins" / f"{sha[:12]}_{name}.py", 7, age=7200)
        for name in ("old", "new"):
            self.write(self.runs / f"launch-{name}.log", 9, age=7200)
        self.write(self.runs / "corpora" / "text" / "train.bin", 100)
        self.write(self.runs / "source" / "0123456789ab" / "x.py", 100)
        self.write(self.runs / "mine" / "notes.txt", 100)

    def write(self, path: Path, count: int, age: float = 0.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(count))
        os.utime(path, (time.time() - age,) * 2)

    def files(self) -> set[str]:
        root = self.runs.parent
        return {
            str(path.relative_to(root))
            for top in (self.runs, self.storage_folder)
            for path in top.rglob("*")
            if path.is_file()
        }

    def delete(self, *names: str) -> None:
        deletion_plan = deletion.plan_deletion(self.store, names, holds=is_held)
        deletion.execute_deletion(self.store, deletion_plan, names, holds=is_held, who="ada")


@pytest.fixture
def case(tmp_path: Path) -> Iterator[GarbageCase]:
    case = GarbageCase(tmp_path)
    yield case
    case.store.close()


def short(report: garbage.GarbageReport, root: Path) -> dict[str, int]:
    return {str(Path(item.address).relative_to(root)): item.bytes for item in report.things}


def test_gc_removes_nothing_that_is_owned(case: GarbageCase) -> None:
    before = case.files()
    report = garbage.find_garbage(case.store, case.runs, [str(case.storage_folder)])
    assert (report.things, report.elsewhere) == ((), ())
    assert garbage.find_garbage(case.store, case.runs).elsewhere == (str(case.storage_folder),)
    garbage.remove_garbage(case.store, report)
    assert case.files() == before


def test_gc_removes_deleted_files_alone(case: GarbageCase, tmp_path: Path) -> None:
    case.delete("old")
    before = case.files()
    report = garbage.find_garbage(case.store, case.runs, [str(case.storage_folder)])
    a, b = "a" * 12, "b" * 12
    assert short(report, tmp_path) == {
        f"atma-runs/{a}/1": 1010,
        f"atma-runs/{b}/1": 1010,
        f"elsewhere/{b}/1": 500,
        f"atma-runs/plugins/{'b' * 12}_gone.py": 7,
        "atma-runs/launch-old.log": 9,
    }
    assert case.files() == before, "looking changes nothing"
    done = garbage.remove_garbage(case.store, report)
    assert (done.bytes, done.problems) == (2536, [])
    gone = {name for name in before if f"/{a}/" in name or f"/{b}/" in name or "gone" in name or "launch-old" in name}
    assert case.files() == before - gone
    assert not (case.runs / a).exists()
    assert garbage.find_garbage(case.store, case.runs, [str(case.storage_folder)]).things == ()
    assert case.store.events()[-1].kind == "collected"


def test_gc_scans_storage_location_when_named(case: GarbageCase, tmp_path: Path) -> None:
    case.delete("old")
    report = garbage.find_garbage(case.store, case.runs)
    assert not any(address.startswith("elsewhere") for address in short(report, tmp_path))
    assert report.elsewhere == (str(case.storage_folder),)


def test_gc_keeps_files_claimed_meanwhile(case: GarbageCase) -> None:
    case.delete("old")
    report = garbage.find_garbage(case.store, case.runs)
    case.store.record_revision("old", grid_text="x", grid_file="x", cells=[cell("a")])
    attempt = case.store.start_attempt("a" * 12, owner=OWNER, fence=1)
    assert attempt.run_dir == f"{'a' * 12}/1", "the number is free again"
    done = garbage.remove_garbage(case.store, report)
    assert [line.split("/")[-2][:2] for line in done.problems] == ["aa"]
    assert (case.runs / attempt.run_dir / "log.txt").exists()
    assert not (case.runs / f"{'b' * 12}/1").exists()


def test_gc_finishes_interrupted_removal(case: GarbageCase, tmp_path: Path) -> None:
    case.delete("old")
    folder = case.runs / ("a" * 12)
    os.rename(folder / "1", folder / ".1.unowned")
    report = garbage.find_garbage(case.store, case.runs)
    assert f"atma-runs/{'a' * 12}/.1.unowned" in short(report, tmp_path)
    garbage.remove_garbage(case.store, report)
    assert not folder.exists()


def test_gc_rejects_runs_folder_of_unrelated_database(case: GarbageCase, tmp_path: Path) -> None:
    second_store = open_store(tmp_path / "other.db", create=True)
    before = case.files()
    with pytest.raises(SweepError, match="none of the 4 attempts"):
        garbage.find_garbage(second_store, case.runs)
    (case.runs / ".import-x").mkdir()
    with pytest.raises(SweepError, match="belongs to an unfinished import"):
        garbage.find_garbage(case.store, case.runs)
    assert case.files() == before
    second_store.close()


def test_gc_skips_symlinks_and_young_files(case: GarbageCase, tmp_path: Path) -> None:
    case.delete("old")
    away = tmp_path / "away"
    case.write(away / "1" / "weights.safetensors", 5)
    os.symlink(away, case.runs / ("e" * 12))
    os.symlink(away / "1", case.runs / ("a" * 12) / "2")
    for path in (case.runs / "plugins" / f"{'b' * 12}_gone.py", case.runs / "launch-old.log"):
        os.utime(path)
    report = garbage.find_garbage(case.store, case.runs)
    assert set(short(report, tmp_path)) == {f"atma-runs/{letter * 12}/1" for letter in "ab"}
    garbage.remove_garbage(case.store, report)
    assert (away / "1" / "weights.safetensors").exists()
    assert (case.runs / ("a" * 12) / "2").is_symlink()


def test_gc_keeps_plugin_that_is_used_again(tmp_path: Path) -> None:
    """Its time is refreshed, so that gc spares it until its sweep is in the database."""
    from hashlib import sha256

    from atma_sweep.sweep.config import CellConfig, Plugin

    source = tmp_path / "part.py"
    source.write_text("x = 1\n")
    plugin = Plugin(path=str(source), sha256=sha256(source.read_bytes()).hexdigest())
    cell = Cell(id="a" * 12, slug="s", config=CellConfig.model_construct(plugins=(plugin,)), axes={})
    (frozen,) = freeze_plugins([cell], tmp_path)
    copy = Path(frozen.config.plugins[0].path)
    os.utime(copy, (1.0, 1.0))
    freeze_plugins([cell], tmp_path)
    assert time.time() - copy.stat().st_mtime < 3600


def test_gc_command_confirms_and_reports(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    case = GarbageCase(tmp_path)
    case.delete("old")
    case.store.close()
    before = case.files()
    code, out, _ = run("gc", "--dry-run")
    assert (code, "launch-old.log: log, 9 B" in out, "gc --place" in out) == (0, True, True)
    code, _, err = run("gc")
    assert (code, err) == (2, "atma-sweep: nothing was removed; confirm with --yes\n")
    assert case.files() == before
    payload = json.loads(run("gc", "--yes", "--json", "--place", str(case.storage_folder))[1])
    assert (payload["removed"], payload["bytes"], len(payload["things"])) == (True, 2536, 5)
    assert run("gc")[:2] == (
        0,
        f"unowned: 0 B in 0 files and folders of {case.runs}\nnot scanned: {case.storage_folder}; if no other database uses it, run: atma-sweep gc --place {case.storage_folder}\n",
    )
