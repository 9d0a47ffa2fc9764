"""The row of a number that is missing."""

from __future__ import annotations

from atma_sweep.sweep.probes.subject import unmeasured


def test_a_missing_number_says_why() -> None:
    row = unmeasured("clean", "nats", 64, "nats/token", "oom: too large")
    assert (row.value, row.n, row.reason, row.length) == (None, 0, "oom: too large", 64)
