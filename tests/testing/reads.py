"""Which sweeps are read from a database while a test runs."""

from __future__ import annotations

from typing import Any

import pytest
from atma_sweep.results.store import attempt_queries


def sweeps_read(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A list that gets the name of a sweep each time that its values are read."""
    read: list[str | None] = []
    values = attempt_queries.sweep_values

    def counted(session: Any, sweep: str | None, *rest: Any, **more: Any) -> Any:
        read.append(sweep)
        return values(session, sweep, *rest, **more)

    monkeypatch.setattr(attempt_queries, "sweep_values", counted)
    return read
