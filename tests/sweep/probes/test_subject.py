"""What becomes of a number that is missing."""

from __future__ import annotations

from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.probes import bound


def test_a_missing_number_says_why() -> None:
    row = bound("clean", CellConfig()).missing("oom: too large", 64)
    assert (row.probe, row.metric, row.unit) == ("clean", "nats", "nats/token")
    assert (row.value, row.n, row.reason, row.length) == (None, 0, "oom: too large", 64)
