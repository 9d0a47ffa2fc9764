"""The words that stand where a cell has no number, and what figures call numbers."""

from __future__ import annotations

from ..results.paper import is_published
from ..results.store.records import CellState, Value
from .number_format import Column, reason_code
from .sweep_data import SweepData

MEASURES = {
    "val_loss": "validation loss",
    "clean.nats": "clean loss",
    "junk.nats": "junk loss",
    "needle.digit_accuracy": "needle",
}
"""By metric, or probe and metric: how a figure calls a number."""
UNMEASURED = "unmeasured"
"""Printed where a cell lacks what its grid does not ask for either."""
UNPRINTED = "-"
"""Printed where a published sweep has no such number: nobody can evaluate its cells."""


def word_for(standing: str, value: Value | None) -> str:
    """What is printed instead of a number: the code of the recorded reason, else where the cell stands."""
    if value is None:
        return "needs-eval" if standing == "done" else standing
    return reason_code(value.reason or "n/a")


def word_of(data: SweepData, cell: CellState, column: Column, value: Value | None) -> str:
    """What stands for a number that a cell does not have."""
    if value is None and is_published(data.sweep):
        return UNPRINTED
    word = word_for(data.word(cell), value)
    unasked = not data.shows(column.probe) or (column.length > 0 and not data.asks(column.probe, column.length))
    return UNMEASURED if word == "needs-eval" and unasked else word
