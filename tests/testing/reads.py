"""A recorder of the sweeps that are read from a database while a test runs."""

from __future__ import annotations

from typing import Any

import pytest
from atma_sweep.results.store.store_reader import StoreReader


def sweeps_read(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A list that gets the name of a sweep each time that its values are read."""
    read: list[str | None] = []
    values = StoreReader.values

    def counted(self: StoreReader, sweep: str | None = None, *rest: Any, **more: Any) -> Any:
        read.append(sweep)
        return values(self, sweep, *rest, **more)

    monkeypatch.setattr(StoreReader, "values", counted)
    return read
