"""Figure `importance`: share of the variance that each setting of a study accounts for."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ....results.store.store import Store
from ...render.style import tint
from ...stats.importance import (
    EVALUATOR_NAMES,
    FANOVA,
    MIN_TRIALS,
    PED_ANOVA,
    available_evaluator,
    importances,
    out_of_sample_r2,
    permutation_count,
)
from ...stats.study_data import METHOD_NAMES, Study, at_common_rung, require_done_trials, rung_note, study_of
from ...sweep_data import ReportError, SweepData
from ..canvas import drawing
from ..canvas.base import Axes, Figure, FigureData, FigureOptions, collected
from .settings import search_space_text, setting_label

BAR, PALE_BAR = drawing.GREY, tint(drawing.GREY, 0.65)
"""Greys, since a colour means a mixer."""
REST: dict[str, Any] = {"facecolor": "white", "edgecolor": drawing.GREY, "hatch": drawing.HATCHES[1]}
"""Look of interactions, which no permutation tests."""
ROW = 0.24  # inches, height of a setting's bar
MEANINGS = {
    FANOVA: "share of the objective's variance in a random forest that a setting alone explains, without an interval",
    PED_ANOVA: "divergence of a setting's values in the best trials from those in all, as a share of the sum over "
    "settings",
}
"""Meaning of an importance, by evaluator."""
INTERACTIONS = "interactions"
CHANCE = "95th percentile under random permutation"


def collect(store: Store, data: SweepData, *, evaluator: str | None = None) -> FigureData:
    """Return the importance of the settings that vary, one row per objective and setting.

    The most important setting of an objective comes first; fANOVA has the rest of the variance, interactions, last.
    Columns: objective, words (display name of the objective),
    setting (dotted path), name (short), share (in %), chance (in %: the 95th
    percentile of the share under random permutation of the values), sure (True if the share is above it). Where a
    pruner left too few finished trials, all are compared at their last common validation (`at_common_rung`).

    Args:
        store: The database.
        data: The sweep.
        evaluator: "fanova" or "ped-anova", as a written figure records it; None: the one that this machine has.

    Raises:
        ReportError: The sweep is no study, there are fewer than ten finished trials or two settings that vary, or the
            evaluator is unknown or its library is not installed.
    """
    study = require_done_trials(at_common_rung(study_of(store, data)), MIN_TRIALS, "the figure importance")
    moving = study.varying_settings()
    if len(moving) < 2:
        reason = f"only {moving[0]} differs" if moving else "no setting differs"
        raise ReportError(
            f"the figure importance needs two settings that vary, and {reason} between the trials of sweep "
            f"{study.name}; use --figure slices"
        )
    method = evaluator or available_evaluator()
    if method not in EVALUATOR_NAMES:
        raise ReportError(f"unknown evaluator {method[:40]} of importance; draw the figure of sweep {study.name} again")
    rows: list[dict[str, Any]] = []
    for objective in study.objectives:
        try:
            setting_importances = importances(study, objective, method)
        except ImportError as error:
            raise ReportError(
                f"this figure of sweep {study.name} was made with fANOVA, which needs scikit-learn; install it, or "
                "draw the figure again"
            ) from error
        for importance in setting_importances:
            row: dict[str, Any] = {"objective": objective.name, "words": objective.words, "setting": importance.path}
            row |= {
                "name": study.names[importance.path],
                "share": 100 * importance.share,
                "chance": 100 * importance.chance,
            }
            rows.append(row | {"sure": importance.share > importance.chance})
        rest = 1 - sum(importance.share for importance in setting_importances)
        if method == FANOVA and rest > 0:
            fields = {"setting": "", "name": INTERACTIONS, "share": 100 * rest, "chance": math.nan, "sure": False}
            rows.append({"objective": objective.name, "words": objective.words} | fields)
    trials = "trials" if study.rung else "finished trials"
    still = [path for path in study.search.ranges if path not in moving]
    n_tests = sum(bool(row["setting"]) for row in rows)
    aims = ", ".join(each.words for each in study.objectives)
    notes = [
        f"{EVALUATOR_NAMES[method]} of {len(study.done)} {trials} (n), objective: {aims}: {MEANINGS[method]}. Upright line: "
        f"{CHANCE} ({permutation_count(method, len(study.done))} permutations of the values, so that it is rough; "
        f"{n_tests} tests, not corrected).{' Arrow: line beyond the axis.' if any(row['chance'] > 100 for row in rows) else ''}"
        f" Shares depend on the ranges searched{_sampler_text(study)}: {search_space_text(study)}."
    ]
    if method == FANOVA:
        shares = [f"{100 * out_of_sample_r2(study, objective):.0f} %" for objective in study.objectives]
        notes.append(f"A forest explains {', '.join(shares)} of the variance of left-out trials (five folds).")
    if still:
        notes.append(f"Settings that do not vary between trials: {', '.join(still)}.")
    return collected(
        store, study.data, "importance", "Importance of settings", pd.DataFrame(rows), study.origins(study.done),
        notes=[*notes, *rung_note(study)], options={"evaluator": method},
    )  # fmt: skip


def _sampler_text(study: Study) -> str:
    """Return " by" and the sampler, whose trials are not spread evenly over the ranges unless it is random."""
    return f" by {METHOD_NAMES[study.search.sampler]}"


def draw(figure_data: FigureData, look: FigureOptions) -> Figure:
    """Draw a panel per objective: a horizontal bar per setting, with the level of chance marked in each.

    Bars are shares in %, the most important on top; those not above chance are pale. `look` is not used.
    """
    frame = figure_data.frame
    names = list(dict.fromkeys(frame["objective"]))
    rows = int(frame.groupby("objective").size().max())
    figure = drawing.page(ROW * rows + 0.75, 5.2 if len(names) == 1 else drawing.PAGE_WIDTH)
    for axes, name in zip(drawing.panel_column(figure, len(names)), names, strict=True):
        _draw_panel(axes, frame[frame["objective"] == name])
        if len(names) > 1:
            axes.set_title(str(frame[frame["objective"] == name]["words"].iloc[0]))
    mark = drawing.key(color=drawing.INK, linestyle="none", marker="|", markeredgewidth=drawing.line_width(1.6))
    handles = {"above chance": drawing.patch(facecolor=BAR, edgecolor=BAR)} if frame["sure"].any() else {}
    handles |= (
        {} if frame["sure"].all() else {"not above chance": drawing.patch(facecolor=PALE_BAR, edgecolor=PALE_BAR)}
    )
    if frame["chance"].isna().any():
        handles["rest: interactions of settings, not tested"] = drawing.patch(**REST)
    return drawing.finished(figure, figure_data.title, figure_data.notes, handles | {CHANCE: mark})


def _draw_panel(axes: Axes, panel_rows: pd.DataFrame) -> None:
    """Draw the bars of an objective, top to bottom in the order of the rows, on an axis from 0 to 100 %.

    Bars that are not above chance are pale, and their shares stand at the right. A chance level beyond 100 % is an
    arrow at the edge.
    """
    heights = range(len(panel_rows))
    for height, row in zip(heights, panel_rows.to_dict("records"), strict=True):
        look = REST if math.isnan(row["chance"]) else {"color": BAR if row["sure"] else PALE_BAR}
        axes.barh(height, row["share"], height=0.62, zorder=2, **look)
    # markers beyond the axis are drawn last
    for at, height in sorted(zip(panel_rows["chance"], heights, strict=True), key=lambda pair: pair[0] > 100):
        marker, size, edge = ("|", 9.0, 1.6) if at <= 100 else (">", 4.0, None)
        style: dict[str, Any] = {"markersize": size} | ({"markeredgewidth": edge} if edge else {})
        if at <= 100:
            # a white edge separates the line from a dark bar
            halo = {"color": "#ffffff", "markersize": size + 1.0, "markeredgewidth": 3.6, "zorder": 2.5}
            drawing.points(axes, at, height, marker, **halo)
        drawing.points(axes, min(at, 100.0), height, marker, color=drawing.INK, zorder=3, clip_on=False, **style)
    for height, share in enumerate(panel_rows["share"]):
        style = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        drawing.note(axes, f"{share:.0f} %" if share >= 0.5 else "< 1 %", (1, height), (7, 0), **style)
    axes.set_yticks(heights, [setting_label(str(name)) for name in panel_rows["name"]])
    axes.set_ylim(len(panel_rows) - 0.45, -0.55)
    axes.set_xlim(0, 100)
    axes.locator_params(axis="x", nbins=5)
    drawing.rows_alone(axes)
    axes.spines["left"].set_visible(True)
    axes.set_xlabel("share of the variance, %" if panel_rows["chance"].isna().any() else "importance, %")
