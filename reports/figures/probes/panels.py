"""Lines of several mixers side by side, as long as they are few."""

from __future__ import annotations

import pandas as pd

from ...data import SweepData
from ..base import groups_of, line_axes

ONE_PANEL = 8
"""Lines that stand in one panel instead of a panel for each mixer."""


def side_by_side(data: SweepData, frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows with what their cells are drawn as (panel, first, second, line), and the axes of first and second: few lines in one
    panel, which has no name, else a panel for each mixer."""
    groups, axes = groups_of(data), line_axes(data)
    drawn = {cell: groups[cell] for cell in dict.fromkeys(frame["cell"])}
    if len(axes) < 2 and len({(one["panel"], one["line"]) for one in drawn.values()}) <= ONE_PANEL:
        axes = ("attn_type", *axes)
        drawn = {
            cell: {"panel": "", "first": one["panel"], "second": one["first"], "line": f"{one['panel']}, {one['line']}"}
            for cell, one in drawn.items()
        }
    told = {name: [drawn[cell][name] for cell in frame["cell"]] for name in ("panel", "first", "second", "line")}
    return frame.assign(**told), axes
