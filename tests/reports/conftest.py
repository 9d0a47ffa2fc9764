"""A small sweep with every kind of cell: done, running, diverged, never started, and numbers that could not be had."""

from collections.abc import Callable

import pytest
from atma_sweep.results.recorder import Recorder
from atma_sweep.results.records import AXES, CellRecord, Measurement, Owner
from atma_sweep.results.store import Store, open_store

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


@pytest.fixture
def run() -> Callable[..., None]:
    def record(store: Store, cell_id: str, state: str, measurements: list[Measurement]) -> None:
        attempt = store.start_attempt(cell_id, owner=ME, fence=1)
        Recorder(store, attempt.id, 1).measurements(measurements)
        if state != "running":
            store.finish_attempt(attempt.id, 1, state)

    return record


@pytest.fixture
def make() -> tuple[Callable[..., CellRecord], Callable[..., list[Measurement]]]:
    return cell, numbers


@pytest.fixture
def store(tmp_path, run) -> Store:
    opened = open_store(tmp_path / "test.db", create=True)
    cells = [cell(4), cell(1, attn_type="nope"), cell(3, memory="off"), cell(2, reg_mode="weak"), cell(0, window="on")]
    opened.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells)
    run(opened, cells[0].id, "done", numbers(0.125))
    run(opened, cells[1].id, "done", numbers(3.14159)[:1])
    run(opened, cells[2].id, "running", numbers(1.0))
    run(opened, cells[3].id, "diverged", [])
    return opened
