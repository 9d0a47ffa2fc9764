"""Snapshots of the package that attempts run: an edit changes nothing under way and is reported."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.kernels.dispatch import sources
from atma_sweep.model.resolve import check_model_config
from atma_sweep.sweep.config import CellConfig, Resources
from atma_sweep.sweep.executors.source_snapshot import (
    PACKAGE,
    SNAPSHOT_PARTS,
    find_snapshot,
    fingerprint,
    take_snapshot,
    takes_weights_hash,
)
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.orchestrator.supervisor import job_config

from ...testing.bench import Bench


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy of the package that a test may edit."""
    return tmp_path / "code" / "source" / take_snapshot(tmp_path / "code") / "atma_sweep"


def test_snapshot_holds_every_top_level_module(package: Path) -> None:
    """An editable installation would hide a module that a snapshot lacks: attempts would import it from the checkout."""
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__main__.py"}
    assert modules <= set(SNAPSHOT_PARTS)
    assert {path.name for path in package.glob("*.py")} == modules >= {"__init__.py", "cli.py", "renamed.py"}


def test_fingerprint_covers_names_and_contents(package: Path) -> None:
    before = fingerprint(package)
    assert before == fingerprint(PACKAGE)
    (package / "model" / "__pycache__").mkdir()
    (package / "model" / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert fingerprint(package) == before
    (package / "model" / "__pycache__" / "x.cpython-311.pyc.139623").write_bytes(b"1")
    assert fingerprint(package) == before, "one that an interpreter is just writing"
    layers = package / "model" / "layers.py"
    text = layers.read_text()
    layers.write_text(text + "\n")
    changed = fingerprint(package)
    assert changed != before
    layers.write_text(text)
    assert fingerprint(package) == before
    layers.rename(layers.with_name("strata.py"))
    assert fingerprint(package) not in (before, changed)


@pytest.mark.thorough
def test_modules_that_are_compiled_meanwhile_are_none_of_it(package: Path) -> None:
    before, ended, rounds = fingerprint(package), threading.Event(), 0
    compiled = package / "kernels" / "__pycache__"

    def compiling() -> None:
        nonlocal rounds
        while not ended.is_set():
            compiled.mkdir()
            for number in range(50):
                (compiled / f"x.pyc.{number}").touch()
                (compiled / f"x.pyc.{number}").rename(compiled / f"{number}.pyc")
            shutil.rmtree(compiled)
            rounds += 1

    compiler = threading.Thread(target=compiling)
    compiler.start()
    try:
        assert {fingerprint(package) for _ in range(50)} == {before}
        assert len({sources.__wrapped__(package / "kernels") for _ in range(50)}) == 1
    finally:
        ended.set()
        compiler.join()
    assert rounds > 10


def test_snapshot_is_copied_once(package: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    digest = take_snapshot(runs, package)
    home = find_snapshot(runs, digest)
    assert home is not None
    stamp = home.stat().st_mtime_ns
    assert take_snapshot(runs, package) == digest
    assert home.stat().st_mtime_ns == stamp
    assert fingerprint(home / "atma_sweep") == digest
    assert [path.name for path in (runs / "source").iterdir()] == [digest]
    assert find_snapshot(runs, "0" * 12) is None


@pytest.mark.thorough
@pytest.mark.slow
def test_old_snapshot_runs_on_request_with_a_message(package: Path, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    bench = Bench(tmp_path / "bench")
    bench.env["PYTHONPATH"] = str(package.parent)
    only = ("--only", "attn_type=nope")
    assert "code:" not in bench.launch(*only)
    old = fingerprint(package)
    work = package / "sweep" / "attempt" / "cell_runner.py"
    work.write_text(work.read_text() + '\nprint("the edited code", __file__)\n')
    new = fingerprint(package)
    out = bench.launch("--only", "attn_type=polar", "--code", "kept")
    assert f"code: that of the last launch ({old}), not the current code ({new})" in out
    logs = {path.parent.parent.name: path.read_text() for path in (bench.folder / "atma-runs").glob("*/*/log.txt")}
    assert len(logs) == 2
    assert not any("the edited code" in text for text in logs.values()), "kept: the old code ran"
    bench.grid(seeds=2)
    out = bench.launch()
    assert f"code: changed since the last launch ({old} to {new})" in out
    texts = [path.read_text() for path in (bench.folder / "atma-runs").glob("*/*/log.txt")]
    edited = [text for text in texts if "the edited code" in text]
    assert len(edited) == 2
    assert all(f"atma-runs/source/{new}/atma_sweep/sweep/attempt/cell_runner.py" in text for text in edited)
    codes = bench.sql("SELECT message FROM event WHERE kind = 'code' ORDER BY id")
    assert codes == [(old,), (new,)]
    assert "is not one of 'new', 'kept'" in bench.launch("--code", "newest", code=2)
    shutil.rmtree(bench.folder / "atma-runs" / "source" / new)
    work.write_text(work.read_text() + "\n")
    bench.grid(seeds=3)
    assert "is gone; launch without --code" in bench.launch("--code", "kept", code=2)


def restored_config(stored: dict[str, Any]) -> CellConfig:
    """Return the config that an attempt restores from job.json, with its mixer's settings complete."""
    read = CellConfig.model_validate(stored)
    return read.model_copy(update={"model": check_model_config(read.model)})


def test_job_config_contains_only_changed_settings() -> None:
    (cell, *_) = load_grid("quick").expand(lambda data: "f")
    stored = job_config(cell.config)
    assert restored_config(stored) == cell.config
    assert "order" not in stored["resources"]
    changed = cell.config.model_copy(update={"resources": Resources(order="pairs", cpus=3)})
    stored = job_config(changed)
    assert (stored["resources"]["order"], stored["resources"]["cpus"]) == ("pairs", 3)
    assert restored_config(stored) == changed


def test_job_config_omits_implicit_defaults() -> None:
    (cell, *_) = load_grid("quick").expand(lambda data: "f")
    changed = {"attn_type": "rope", "mixers": {"rope": {"base": 5.0}}, "init": "zero-ends-and-conv-in"}
    model = check_model_config(cell.config.model.model_copy(update=changed))
    train = cell.config.train.model_copy(update={"clip": 0.5})
    config = cell.config.model_copy(update={"model": model, "train": train})
    stored = job_config(config)
    # what was there from the first version on and has no identity default is always said
    assert {"d_model", "attn_type", "vocab_size"} <= stored["model"].keys()
    assert {"tokens", "seq_len", "micro_batch"} <= stored["train"].keys()
    assert (stored["model"]["init"], stored["model"]["mixers"]) == ("zero-ends-and-conv-in", {"rope": {"base": 5.0}})
    assert stored["train"]["clip"] == 0.5
    for section, name in (
        ("model", "mixer_source"),
        ("model", "norm_eps"),
        ("train", "warmup_steps"),
        ("train", "graphs"),
        ("data", "shuffle"),
    ):
        assert name not in stored[section]
    assert restored_config(stored) == config


def test_weights_hash_is_hidden_from_code_that_refuses_it(tmp_path: Path) -> None:
    """Older code reads the keys of a job file into a class without that field."""
    assert takes_weights_hash(tmp_path / "source" / take_snapshot(tmp_path))
    older = tmp_path / "older" / "atma_sweep" / "sweep" / "attempt"
    older.mkdir(parents=True)
    (older / "job.py").write_text((PACKAGE / "sweep/attempt/job.py").read_text().replace("weights_sha256", "other"))
    assert not takes_weights_hash(tmp_path / "older")
