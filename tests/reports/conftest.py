"""A small sweep with every kind of cell: done, running, diverged, never started, and numbers that could not be had."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import open_published
from atma_sweep.results.store.recorder import Recorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner
from atma_sweep.results.store.store import Store, open_store

ME = Owner(name="ada", host="here", pid=1, started=0.0)


def cell(index: int, *, seed: int = 0, axes: dict[str, str] | None = None, **levels: str) -> CellRecord:
    words = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True)) | levels
    return CellRecord(
        id=f"{index:012x}", slug=f"slug-{index}", seed=seed, levels=words, config={}, axes=axes or {}, tokens=10
    )


def numbers(val: float, entropy: float = 7.4321) -> list[Measurement]:
    found = [
        Measurement(probe="val", metric="val_loss", value=val, unit="nats/token", n=11),
        Measurement(probe="corpus", metric="unigram_entropy", value=entropy, unit="nats/token"),
        Measurement(probe="corpus", metric="bigram_entropy", value=5.5, unit="nats/token"),
        Measurement(probe="throughput", metric="mfu_paper", reason="n/a: no peak FLOPs known for cpu"),
    ]
    for length in (128, 2048, 65536):
        found += [
            Measurement(probe="clean", metric="nats", length=length, value=val + length / 1e6, unit="nats/token"),
            Measurement(probe="needle", metric="digit_accuracy", length=length, value=0.9625, low=0.9, high=1.0, n=80),
        ]
        if length < 65536:
            found.append(Measurement(probe="junk", metric="nats", length=length, value=2.675, unit="nats/token"))
        else:
            found.append(Measurement(probe="junk", metric="nats", length=length, reason="oom: 3 GiB asked, 1 free"))
    return found


def record(store: Store, cell_id: str, state: str, measurements: list[Measurement]) -> None:
    attempt = store.start_attempt(cell_id, owner=ME, fence=1)
    Recorder(store, attempt.id, 1).measurements(measurements)
    if state != "running":
        store.finish_attempt(attempt.id, 1, state)


@pytest.fixture
def run() -> Callable[..., None]:
    return record


@pytest.fixture
def make() -> tuple[Callable[..., CellRecord], Callable[..., list[Measurement]]]:
    return cell, numbers


@pytest.fixture(scope="session")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database, to be copied: making one takes longer than most tests."""
    path = tmp_path_factory.mktemp("databases") / "blank.db"
    open_store(path, create=True).close()
    return path


@pytest.fixture(scope="session")
def filled(blank: Path) -> Path:
    path = Path(shutil.copy(blank, blank.with_name("filled.db")))
    opened = open_store(path)
    cells = [cell(4), cell(1, attn_type="nope"), cell(3, memory="off"), cell(2, reg_mode="weak"), cell(0, window="on")]
    opened.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells)
    record(opened, cells[0].id, "done", numbers(0.125))
    record(opened, cells[1].id, "done", numbers(3.14159)[:1])
    record(opened, cells[2].id, "running", numbers(1.0))
    record(opened, cells[3].id, "diverged", [])
    opened.close()
    return path


@pytest.fixture
def store(tmp_path: Path, filled: Path) -> Store:
    return open_store(shutil.copy(filled, tmp_path / "test.db"))


@pytest.fixture
def empty(tmp_path: Path, blank: Path) -> Store:
    return open_store(shutil.copy(blank, tmp_path / "empty.db"))


@pytest.fixture(scope="session")
def published() -> Store:
    """Both sweeps of printed numbers, in a temporary database that no test may change."""
    return open_published()


@pytest.fixture(scope="session")
def published_effects(published: Store) -> Table:
    """The table `effects` of printed-v2."""
    return make_table("effects", published, "printed-v2")


@pytest.fixture(scope="session")
def tables(shared: Path) -> dict[str, Any]:
    """Every printed number, as transcribed apart from the CSV that we ship."""
    found: dict[str, Any] = json.loads((shared / "paper" / "tables.json").read_text())
    return found
