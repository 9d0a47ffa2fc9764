"""The figure `timeline`: which machine ran what when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from ...results.paper import OWNER as PRINTED_BY
from ...results.store.store import Store
from ..data import ReportError, gather
from . import style
from .base import Collected, collected, origins_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .look import Look

ENDS = {
    "done": "#56B4E9",
    "running": "#ffffff",
    "interrupted": "#b8b8b8",
    "failed": "#D55E00",
    "diverged": "#000000",
}
"""By state: how an attempt's bar is filled."""


def collect(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Collected:
    """Which machine ran what when: one row an attempt, oldest first.

    Columns: cell, slug, attempt, kind, host, gpu (its name, or the device), lane (0, 1, ... where several run at once on
    such a machine), start and end (seconds since the first start), state, failure, step.
    """
    data = gather(store, sweep, revision=revision)
    slugs = {cell.cell_id: cell.slug for cell in data.cells}
    attempts = [one for one in store.attempts_of(slugs) if one.owner != PRINTED_BY]
    if not attempts:
        raise ReportError(f"no attempt of sweep {data.sweep} ran here")
    known = store.provenances([one.id for one in attempts])
    first = min(one.started_at for one in attempts)
    hosts = {one.host: known[one.id].gpu_name or known[one.id].device for one in attempts if one.id in known}
    rows: list[dict[str, Any]] = []
    busy: dict[tuple[str, str], list[float]] = {}
    for one in sorted(attempts, key=lambda attempt: (attempt.started_at, attempt.id)):
        told = known.get(one.id)
        # one that died before it said where it runs stands with its host's others
        gpu = (told.gpu_name or told.device) if told else hosts.get(one.host, "")
        start = (one.started_at - first).total_seconds()
        # a running attempt is drawn up to the last sign of life
        end = max(start, ((one.finished_at or one.heartbeat_at) - first).total_seconds())
        lanes = busy.setdefault((one.host, gpu), [])
        lane = next((place for place, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        about = {"cell": one.cell_id, "slug": slugs[one.cell_id], "attempt": one.id, "kind": one.kind, "host": one.host}
        about |= {"gpu": gpu, "lane": lane, "start": start, "end": end}
        rows.append(about | {"state": one.state, "failure": one.failure, "step": one.step})
    frame = pd.DataFrame(rows)
    words = f"First start {first:%Y-%m-%d %H:%M} UTC. A cross marks an attempt that failed or diverged."
    return collected(store, data, "timeline", "Attempts over time", frame, origins_in(frame), notes=[words])


def draw(made: Collected, look: Look) -> Figure:
    """A lane for each attempt that runs at once on a machine, a bar an attempt."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    frame = made.frame
    unit, size = style.time_unit(float(frame["end"].max()))
    machines = frame.groupby(["host", "gpu"], sort=False)["lane"].max() + 1
    first_lane = dict(zip(machines.index, machines.cumsum() - machines, strict=True))
    total = int(machines.sum())
    figure = style.page(min(8.0, 0.32 * max(total, 2 * len(machines))) + 0.55)
    (axes,) = style.panels(figure, [""])
    wide = float(frame["end"].max()) / size or 1.0
    for _, one in frame.iterrows():
        y = first_lane[one["host"], one["gpu"]] + one["lane"]
        length = max((one["end"] - one["start"]) / size, wide / 400)
        axes.barh(
            y, length, left=one["start"] / size, height=0.74, facecolor=ENDS[one["state"]], edgecolor="#000000", linewidth=0.5,
            hatch=_hatch(one["state"]), alpha=1.0,
        )  # fmt: skip
        if one["state"] in ("failed", "diverged"):
            axes.plot(
                one["start"] / size + length,
                y,
                marker="X",
                color="#000000",
                markeredgecolor="#ffffff",
                markersize=7,
                zorder=5,
            )
    words = [" ".join(filter(None, (host, f"({gpu})" if gpu else ""))) for host, gpu in machines.index]
    centres = [first_lane[key] + (count - 1) / 2 for key, count in machines.items()]
    axes.set_yticks(centres, [style.shortened(word, 34) for word in words])
    for start in list(first_lane.values())[1:]:
        axes.axhline(start - 0.5, color=style.GREY, linewidth=0.6)
    axes.set_ylim(total - 0.4, -0.6)
    axes.set_xlim(-0.01 * wide, 1.03 * wide)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit} since the first start")
    handles: dict[str, Any] = {
        state: Patch(facecolor=ENDS[state], edgecolor="#000000", linewidth=0.5, hatch=_hatch(state))
        for state in ENDS
        if (frame["state"] == state).any()
    }
    counts = frame["state"].value_counts()
    named = {f"{state} ({counts[state]})": handle for state, handle in handles.items()}
    if frame["state"].isin(["failed", "diverged"]).any():
        named["failed or diverged here"] = Line2D([], [], linestyle="none", marker="X", color="#000000", markersize=7)
    return style.finished(figure, made.title, made.notes, named)


def _hatch(state: str) -> str:
    return style.HATCHES[list(ENDS).index(state)] if state != "diverged" else ""
