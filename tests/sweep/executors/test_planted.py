"""Planted files in the runs folder, which do not match their names: nothing runs or reads them."""

from __future__ import annotations

import json
import py_compile
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, Owner, Provenance
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.attempt import trained_cells
from atma_sweep.sweep.checkpoints.address import checkpoint_address
from atma_sweep.sweep.commands import verify
from atma_sweep.sweep.config import CellConfig, Plugin
from atma_sweep.sweep.data import corpora
from atma_sweep.sweep.data.corpora import CorpusError
from atma_sweep.sweep.data.shards import write_shard
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.executors import source_snapshot
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.grid.plugins import load_plugin
from atma_sweep.sweep.orchestrator import launch, supervisor
from atma_sweep.sweep.planning.planner import to_record
from factories import prepared_text, record_sweep
from sqlalchemy import update

OWNER = Owner(name="ada", host="here", pid=1, started=1.0)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Package as small as possible."""
    home = tmp_path / "code" / "atma_sweep"
    (home / "sweep").mkdir(parents=True)
    (home / "__init__.py").write_text("")
    (home / "sweep" / "job.py").write_text("print('ours')\n")
    return home


PLANTED: dict[str, tuple[str, str]] = {
    "another file": ("atma_sweep/sweep/job.py", "print('theirs')\n"),
    "a module beside the package": ("numpy.py", "print('theirs')\n"),
    "a module beside ours": ("atma_sweep/torch.py", "print('theirs')\n"),
    "compiled code without a source": ("atma_sweep/sweep/work.pyc", "theirs"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_code_is_trusted_by_what_it_is_not_by_where_it_lies(what: str, package: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    name, text = PLANTED[what]
    planted = runs / "source" / source_snapshot.fingerprint(package) / name
    if what != "another file":
        source_snapshot.take_snapshot(runs, package)
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(text)
    with pytest.raises(SweepError, match="does not match the fingerprint in its name; remove it"):
        source_snapshot.take_snapshot(runs, package)
    with pytest.raises(SweepError, match="does not match the fingerprint"):
        source_snapshot.find_snapshot(runs, source_snapshot.fingerprint(package))
    assert [finding.severity for finding in verify.changed_files(runs)] == ["error"]


def test_links_and_compiled_files_of_frozen_code(package: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    digest = source_snapshot.take_snapshot(runs, package)
    job = runs / "source" / digest / "atma_sweep" / "sweep" / "job.py"
    compiled = Path(py_compile.compile(str(job)) or "")
    assert compiled.is_file()
    assert source_snapshot.take_snapshot(runs, package) == digest
    assert not compiled.exists(), "nobody knows what it was made of"
    compiled.parent.mkdir()
    half = compiled.with_name(f"{compiled.name}.139623")  # as importlib calls one that it is writing
    half.write_text("")
    assert source_snapshot.is_intact(runs / "source" / digest)
    half.rename(compiled.with_name("job.py"))
    assert not source_snapshot.is_intact(runs / "source" / digest)
    shutil.rmtree(compiled.parent)
    target = tmp_path / "other.py"
    job.rename(target)
    job.symlink_to(target)
    with pytest.raises(SweepError, match="does not match the fingerprint"):
        source_snapshot.find_snapshot(runs, digest)
    with pytest.raises(SweepError, match="not a code fingerprint"):
        source_snapshot.find_snapshot(runs, "../../x")


@pytest.fixture
def cell(tmp_path: Path, write: Callable[..., Path]) -> Cell:
    grid = load_grid(write("name: g\nextends: micro\nset: {model.n_layers: 3}\n"))
    return grid.expand(prepared_text(tmp_path, tmp_path / "atma-runs"))[0]


def test_last_snapshot_ignores_events_without_a_fingerprint(store: Store, cell: Cell) -> None:
    record_sweep(store, [to_record(cell)], "g")
    store.add_event(launch.CODE_EVENT, "0123456789ab", sweep="g")
    store.add_event(launch.CODE_EVENT, "../../elsewhere", sweep="g")
    assert launch.last_snapshot(store, "g") == "0123456789ab"


@pytest.fixture
def bait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries: None) -> tuple[Path, Plugin]:
    """(File that a plugin creates when it runs, the plugin, which lies where launches keep theirs)."""
    sign = tmp_path / "ran"
    source = tmp_path / "bait.py"
    source.write_text(f"from pathlib import Path\nPath({str(sign)!r}).touch()\n")
    plugin = load_plugin(source)
    sign.unlink()
    monkeypatch.delitem(sys.modules, f"atma_sweep_plugin_{plugin.sha256[:12]}")
    copy = tmp_path / "atma-runs" / "plugins" / f"{plugin.sha256[:12]}_bait.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(source.read_bytes())
    return sign, plugin.model_copy(update={"path": str(copy)})


def test_cell_id_is_checked_before_its_plugin_runs(
    store: Store, cell: Cell, bait: tuple[Path, Plugin], tmp_path: Path
) -> None:
    sign, plugin = bait
    config = cell.config.model_copy(update={"plugins": (plugin,), "seed": 5})
    wrong = to_record(Cell(cell.id, cell.slug, config, {}))
    with pytest.raises(trained_cells.CellUnreadable, match="computes another id"):
        trained_cells.restore_cell(wrong, tmp_path / "atma-runs")
    stranger = dict(wrong.config) | {"model": dict(wrong.config["model"]) | {"attn_type": "theirs", "mixers": {}}}
    with pytest.raises(trained_cells.CellUnreadable, match="no mixer named 'theirs'"):
        trained_cells.restore_cell(CellRecord(**{**vars(wrong), "config": stranger}), tmp_path / "atma-runs")
    assert not sign.exists()
    right = to_record(Cell(cell.id, cell.slug, cell.config.model_copy(update={"plugins": (plugin,)}), {}))
    assert trained_cells.restore_cell(right, tmp_path / "atma-runs").id == cell.id
    assert sign.exists()


def test_changed_plugin_copy_is_replaced(cell: Cell, bait: tuple[Path, Plugin], tmp_path: Path) -> None:
    sign, plugin = bait
    copy = Path(plugin.path)
    right = copy.read_bytes()
    theirs = tmp_path / "theirs.py"
    theirs.write_bytes(right.replace(b"ran", b"evi"))
    compiled = Path(py_compile.compile(str(copy)) or "")
    stamp = compiled.read_bytes()[:16]
    compiled.write_bytes(stamp + Path(py_compile.compile(str(theirs)) or "").read_bytes()[16:])
    load_plugin(copy, plugin.sha256)
    assert sign.exists()
    assert not (tmp_path / "evi").exists(), "the compiled file beside it is another"
    copy.write_bytes(theirs.read_bytes())
    assert any("does not match the hash" in finding.what for finding in verify.changed_files(tmp_path / "atma-runs"))
    own = tmp_path / "bait.py"
    config = cell.config.model_copy(update={"plugins": (plugin.model_copy(update={"path": str(own)}),)})
    (frozen,) = supervisor.freeze_plugins([Cell(cell.id, cell.slug, config, {})], tmp_path / "atma-runs")
    assert Path(frozen.config.plugins[0].path).read_bytes() == right


def test_prepared_text_is_read_before_it_counts(cell: Cell, tmp_path: Path) -> None:
    root, corpus_id = tmp_path / "atma-runs" / "corpora", cell.config.data.fingerprint or ""
    folder = root / corpus_id[:16]
    assert corpora.open_verified(root, corpus_id).fingerprint == corpus_id
    assert list(verify.changed_files(tmp_path / "atma-runs")) == []
    # as many tokens, under the same manifest
    shard = next(folder.glob("train*.bin"))
    tokens = np.array(corpora.open_corpus(root, corpus_id).train[0])
    write_shard(shard, tokens[::-1].copy())
    corpora.open_corpus(root, corpus_id)
    with pytest.raises(CorpusError, match=r"sha256 is .*prepare the corpus again"):
        corpora.open_verified(root, corpus_id)
    (finding,) = verify.changed_files(tmp_path / "atma-runs")
    assert (finding.severity, "sha256" in finding.what) == ("error", True)
    write_shard(shard, tokens)
    assert corpora.open_verified(root, corpus_id).fingerprint == corpus_id
    # other text under its own hashes, with a manifest in order that names this fingerprint
    facts = json.loads((folder / "manifest.json").read_text())
    facts["shards"]["train"][0]["sha256"] = "0" * 64
    corpora.write_json(folder / "manifest.json", corpora.with_checksum(facts))
    with pytest.raises(CorpusError, match="does not match the manifest"):
        corpora.open_corpus(root, corpus_id)


def test_paths_of_an_imported_attempt_are_never_followed(store: Store, cell: Cell, tmp_path: Path) -> None:
    record_sweep(store, [to_record(cell)], "g")
    attempt = store.start_attempt(cell.id, owner=OWNER, fence=0)
    elsewhere = CellConfig().model_copy(update={}).model_dump(mode="json")
    elsewhere["checkpoint"]["path"] = "/home/somebody/else"
    DatabaseRecorder(store, attempt.id, 0).provenance(Provenance(config=elsewhere, seed=0))
    DatabaseRecorder(store, attempt.id, 0).checkpoint("/home/somebody/else/checkpoint-00000001")
    store.finish_attempt(attempt.id, 0, "interrupted", cause="x")
    assert checkpoint_address(store, store.attempt(attempt.id)).startswith("/home/somebody")
    with store.transaction() as session:
        session.execute(update(AttemptRow).values(imported=True))
    imported = store.attempt(attempt.id)
    assert checkpoint_address(store, imported) == imported.run_dir
