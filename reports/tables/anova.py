"""The tables `anova` and `needle-model`: linear models of every number, and a binomial model of the needle's digits."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...results.store.store import Store
from ..number_format import BARE, format_number, squared
from ..stats.anova import anova_results
from ..stats.effects.effects import main_measures, origins_of
from ..stats.needle_model import needle_columns, needle_model
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import EMPTY_TEXT, TableRow, build_table, p_value_entry, sweep_note

HEADINGS = {"df": "df", "sum_sq": "Sum sq", "F": "F", "p": "p", "p_permuted": "p perm", "p_robust": "p Box", "omega_sq": "Omega sq", "partial_eta_sq": "Partial eta sq"}  # fmt: skip
DECIMALS = {"df": 0, "sum_sq": 6, "F": 2, "omega_sq": 3, "partial_eta_sq": 3, "deviance": 2, "odds_ratio": 3, "low": 3, "high": 3}  # fmt: skip
NOTE = (
    "Sum contrasts; shares as fractions. p: F test. p perm: {} permutations of the residuals without the term (Freedman and Lane), which residuals of any "
    "shape bear. p Box: F whose degrees of freedom bear unequal spread. No p is corrected for their number. Omega squared: (SS - df MSE) / (total SS + MSE); partial eta "
    "squared: SS / (SS + residual SS). Runs are the unit: whether an effect holds over configurations and seeds, the table "
    "effects says."
)


def anova_table(store: Store, data: SweepData) -> Table:
    """Type-III analysis of variance of every number of the complete results: F, permutation p, effect sizes, and where the
    residuals are not what an F test is made for."""
    found = anova_results(data, main_measures(data))
    lines = []
    for one in found:
        origins, square = origins_of(one.numbers, ""), squared(one.column.unit)
        for row in one.frame.to_dict("records"):
            entries = [
                statistic(name, heading, row[name], square if name == "sum_sq" else BARE)
                for name, heading in HEADINGS.items()
            ]
            labels = (one.column.heading, str(row["term"]), square or EMPTY_TEXT)
            lines.append(TableRow(words=labels, entries=tuple(entries), origins=origins))
    title = "Type-III analysis of variance"
    times = sorted({one.permutations for one in found if one.permutations})
    notes = [sweep_note(data), *([NOTE.format(" or ".join(map(str, times)))] if times else [])]
    notes += said((one.column.heading, one.remarks) for one in found)
    if not found:
        notes.append("No number of the complete results is known of two cells; there is nothing to analyse yet.")
    return build_table(
        data, "anova", title, ("Measure", "Term", "Sum sq in"), lines, numbers=tuple(HEADINGS.values()), notes=notes
    )


def statistic(name: str, heading: str, value: float, unit: str = BARE) -> TableEntry:
    """Return the entry of a number of a model, in its unit; NaN where there is none."""
    if name.startswith("p") and name != "partial_eta_sq":
        return p_value_entry(heading, value)
    text = "-" if math.isnan(value) or math.isinf(value) else format_number(value, DECIMALS[name])
    return TableEntry(
        text=text, heading=heading, value=float(value) if math.isfinite(value) else None, unit=unit or None
    )


def said(remarks: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """One line for every remark, with all headings that it is about."""
    about: dict[str, list[str]] = {}
    for heading, some in remarks:
        for remark in some:
            about.setdefault(remark, []).append(heading)
    return [f"{', '.join(headings)}: {remark}." for remark, headings in about.items()]


# --- a binomial model of the needle -----------------------------------------------------------------------------------


NEEDLE_HEADINGS = {"df": "df", "deviance": "Deviance", "F": "F", "p": "p", "odds_ratio": "Odds ratio", "low": "Low", "high": "High"}  # fmt: skip
NEEDLE_NOTE = (
    "Quasi-binomial logit of the share of right digits. A cell counts as its trials, not its digits, and the spread between cells is measured, "
    "not assumed. Terms: drop in deviance over the scale, without the term and all that contain it (type II). Levels: odds "
    "ratio, low and high of its 95% interval, by the axes alone. No p is corrected for their number."
)


def needle_model_table(store: Store, data: SweepData) -> Table:
    """What every axis does to the odds of a right digit, at every length."""
    found = [needle_model(data, column) for column in needle_columns(data)]
    lines = []
    for one in found:
        origins = origins_of(one.numbers, "")
        for row in one.frame.to_dict("records"):
            entries = [statistic(name, heading, row[name]) for name, heading in NEEDLE_HEADINGS.items()]
            lines.append(
                TableRow(words=(one.column.heading, str(row["term"])), entries=tuple(entries), origins=origins)
            )
    title = "Binomial model of the needle"
    scales = [f"{one.column.heading} {one.scale:.2f}" for one in found if one.scale > 0]
    notes = [sweep_note(data), NEEDLE_NOTE]
    if scales:
        notes.append(f"Scale, the variance as a multiple of that of independent trials: {', '.join(scales)}.")
    notes += said((one.column.heading, one.remarks) for one in found)
    if not found:
        notes.append("No cell has an accuracy of the needle; there is nothing to model.")
    return build_table(
        data, "needle-model", title, ("Measure", "Term"), lines, numbers=tuple(NEEDLE_HEADINGS.values()), notes=notes
    )
