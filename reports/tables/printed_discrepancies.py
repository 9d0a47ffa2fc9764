"""What the paper prints besides the numbers of its sweeps: facts of models, and numbers that its authors' logs contradict
(docs/mechanisms.md, "Decisions")."""

from __future__ import annotations

from dataclasses import dataclass

from ...results.store.store import Store
from ..number_format import length_name, rounded
from ..sweep_data import SweepData


@dataclass(frozen=True)
class Contradiction:
    """A printed number and the logged one, in the unit of the metric (shares as fractions)."""

    table: str
    cell: str
    slug: str
    probe: str
    metric: str
    length: int
    printed: float
    logged: float

    @property
    def text(self) -> str:
        """In a few words, shares in %."""
        percent = self.metric in ("digit_accuracy", "mfu_paper")
        printed, logged = (rounded(value, 2, percent=percent) for value in (self.printed, self.logged))
        at = f" at {length_name(self.length)}" if self.length else ""
        return f"Table {self.table} prints {printed}, the log gives {logged}{at}"


def _half_digit(metric: str, table: str) -> float:
    """Half of the last digit that the table prints of such a number, in the metric's unit."""
    if metric == "digit_accuracy":
        return 0.0005 if table == "6" else 0.005
    return 0.0005 if metric in ("mfu_paper", "val_loss") else 0.005


def contradicted(data: SweepData, table: str | None = None) -> list[Contradiction]:
    """The published numbers that rounding alone does not lead to from the log, of one table or of all."""
    slugs = {cell.cell_id: cell.slug for cell in data.cells}
    found = []
    for (cell, number, probe, metric, length), value in data.printed.items():
        logged = data.values.get((cell, probe, metric, length))
        if table not in (None, number) or logged is None or logged.value is None or value.value is None:
            continue
        if abs(value.value - logged.value) > _half_digit(metric, number) * (1 + 1e-6):
            found.append(Contradiction(number, cell, slugs[cell], probe, metric, length, value.value, logged.value))
    return sorted(found, key=lambda one: (one.table, one.slug, one.probe, one.metric, one.length))


def facts_of(store: Store, cell: str) -> dict[str, str]:
    """What is printed of a published model besides its numbers, by name."""
    found = store.cell(cell).config.get("published", {})
    return {name: str(text) for name, text in found.items()}
