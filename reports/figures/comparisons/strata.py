"""Strata as figures show them: cells of one mixer, with or without memory, in an order and in colours of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ...number_format import Column
from ...stats.noise.run_noise import STRATUM_AXES, noise_by_stratum
from ...sweep_data import SweepData
from ..canvas import drawing
from .forest import default_columns

Stratum = tuple[str, ...]


def planned_measures(data: SweepData) -> list[Column]:
    """What noise is shown of: of the numbers of the figure `effects`, validation loss and the needle, or the first of them that has
    any."""
    shown = default_columns(data)
    chosen = [column for column in shown if column.metric == "val_loss" or column.probe == "needle"]
    return chosen or [column for column in shown if noise_by_stratum(data, column)][:1] or shown[:1]


def in_order(data: SweepData, found: Iterable[Stratum]) -> list[Stratum]:
    """These strata mixer by mixer as in the grid, those without memory first."""
    mixers = data.levels(STRATUM_AXES[0])
    return sorted(found, key=lambda one: (mixers.index(one[0]), drawing.off_first(one[1])))


def words_of(data: SweepData, stratum: Stratum) -> str:
    """A stratum by what tells it apart: PoLAR, with memory."""
    told = [
        drawing.shown_values(level, axis)
        for axis, level in zip(STRATUM_AXES, stratum, strict=True)
        if len(data.levels(axis)) > 1
    ]
    return ", ".join(told) or "all cells"


def strata_of(frame: pd.DataFrame) -> list[Stratum]:
    """The strata of a frame, by its column `place`."""
    first = frame.sort_values("place", kind="stable").drop_duplicates("place")
    return list(zip(first["attn_type"], first["memory"], strict=True))


def looks(strata: Sequence[Stratum]) -> dict[Stratum, dict[str, Any]]:
    """By stratum: colour, mark and dashes, which differ between mixers and between with and without memory."""
    mixers = list(dict.fromkeys(one[0] for one in strata))
    seconds = sorted({one[1] for one in strata}, key=drawing.off_first)
    return {one: drawing.line_style(mixers.index(one[0]), seconds.index(one[1]), len(seconds)) for one in strata}
