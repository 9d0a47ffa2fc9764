"""The table `needle-model`: a binomial model of the needle's digits, in trials."""

from __future__ import annotations

from ...results.store.store import Store
from ..stats.effects.effects import origins_of
from ..stats.needle_model import needle_columns, needle_model
from ..sweep_data import Lengths, gather
from ..table import Table
from ..table_builder import Line, assemble, sweep_note
from .anova import said, statistic

HEADINGS = {"df": "df", "deviance": "Deviance", "F": "F", "p": "p", "odds_ratio": "Odds ratio", "low": "Low", "high": "High"}  # fmt: skip
NOTE = (
    "Quasi-binomial logit of the share of right digits. A cell counts as its trials, not its digits, and the spread between cells is measured, "
    "not assumed. Terms: drop in deviance over the scale, without the term and all that contain it (type II). Levels: odds "
    "ratio, low and high of its 95% interval, by the axes alone. No p is corrected for their number."
)


def needle_model_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """What every axis does to the odds of a right digit, at every length."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    found = [needle_model(data, column) for column in needle_columns(data)]
    lines = []
    for one in found:
        origins = origins_of(one.numbers, "")
        for row in one.frame.to_dict("records"):
            entries = [statistic(name, heading, row[name]) for name, heading in HEADINGS.items()]
            lines.append(Line(words=(one.column.heading, str(row["term"])), entries=tuple(entries), origins=origins))
    title = f"Binomial model of the needle, sweep {data.sweep}, revision {data.revision}"
    scales = [f"{one.column.heading} {one.scale:.2f}" for one in found if one.scale > 0]
    notes = [sweep_note(data), NOTE]
    if scales:
        notes.append(f"Scale, the variance as a multiple of that of independent trials: {', '.join(scales)}.")
    notes += said((one.column.heading, one.remarks) for one in found)
    if not found:
        notes.append("No cell has an accuracy of the needle; there is nothing to model.")
    return assemble(
        data, "needle-model", title, ("Measure", "Term"), lines, numbers=tuple(HEADINGS.values()), notes=notes
    )
