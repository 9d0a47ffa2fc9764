"""The tables that every sweep has, for tests that go through all of them: those of studies take a study."""

from __future__ import annotations

from atma_sweep.reports.tables import TABLES as ALL

TABLES = {name: line for name, line in ALL.items() if not line.study}
