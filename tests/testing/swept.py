"""A sweep with an axis of numbers, made up: for tests of reports, which train nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner
from atma_sweep.results.store.store import Store

AXIS = "train.muon_lr"
RATES = (0.0025, 0.005, 0.01, 0.02, 0.04)
LAYERS = (4, 8)


def loss(kind: str, rate: float, layers: int, seed: int) -> float:
    """Best at a rate of 0.01 for polar, of 0.02 for nope; a seed is worth 0.02, and depth 0.1."""
    return 3 + 0.2 * math.log2(rate / {"polar": 0.01, "nope": 0.02}[kind]) ** 2 + 0.02 * seed - 0.1 * (layers == 8)


def swept(store: Store, seeds: Sequence[int] = (0, 1)) -> None:
    """Records a sweep `rates` of two mixers at RATES and LAYERS, with a validation loss, and digits that the needle finds."""
    cells = []
    for kind in ("polar", "nope"):
        for rate in RATES:
            for layers in LAYERS:
                for seed in seeds:
                    levels = dict(zip(AXES, (kind, "baseline", "off", "on", "off"), strict=True))
                    axes = {"attn_type": kind, AXIS: str(rate), "model.n_layers": str(layers), "data.order": "fixed"}
                    cells.append(
                        CellRecord(
                            id=f"{len(cells) + 1:012x}", slug=f"{kind}-{rate}-{layers}-s{seed}", seed=seed, levels=levels,
                            config={}, axes=axes, tokens=10,
                        )
                    )  # fmt: skip
    store.record_revision("rates", grid_text="x", grid_file="x.yaml", cells=cells)
    for record in cells:
        attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        value = loss(
            record.levels["attn_type"], float(record.axes[AXIS]), int(record.axes["model.n_layers"]), record.seed
        )
        share = round(max(0.0, 1 - (value - 2.9)) * 80) / 80
        DatabaseRecorder(store, attempt.id, 1).measurements(
            [
                Measurement(probe="val", metric="val_loss", value=value, unit="nats/token"),
                Measurement(probe="needle", metric="digit_accuracy", length=64, value=share, unit="fraction", n=80),
            ]
        )
        store.finish_attempt(attempt.id, 1, "done")
