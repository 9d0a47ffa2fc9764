"""The table of associative recall: which questions about pairs of a key and a value are answered rightly (docs/memories.md)."""

from __future__ import annotations

from ...results import metrics
from ...results.store.store import Store
from ..number_format import column_of, rounded
from ..sweep_data import SweepData, gather
from ..table import Table
from ..table_builder import Line, entry
from .task_rows import Rows, of_seeds, of_sequences, rows_about, task_table, without_empty

MQAR = "mqar"
SHARES = {"accuracy": "Answers", "exact": "Rows"}
MEANT = "Answers: questions answered rightly, in %; Rows: rows without a wrong answer, in %; Loss: nats an answer, where answers alone are trained on."


def mqar(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Questions answered rightly, rows without an error, and the loss of the answers."""
    data = gather(store, sweep, revision=revision)
    rows = rows_about(data, MQAR)
    shares = [column_of(MQAR, name, heading) for name, heading in SHARES.items()]
    loss = column_of("val", "val_loss", "Loss")
    lines = []
    for cells in rows.groups:
        found = []
        for column in shares:
            mean = entry(data, cells, column)
            found += [mean, of_seeds(mean, column), of_sequences(data, cells, mean)]
        found.append(entry(data, cells, loss))
        lines.append(Line(words=rows.words(cells), entries=tuple(found), cells=cells))
    kept = without_empty(lines, tuple(SHARES.values()))
    return task_table(store, rows, MQAR, "Associative recall", kept, [MEANT, *_guesses(data, rows)])


def _guesses(data: SweepData, rows: Rows) -> list[str]:
    """What whoever guesses among the values is expected to score."""
    told = set()
    for cell in (cell for cells in rows.groups for cell in cells):
        value = data.values.get((cell.cell_id, MQAR, "accuracy", 0))
        if value is not None:
            told.add(metrics.metric(MQAR, "accuracy", value.description).chance)
    shares = sorted(share for share in told if share is not None)
    return (
        [f"A guess among the values is right in {' or '.join(rounded(one, 1, percent=True) for one in shares)} %."]
        if shares
        else []
    )
