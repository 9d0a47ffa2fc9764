"""Tables `anova` and `needle-model`: linear models of every number, and a binomial model of the needle's digits."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...results.store.store import Store
from ..number_format import BARE, format_number, squared
from ..stats.anova import anova_results
from ..stats.effects.effects import frame_origins, main_measures
from ..stats.needle_model import needle_columns, needle_model
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import EMPTY_TEXT, TableRow, build_table, p_value_entry, sweep_note

HEADINGS = {"df": "df", "sum_sq": "Sum sq", "F": "F", "p": "p", "p_permuted": "p perm", "p_robust": "p Box", "omega_sq": "Omega sq", "partial_eta_sq": "Partial eta sq"}  # fmt: skip
DECIMALS = {"df": 0, "sum_sq": 6, "F": 2, "omega_sq": 3, "partial_eta_sq": 3, "deviance": 2, "odds_ratio": 3, "low": 3, "high": 3}  # fmt: skip
NOTE = (
    "Sum contrasts; shares as fractions. p: F test. p perm: {} permutations of the residuals without "
    "the term (Freedman and Lane): approximate; needs equal variances, but no normal residuals. p Box: F test with degrees "
    "of freedom adjusted for unequal variances. p values are not corrected for multiple testing. Omega "
    "squared: (SS - df MSE) / (total SS + MSE); partial eta squared: SS / (SS + residual SS). The unit "
    "of analysis is the run; table effects tests whether an effect holds across configurations and "
    "seeds."
)


def anova_table(store: Store, data: SweepData) -> Table:
    """Return the table `anova`: type-III analysis of variance of every number of the complete results.

    One row per number and term. Labels: Measure, Term and Sum sq in (the squared unit, "-" without one). Number
    columns: df, Sum sq, F, p, p perm (permutations), p Box (robust), Omega sq and Partial eta sq. The unit are runs,
    not configurations. Notes name the numbers whose residuals violate the assumptions of an F test. `store` is not
    used.
    """
    models = anova_results(data, main_measures(data))
    lines = []
    for model in models:
        origins, square = frame_origins(model.numbers, ""), squared(model.column.unit)
        for row in model.frame.to_dict("records"):
            entries = [
                statistic_entry(name, heading, row[name], square if name == "sum_sq" else BARE)
                for name, heading in HEADINGS.items()
            ]
            labels = (model.column.heading, str(row["term"]), square or EMPTY_TEXT)
            lines.append(TableRow(labels=labels, entries=tuple(entries), origins=origins))
    title = "Type-III analysis of variance"
    times = sorted({model.permutations for model in models if model.permutations})
    notes = [sweep_note(data), *([NOTE.format(" or ".join(map(str, times)))] if times else [])]
    notes += remark_notes((model.column.heading, model.remarks) for model in models)
    if not models:
        notes.append("Nothing to analyse yet: no number of the complete results is available for two cells.")
    return build_table(
        data, "anova", title, ("Measure", "Term", "Sum sq in"), lines, numbers=tuple(HEADINGS.values()), notes=notes
    )


def statistic_entry(name: str, heading: str, value: float, unit: str = BARE) -> TableEntry:
    """Return the table entry of one statistic of a model.

    Args:
        name: Name of the statistic, which decides its decimals. p, p_permuted and p_robust are p values; the others are
            df, sum_sq, F, omega_sq, partial_eta_sq, deviance, odds_ratio, low and high.
        heading: Heading of the column.
        value: The statistic; NaN or infinity prints as "-" and gives the value None (a p value must not be infinite).
        unit: Unit of the value; not used for a p value.
    """
    if name.startswith("p") and name != "partial_eta_sq":
        return p_value_entry(heading, value)
    text = "-" if math.isnan(value) or math.isinf(value) else format_number(value, DECIMALS[name])
    return TableEntry(
        text=text, heading=heading, value=float(value) if math.isfinite(value) else None, unit=unit or None
    )


def remark_notes(remarks: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return one note per distinct remark, in order of first occurrence: "heading, heading: remark.".

    Args:
        remarks: (heading, remarks) pairs.
    """
    headings_by_remark: dict[str, list[str]] = {}
    for heading, remarks_of_heading in remarks:
        for remark in remarks_of_heading:
            headings_by_remark.setdefault(remark, []).append(heading)
    return [f"{', '.join(headings)}: {remark}." for remark, headings in headings_by_remark.items()]


# --- a binomial model of the needle -----------------------------------------------------------------------------------


NEEDLE_HEADINGS = {"df": "df", "deviance": "Deviance", "F": "F", "p": "p", "odds_ratio": "Odds ratio", "low": "Low", "high": "High"}  # fmt: skip
NEEDLE_NOTE = (
    "Quasi-binomial logit of the share of correct digits. A cell counts as its trials, not its digits, "
    "and the variance between cells is estimated. Terms: drop in deviance, divided by the scale, "
    "without the term and all terms that contain it (type II). Levels: odds ratio with its 95% "
    "interval (Low, High), from main effects only. p values are not corrected for multiple testing."
)


def needle_model_table(store: Store, data: SweepData) -> Table:
    """Return the table `needle-model`: effects on the odds of a correct digit, one row per context length and term.

    Labels: Measure and Term. Number columns: df, Deviance, F, p, Odds ratio, Low and High. Terms have df, deviance, F
    and p; levels df, p, their odds ratio (not a logarithm) and its 95 % interval; the others are "-". Notes give the
    dispersion of each length. `store` is not used.
    """
    models = [needle_model(data, column) for column in needle_columns(data)]
    lines = []
    for model in models:
        origins = frame_origins(model.numbers, "")
        for row in model.frame.to_dict("records"):
            entries = [statistic_entry(name, heading, row[name]) for name, heading in NEEDLE_HEADINGS.items()]
            lines.append(
                TableRow(labels=(model.column.heading, str(row["term"])), entries=tuple(entries), origins=origins)
            )
    title = "Binomial model of needle accuracy"
    scales = [f"{model.column.heading} {model.scale:.2f}" for model in models if model.scale > 0]
    notes = [sweep_note(data), NEEDLE_NOTE]
    if scales:
        notes.append(f"Scale (variance relative to that of independent trials): {', '.join(scales)}.")
    notes += remark_notes((model.column.heading, model.remarks) for model in models)
    if not models:
        notes.append(
            "Nothing to model: no cell has a needle accuracy; finish the sweep, or evaluate with --probe needle."
        )
    return build_table(
        data, "needle-model", title, ("Measure", "Term"), lines, numbers=tuple(NEEDLE_HEADINGS.values()), notes=notes
    )
