"""Numbers over context lengths: the tidy frame of them, the means of their lines, and how both are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ...results import metrics
from ...results.intervals import wilson
from ..data import SweepData
from ..numbers import length_name
from . import style
from .base import GROUP, groups_of, line_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def over_lengths(data: SweepData, trained: dict[str, int], probe: str, metric: str) -> pd.DataFrame:
    """One row a cell and context length that has the number.

    Columns: cell, attempt, panel, first, second, line, probe, metric, length (tokens), trained (tokens of a training row,
    the shortest length where the config does not say), ratio of the two, value, n, low, high.
    """
    lengths = data.lengths(probe, metric)
    groups = groups_of(data)
    rows = []
    for cell in data.cells:
        base = trained.get(cell.cell_id, min((length for length in lengths if length), default=1))
        for length in lengths:
            value = data.values.get((cell.cell_id, probe, metric, length))
            if not length or value is None or value.value is None:
                continue
            about: dict[str, Any] = {"cell": cell.cell_id, "attempt": value.attempt_id, **groups[cell.cell_id]}
            about |= {"probe": probe, "metric": metric, "length": length, "trained": base, "ratio": length / base}
            rows.append(about | {"value": value.value, "n": value.n, "low": value.low, "high": value.high})
    columns = ["cell", "attempt", *GROUP, "probe", "metric", "length", "trained", "ratio", "value", "n", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype({"value": float, "n": float, "low": float, "high": float})


def lines_of(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a line and length of `over_lengths`: value (mean over cells), cells, of (cells that the line has at any length),
    and low and high, a 95% Wilson interval.

    The interval is that of all answers of the line together, NaN where a count is not known. It tells how sure the mean of
    these cells is, not how far another training of them would be off.
    """
    rows = []
    whole = frame.groupby([*GROUP, "probe", "metric"])["cell"].nunique().to_dict()
    for key, group in frame.groupby([*GROUP, "probe", "metric", "length"], sort=False):
        mean, low, high = float(group["value"].mean()), math.nan, math.nan
        trials = metrics.metric(str(group["probe"].iloc[0]), str(group["metric"].iloc[0])).trials
        if trials and group["n"].notna().all():
            n = int(group["n"].sum())
            low, high = wilson(min(float((group["value"] * group["n"]).sum()), n), n)
        names = (*GROUP, "probe", "metric", "length")
        about = dict(zip(names, key, strict=True)) | {"value": mean, "cells": len(group)}
        rows.append(about | {"of": int(whole[key[:-1]]), "low": low, "high": high})
    return pd.DataFrame(rows, columns=[*GROUP, "probe", "metric", "length", "value", "cells", "of", "low", "high"])


def uneven(means: pd.DataFrame) -> list[str]:
    """The note on means of `lines_of` over fewer cells than their line has elsewhere; none where all have as many."""
    fewer = means[means["cells"] < means["of"]]
    if fewer.empty:
        return []
    told = list(dict.fromkeys(f"{length_name(int(length))}" for length in sorted(fewer["length"])))
    return [f"n=k (at {', '.join(told)}): a mean over k cells, fewer than the line has at other lengths."]


def averaged_over(data: SweepData) -> str:
    """What differs between the cells of one line, in words."""
    told = ("attn_type", *line_axes(data))
    others = [axis for axis in ("distractor", "reg_mode", "memory", "window") if len(data.levels(axis)) > 1]
    names = [axis for axis in (*others, *data.extra_axes()) if axis not in told]
    names += ["seed"] if len({cell.seed for cell in data.cells}) > 1 else []
    return f"Thick lines: means over {', '.join(names)}; thin lines: single cells. " if names else ""


def only(values: Sequence[int]) -> int | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def looks(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """By line, in the frame's order: how it is drawn."""
    firsts = list(dict.fromkeys(frame["first"]))
    seconds = list(dict.fromkeys(frame["second"]))
    lines = frame.drop_duplicates("line")
    # levels in an order of their own, so that "off" looks alike in every figure
    firsts, seconds = sorted(firsts, key=style.off_first), sorted(seconds, key=style.off_first)
    return {
        str(row["line"]): style.look(firsts.index(row["first"]), seconds.index(row["second"]))
        for _, row in sorted(
            lines.iterrows(), key=lambda pair: (firsts.index(pair[1]["first"]), seconds.index(pair[1]["second"]))
        )
    }


def draw_lines(
    axes: Axes, cells: pd.DataFrame, means: pd.DataFrame, found: dict[str, dict[str, Any]], scale: float
) -> dict[str, Any]:
    """Draws the cells thin and the means of their lines thick; returns a handle by line."""
    handles: dict[str, Any] = {}
    for name, how in found.items():
        line = means[means["line"] == name].sort_values("length")
        if line.empty:
            continue
        if (line["cells"] > 1).any():
            for _, cell in cells[cells["line"] == name].groupby("cell", sort=False):
                one = cell.sort_values("length")
                axes.plot(
                    one["length"],
                    scale * one["value"],
                    color=how["color"],
                    linestyle=how["linestyle"],
                    linewidth=0.5,
                    alpha=0.3,
                )
        (handles[name],) = axes.plot(line["length"], scale * line["value"], zorder=3, **how)
        count_fewer(axes, line, how["color"], scale)
        if line["low"].notna().any():
            below, above = line["value"] - line["low"], line["high"] - line["value"]
            axes.errorbar(
                line["length"], scale * line["value"], yerr=[scale * below.clip(0), scale * above.clip(0)],
                fmt="none", ecolor=how["color"], elinewidth=0.8, capsize=1.8, capthick=0.8, zorder=2,
            )  # fmt: skip
    return handles


def count_fewer(axes: Axes, means: pd.DataFrame, ink: str, scale: float = 1) -> None:
    """Writes n beside every mean that is over fewer cells than its line has elsewhere."""
    for _, one in means[means["cells"] < means["of"]].iterrows():
        axes.annotate(
            f"n={int(one['cells'])}", (one["length"], scale * one["value"]), xytext=(0, 5), textcoords="offset points",
            ha="center", fontsize=style.size("small"), color=ink, zorder=4, bbox=style.backing(),
        )  # fmt: skip


def length_label(trained: int | None) -> str:
    return "context length, tokens" + (" and multiples of the training length" if trained else "")
