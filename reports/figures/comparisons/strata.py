"""Strata in figures (cells of one mixer, with or without memory): their order, labels and styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ...number_format import Column
from ...render.style import memory_look, mixer_inks
from ...stats.noise.run_noise import STRATUM_AXES, noise_by_stratum
from ...sweep_data import SweepData
from ..canvas import drawing
from .forest import default_columns

Stratum = tuple[str, ...]
AT_FLOOR = " *"
"""Mark of a standard deviation that the sampling error of trials sets, not the runs."""
FLOOR_NOTE = "*: a lower bound, the sampling error of the trials, as the runs differ by less."


def floor_key(**look: Any) -> dict[str, Any]:
    """Return the legend entry of marks at the sampling error of trials; `look` has its properties besides the star."""
    star: dict[str, Any] = {"linestyle": "none", "marker": "$*$", "color": drawing.GREY}
    return {"lower bound: sampling error of the trials": drawing.key(**star | look)}


def noise_columns(data: SweepData) -> list[Column]:
    """Return the numbers whose noise is shown: validation loss and needle accuracy among `default_columns`.

    Without these it is the first of them with a known spread, else the first; [] without any number.
    """
    shown = default_columns(data)
    chosen = [column for column in shown if column.metric == "val_loss" or column.probe == "needle"]
    return chosen or [column for column in shown if noise_by_stratum(data, column)][:1] or shown[:1]


def ordered_strata(data: SweepData, strata: Iterable[Stratum]) -> list[Stratum]:
    """Return the strata by mixer as in the grid, those without memory first within a mixer."""
    mixers = data.levels(STRATUM_AXES[0])
    return sorted(strata, key=lambda stratum: (mixers.index(stratum[0]), drawing.off_first(stratum[1])))


def stratum_label(data: SweepData, stratum: Stratum) -> str:
    """Return the label of a stratum, by the axes that vary, such as "PoLAR, with memory"; "all cells" if none does.

    Args:
        data: The sweep.
        stratum: (mixer, memory) levels.
    """
    labels = [
        drawing.level_label(level, axis)
        for axis, level in zip(STRATUM_AXES, stratum, strict=True)
        if len(data.levels(axis)) > 1
    ]
    return ", ".join(labels) or "all cells"


def strata_of(frame: pd.DataFrame) -> list[Stratum]:
    """Return the strata (mixer, memory) of a frame, in the order of its column `place`."""
    first = frame.sort_values("place", kind="stable").drop_duplicates("place")
    return list(zip(first["attn_type"], first["memory"], strict=True))


def stratum_styles(strata: Sequence[Stratum]) -> dict[Stratum, dict[str, Any]]:
    """Return the style of each stratum, as keyword arguments of matplotlib, by (mixer, memory).

    Keys: color (the mixer), linestyle and markerfacecolor (the memory: solid and filled, dashed and hollow without),
    marker and markeredgecolor.
    """
    inks = mixer_inks(stratum[0] for stratum in strata)
    return {(mixer, memory): memory_look(inks[mixer], memory) for mixer, memory in strata}
