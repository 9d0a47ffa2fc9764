"""A made-up sweep of any size, written straight into the tables: training thousands of cells would take years."""

from __future__ import annotations

import math
import random
from itertools import islice, product
from typing import Any

from atma_sweep.results.store.records import AXES, CellRecord, Owner
from atma_sweep.results.store.schema import AttemptRow, CurvePointRow, MeasurementRow, ProvenanceRow
from atma_sweep.results.store.store import Store
from sqlalchemy import insert

LENGTHS = (2048, 8192, 65536)
MIXERS = ("polar", "nope", "rope", "wall", "alibi", "fox", "sketch", "retention", "linear", "local", "strided", "mix")
ALL_LEVELS = (
    MIXERS,
    ("baseline", "weak", "strong", "discrete", "zipfian"),
    ("off", "on"),
    ("off", "on"),
    ("off", "on"),
)
OWNER = Owner(name="ada", host="node-1", pid=1, started=0.0)


def cells_of(count: int, seeds: int = 1) -> list[CellRecord]:
    """So many cells, every seed of a combination in a row."""
    combinations = product(range(20), *ALL_LEVELS)
    records = []
    for extra, *levels in islice(combinations, math.ceil(count / seeds)):
        for seed in range(seeds):
            slug = "-".join((*levels, f"e{extra}", f"s{seed}"))
            axes = dict(zip(AXES, levels, strict=True)) | {"train.lr": str(extra), "seed": str(seed)}
            levels_of = dict(zip(AXES, levels, strict=True))
            records.append(
                CellRecord(id=f"{len(records):012x}", slug=slug, seed=seed, levels=levels_of, config={}, axes=axes, tokens=1)
            )  # fmt: skip
    return records[:count]


def _measurements(attempt: int, draw: random.Random, now: Any) -> list[dict[str, Any]]:
    base = {"attempt_id": attempt, "created_at": now, "low": None, "high": None, "reason": None, "n": 4096}
    rows = [
        base | {"probe": "val", "metric": "val_loss", "length": 0, "value": 3 + draw.random(), "unit": "nats/token"}
    ]
    for length in LENGTHS:
        for probe in ("clean", "junk"):
            value = 2 + draw.random()
            rows.append(
                base | {"probe": probe, "metric": "nats", "length": length, "value": value, "unit": "nats/token"}
            )
        share = draw.randrange(81) / 80
        fields = {"probe": "needle", "metric": "digit_accuracy", "length": length, "unit": "fraction", "n": 80}
        low, high = max(0.0, share - 0.1), min(1.0, share + 0.1)
        rows.append(base | fields | {"value": share, "low": low, "high": high})
    fields = {"probe": "throughput", "metric": "mfu_paper", "length": 0, "value": draw.random(), "unit": "fraction"}
    return [*rows, base | fields | {"n": None}]


def _curve(attempt: int, points: int, draw: random.Random) -> list[dict[str, Any]]:
    wall, rows = 0.0, []
    for step in range(points):
        wall += 1.8 + draw.random() / 10
        loss = 3 + 8 / math.sqrt(step + 1) + draw.gauss(0, 0.05)
        val = loss + 0.02 if step % 50 == 49 else None
        rows.append({"attempt_id": attempt, "step": step, "tokens": (step + 1) * 524_288, "wall_s": wall, "train_loss": loss, "val_loss": val})  # fmt: skip
    return rows


def synthetic_sweep(
    store: Store, count: int, points: int, *, name: str = "big", seeds: int = 1, cells: list[CellRecord] | None = None
) -> list[CellRecord]:
    """Records the sweep; every cell is done, with a curve of `points` points and a number at each of LENGTHS.

    `cells`: these instead, `count` of them, at least two.
    """
    draw = random.Random(0)
    cells = cells or cells_of(count, seeds)
    store.record_revision(name, grid_text="axes: {}\n", grid_file="big.yaml", cells=cells)
    first = store.start_attempt(cells[0].id, owner=OWNER, fence=1)
    now = first.started_at
    common = {"kind": "train", "state": "done", "fence": 1, "owner": "ada", "host": "node-1", "phase": "probing"}  # fmt: skip
    times = {"started_at": now, "heartbeat_at": now, "finished_at": now}
    ids = [first.id + index for index in range(count)]
    with store.transaction() as session:
        row = session.get(AttemptRow, first.id)
        assert row is not None
        row.state, row.finished_at = "done", now
        session.execute(
            insert(AttemptRow),
            [
                {"id": i, "cell_id": c.id, "number": 1, "run_dir": f"{c.id}/{i}", **common, **times}
                for i, c in zip(ids[1:], cells[1:], strict=True)
            ],
        )
        session.execute(insert(MeasurementRow), [row for i in ids for row in _measurements(i, draw, now)])
        values = {
            "config": {},
            "seed": 0,
            "git_commit": "c0ffee" * 6,
            "git_dirty": False,
            "packages": {"torch": "2.13.0"},
        }
        values |= {
            "python": "3.11.7",
            "platform": "Linux",
            "host": "node-1",
            "device": "cuda",
            "gpu_name": "NVIDIA H200",
        }
        values |= {"gpu_count": 1, "dtype": "bfloat16", "kernels": {}, "tokenizer": "gpt2", "corpus": "mine"}
        values |= {"corpus_fingerprint": "f" * 64, "extra": {}}
        session.execute(insert(ProvenanceRow), [{"attempt_id": i} | values for i in ids])
        for attempt in ids:
            session.execute(insert(CurvePointRow), _curve(attempt, points, draw))
    return cells
