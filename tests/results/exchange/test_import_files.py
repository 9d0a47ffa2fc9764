"""Weights and logs come along with a bundle, and an import that fails or is killed leaves all or nothing."""

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
from atma_sweep.results.errors import StoreError, WriteRefused
from atma_sweep.results.exchange import import_files
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store.store import open_store
from histories import all_rows, bundle, cells_of, files, launch, natural, run

pytestmark = pytest.mark.usefixtures("working_folder")


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
class TestFiles:
    def test_weights_and_logs_come_along(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(theirs, cells(2))
        run(theirs, cells(2)[0].id, 5, weights=os.urandom(3_000_000))
        run(theirs, cells(2)[1].id, 6, weights=b"tiny")
        out = bundle(theirs, tmp_path, weights=True)
        assert bundle(theirs, tmp_path, "same.zip", weights=True).read_bytes() == out.read_bytes()
        assert import_bundle(ours, out).files == 4
        assert files(ours.runs) == files(theirs.runs)
        assert [state.weights for state in ours.cell_states()] == [state.weights for state in theirs.cell_states()]
        assert import_bundle(ours, out).files == 0
        assert sorted(os.listdir(ours.runs)) == sorted(cells_of(ours))

    def test_finished_attempt_adds_files_to_its_unfinished_copy(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(theirs, cells(1))
        attempt = run(theirs, cells(1)[0].id, 5, state="running", weights=b"w", log="begun\n")
        import_bundle(ours, bundle(theirs, tmp_path, "early.zip", weights=True))
        (theirs.runs / attempt.run_dir / "log.txt").write_text("begun\nended\n")
        theirs.finish_attempt(attempt.id, 1, "done", weights=f"{attempt.run_dir}/weights.safetensors")
        import_bundle(ours, bundle(theirs, tmp_path, "end.zip", weights=True))
        (imported,) = ours.attempts(cells(1)[0].id)
        assert (ours.runs / imported.weights).read_bytes() == b"w"
        assert (ours.runs / imported.run_dir / "log.txt").read_text() == "begun\nended\n"
        assert (ours.runs / attempt.run_dir / "log.txt").read_text() == "begun\n"

    def test_without_weights_none_are_named(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(theirs, cells(1))
        run(theirs, cells(1)[0].id, 5, weights=b"w")
        out = export_sweep(theirs, None, tmp_path / "bare.zip")
        assert any("--with-weights" in note for note in out.notes)
        summary = import_bundle(ours, tmp_path / "bare.zip")
        assert any("not in the bundle" in note for note in summary.notes)
        assert ours.cell_states()[0].weights is None
        assert not ours.runs.exists()
        # they may follow, for attempts that are there already
        import_bundle(ours, bundle(theirs, tmp_path, weights=True))
        (attempt,) = ours.attempts(cells(1)[0].id)
        assert (ours.runs / attempt.weights).read_bytes() == b"w"
        assert attempt.state == "done"

    def test_weights_that_were_lost_come_back(self, make, cells, tmp_path):
        store = make("a")
        launch(store, cells(1))
        run(store, cells(1)[0].id, 5, weights=b"w")
        out = bundle(store, tmp_path, weights=True)
        shutil.rmtree(store.runs)
        import_bundle(store, out)
        assert (store.runs / store.cell_states()[0].weights).read_bytes() == b"w"

    def test_import_notes_missing_weights(self, make, cells, tmp_path):
        store = make("a")
        launch(store, cells(1))
        run(store, cells(1)[0].id, 5, weights=b"w")
        shutil.rmtree(store.runs)
        assert any("are missing" in note for note in export_sweep(store, None, tmp_path / "x.zip", weights=True).notes)

    def test_import_keeps_existing_folders(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        cell = cells(1)[0].id
        for store, minute, word in ((ours, 50, b"ours"), (theirs, 10, b"theirs")):
            launch(store, cells(1))
            run(store, cell, minute, host=str(minute), weights=word)
        stranger = ours.runs / cell / "2"
        stranger.mkdir()
        (stranger / "weights.safetensors").write_bytes(b"stranger")
        import_bundle(ours, bundle(theirs, tmp_path, weights=True))
        weights_by_host = {attempt.host: (ours.runs / attempt.weights).read_bytes() for attempt in ours.attempts(cell)}
        assert weights_by_host == {"50": b"ours", "10": b"theirs"}
        assert (stranger / "weights.safetensors").read_bytes() == b"stranger"

    def test_nothing_stays_of_an_import_that_fails(self, laptops, tmp_path, cells, monkeypatch):
        first, second = laptops
        run(second, cells(4)[0].id, 95, weights=b"w", log="x")
        out = bundle(second, tmp_path, weights=True)
        before, disk = all_rows(first), sorted(tmp_path.rglob("*"))

        def refuse(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(import_files, "fsync_path", refuse)
        with pytest.raises(StoreError, match="No space left"):
            import_bundle(first, out)
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        real = os.rename

        def interrupted(source, target):
            real(source, target)
            monkeypatch.setattr(os, "rename", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            import_bundle(first, out)
        assert all_rows(first) == before
        leftovers = {
            path for path in tmp_path.rglob("*") if path not in disk and not path.name.endswith(("-wal", "-shm"))
        }
        assert {path.name for path in leftovers} <= {first.runs.name}  # empty
        assert import_bundle(first, out).added["attempt"] == 3

    def test_a_full_disk_is_noticed_first(self, laptops, tmp_path, monkeypatch):
        out = bundle(laptops[1], tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(WriteRefused, match="free disk space"):
            import_bundle(laptops[0], out)


KILLED = """
import os, signal, sys
from pathlib import Path
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store.store import open_store
store, out, limit = open_store(sys.argv[1]), sys.argv[2], int(sys.argv[3])
seen = [0]
def hook(event, arguments):
    if event in ("os.rename", "os.mkdir", "open", "sqlite3.connect"):
        seen[0] += 1
        if seen[0] == limit:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from sqlalchemy import event
@event.listens_for(store.engine, "before_cursor_execute")
def statement(*arguments):
    hook("os.rename", ())
import_bundle(store, Path(out))
print(seen[0])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_an_import_that_is_killed_leaves_all_or_nothing(laptops, tmp_path, cells):
    first, second = laptops
    run(second, cells(4)[0].id, 95, weights=b"new weights")
    out = bundle(second, tmp_path, weights=True)
    before = natural(first)
    first.close()
    reference = tmp_path / "whole"
    shutil.copytree(first.path.parent, reference)
    counted = subprocess.run(
        [sys.executable, "-c", KILLED, str(reference / "atma.db"), str(out), "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    total, after = int(counted.stdout), natural(open_store(reference / "atma.db"))
    draw, outcomes = random.Random(3), []
    for index in range(5):
        copy = tmp_path / f"killed{index}"
        shutil.copytree(first.path.parent, copy)
        limit = draw.randint(1, total) if index else total - 1
        done = subprocess.run([sys.executable, "-c", KILLED, str(copy / "atma.db"), str(out), str(limit)], check=False)
        assert done.returncode == -signal.SIGKILL
        store = open_store(copy / "atma.db")
        assert natural(store) in (before, after)
        outcomes.append(natural(store) == after)
        import_bundle(store, out)  # and again, to the end
        assert natural(store) == after
        (mine,) = [attempt for attempt in store.attempts(cells(4)[0].id) if attempt.weights]
        assert (store.runs / mine.weights).read_bytes() == b"new weights"
        store.close()
    assert False in outcomes
