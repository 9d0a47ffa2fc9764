"""The table `anova`: type-III analysis of variance of every number of the complete results."""

from __future__ import annotations

import math

from ...results.store.store import Store
from ..data import Lengths, ReportError, gather
from ..layout import Line, assemble, p_value, sweep_note
from ..numbers import rounded
from ..stats.anova import anova
from ..stats.effects import main_measures, numbers_of, origins_of
from ..table import Entry, Table


def anova_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """Type-III analysis of variance of every number of the complete results, with partial eta squared."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    lines, remarks = [], []
    for column in main_measures(data):
        frame = numbers_of(data, column)
        try:
            table, told = anova(data, column)
        except ReportError as error:
            remarks.append(str(error))
            continue
        remarks += told
        origins = origins_of(frame, "")
        for row in table.to_dict("records"):
            entries = [
                Entry(text=str(row["df"]), heading="df", value=float(row["df"]), origins=origins),
                *(_statistic(name, heading, row[name]) for name, heading in (("sum_sq", "Sum sq"), ("F", "F"))),
                p_value("p", row["p"]),
                _statistic("partial_eta_sq", "Partial eta sq", row["partial_eta_sq"]),
            ]
            lines.append(Line(words=(column.heading, str(row["term"])), entries=tuple(entries)))
    title = f"Type-III analysis of variance, sweep {data.sweep}, revision {data.revision}"
    numbers = ("df", "Sum sq", "F", "p", "Partial eta sq")
    notes = [
        sweep_note(data),
        "Sum contrasts; shares as fractions. Partial eta squared: SS / (SS + residual SS).",
        *(f"{r}." for r in remarks),
    ]
    return assemble(data, "anova", title, ("Measure", "Term"), lines, numbers=numbers, notes=notes)


def _statistic(name: str, heading: str, value: float) -> Entry:
    decimals = {"sum_sq": 6, "F": 2, "partial_eta_sq": 3}[name]
    text = "-" if math.isnan(value) or math.isinf(value) else rounded(value, decimals)
    return Entry(text=text, heading=heading, value=value if math.isfinite(value) else None)
