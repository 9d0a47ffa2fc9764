"""The figure `count-map`: what m keys of one weight come to in Polar attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ...results.store.store import Store
from ..data import ReportError, gather
from . import style
from .base import Collected, collected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .look import Look

BETA_INIT = math.log1p(math.exp(-1.5))
"""softplus(-1.5) = 0.2014, the slope of the count map before training (docs/mechanisms.md, "Polar attention")."""
MOST_COUNT = 1000


def collect(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Collected:
    """The count map of Polar attention, mag = tanh(beta ln(1 + m)): what m keys that share the weight alike come to.

    One row a curve and m in 0 to 1000: source (`init`, or the cell of a learned slope), cell, attempt, beta, lowest and
    highest (over heads), m, mag. Learned slopes are those that the probe `count_map` stored.
    """
    data = gather(store, sweep, revision=revision)
    polar = [cell for cell in data.cells if cell.levels["attn_type"] == "polar"]
    if not polar:
        raise ReportError(f"sweep {data.sweep} has no polar cell, and only those have a count map")
    curves: list[dict[str, Any]] = [
        {"source": "init", "cell": None, "attempt": None, "beta": BETA_INIT, "lowest": math.nan, "highest": math.nan}
    ]
    for cell in polar:
        found = [
            data.values.get((cell.cell_id, "count_map", name, 0)) for name in ("beta", "beta_lowest", "beta_highest")
        ]
        numbers = [value.value if value is not None else None for value in found]
        if found[0] is not None and numbers[0] is not None:
            mean, lowest, highest = (math.nan if number is None else number for number in numbers)
            about = {"source": cell.slug, "cell": cell.cell_id, "attempt": found[0].attempt_id}
            curves.append(about | {"beta": mean, "lowest": lowest, "highest": highest})
    m = np.unique(np.concatenate([np.arange(0, 10), np.geomspace(10, MOST_COUNT, 60).round()]))
    rows = [
        curve | {"m": float(one), "mag": math.tanh(curve["beta"] * math.log1p(one))} for curve in curves for one in m
    ]
    frame = pd.DataFrame(rows)
    learned = len(curves) - 1
    words = "mag = tanh(β ln(1 + m)), β = softplus(mag_beta); β starts at softplus(-1.5) = 0.201. "
    words += (
        f"Learned: mean over all heads of {learned} cells; shaded: from the flattest to the steepest head of any."
        if learned
        else "No learned β is stored: evaluate a polar cell with --probe count_map."
    )
    origins: list[tuple[str, int | None]] = [(str(curve["cell"]), int(curve["attempt"])) for curve in curves[1:]]
    origins = origins or [(cell.cell_id, None) for cell in polar]
    return collected(store, data, "count-map", "Count map of Polar attention", frame, origins, notes=[words])


def draw(made: Collected, look: Look) -> Figure:
    """mag over ln(1 + m), one curve a slope."""
    from matplotlib.patches import Patch

    frame = made.frame
    figure = style.page(3.1, 5.4)
    (axes,) = style.panels(figure, [""])
    handles: dict[str, Any] = {}
    init = frame[frame["source"] == "init"]
    x = np.log1p(init["m"].to_numpy(dtype=float))
    learned = [curve for name, curve in frame.groupby("source", sort=False) if name != "init"]
    if learned:
        slopes = [(curve["lowest"].iloc[0], curve["highest"].iloc[0]) for curve in learned]
        low, high = min(low for low, _ in slopes), max(high for _, high in slopes)
        axes.fill_between(x, np.tanh(low * x), np.tanh(high * x), color="#dfe9f2", linewidth=0, zorder=1)
        handles[f"learned, single heads: β {low:.3f} to {high:.3f}"] = Patch(facecolor="#dfe9f2", edgecolor=style.GREY)
    (handles[f"at the start: β {init['beta'].iloc[0]:.3f}"],) = axes.plot(x, init["mag"], color="#000000", zorder=4)
    for place, curve in enumerate(learned):
        how = style.look(place) | {"linestyle": style.DASHES[1 + place % 3], "markevery": 12 + place % 5}
        if len(learned) > len(style.INKS):
            how = {"color": style.INKS[0], "linewidth": 0.7, "alpha": 0.6}
        (line,) = axes.plot(np.log1p(curve["m"]), curve["mag"], zorder=3, **how)
        several = len(learned) > len(style.INKS)
        handles[
            f"learned, {len(learned)} cells" if several else f"{curve['source'].iloc[0]}: β {curve['beta'].iloc[0]:.3f}"
        ] = line
    shown = [0, 1, 3, 10, 30, 100, 300, MOST_COUNT]
    axes.set_xticks([math.log1p(m) for m in shown], [str(m) for m in shown])
    axes.set_xlim(0, math.log1p(MOST_COUNT))
    axes.set_ylim(0, 1)
    axes.set_xlabel("m, keys that share the weight alike (drawn as ln(1 + m))")
    axes.set_ylabel("mag")
    return style.finished(figure, made.title, made.notes, handles, columns=2)
