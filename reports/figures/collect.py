"""Store and sweep -> tidy frame, for the figures over context lengths, tokens and time. Nothing here draws.

A figure that the data cannot give raises ReportError, in one line, with what would give it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...results import metrics
from ...results.intervals import wilson
from ...results.paper import OWNER as PRINTED_BY
from ...results.store.store import Store
from ..curves import kept
from ..data import Lengths, ReportError, SweepData, gather
from ..numbers import length_name
from .base import Collected, collected, groups_of, line_axes, training_lengths

GROUP = ["panel", "first", "second", "line"]
BETA_INIT = math.log1p(math.exp(-1.5))
"""softplus(-1.5) = 0.2014, the slope of the count map before training (docs/mechanisms.md, "Polar attention")."""
MOST_COUNT = 1000
CURVE = ("step", "tokens", "wall_s", "train_loss")
MOST_POINTS = 80_000
"""Points of all training curves of a figure together; with more, each is thinned and the figure says so."""
FEWEST_POINTS = 40  # that a curve keeps however many cells there are: it is smoothed over a 40th anyway
SMOOTHED = 40  # points of a curve that a running mean leaves apart
NORMS = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")


def _averaged_over(data: SweepData) -> str:
    """What differs between the cells of one line, in words."""
    told = ("attn_type", *line_axes(data))
    others = [axis for axis in ("distractor", "reg_mode", "memory", "window") if len(data.levels(axis)) > 1]
    names = [axis for axis in (*others, *data.extra_axes()) if axis not in told]
    names += ["seed"] if len({cell.seed for cell in data.cells}) > 1 else []
    return f"Thick lines: means over {', '.join(names)}; thin lines: single cells. " if names else ""


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


def _origins(frame: pd.DataFrame) -> list[tuple[str, int | None]]:
    return [(str(c), int(a)) for c, a in frame[["cell", "attempt"]].drop_duplicates().itertuples(index=False)]


def _one(values: Sequence[int]) -> int | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def needle(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Needle accuracy (digits, fraction) over context lengths; the frame is that of `over_lengths`."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    frame = over_lengths(data, training_lengths(store, data), "needle", "digit_accuracy")
    if frame.empty:
        raise ReportError(
            f"no cell of sweep {data.sweep} has needle accuracies; finish it, or evaluate with --probe needle"
        )
    counts = "Bars: 95% Wilson intervals of all digits of a line. " if frame["n"].notna().any() else ""
    notes = [f"{_averaged_over(data)}{counts}Dotted: a guess, 10%.", *uneven(lines_of(frame))]
    trained = _one(list(frame["trained"]))
    return collected(
        store,
        data,
        "needle",
        "Needle accuracy over context length",
        frame,
        _origins(frame),
        notes=notes,
        trained=trained,
    )


def losses(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Clean and junk loss (nats per token) over context lengths; the frame is that of `over_lengths`, probes in turn."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    trained = training_lengths(store, data)
    parts = [over_lengths(data, trained, probe, "nats") for probe in ("clean", "junk")]
    known = [part for part in parts if not part.empty]
    if not known:
        raise ReportError(
            f"no cell of sweep {data.sweep} has losses over lengths; finish it, or evaluate with --probe clean --probe junk"
        )
    frame = pd.concat(known, ignore_index=True)
    words = f"{_averaged_over(data)}Clean: whole documents. Junk: the validation stream across document borders."
    about = {"trained": _one(list(frame["trained"]))}
    notes = [words, *uneven(lines_of(frame))]
    return collected(store, data, "length", "Loss over context length", frame, _origins(frame), notes=notes, **about)


def count_map(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Collected:
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


def state_norm(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """Norm of the memory's state over context lengths; the frame is that of `over_lengths`, metrics of NORMS in turn."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    trained = training_lengths(store, data)
    parts = [over_lengths(data, trained, "state_norm", metric) for metric in NORMS]
    known = [part for part in parts if not part.empty]
    if not known:
        raise ReportError(
            f"no cell of sweep {data.sweep} has norms of its memory's state; evaluate cells with memory: --probe state_norm"
        )
    frame = pd.concat(known, ignore_index=True)
    words = (
        "Mean Frobenius norm over documents, layers, heads and cells. Delta: the trained memory. Hebbian: its keys, values and "
        "gates, written without erasing. γ = 1: nothing decays."
    )
    about = {"trained": _one(list(frame["trained"]))}
    return collected(
        store,
        data,
        "state-norm",
        "State of the memory over context length",
        frame,
        _origins(frame),
        notes=[words, *uneven(norm_means(frame))],
        **about,
    )


def norm_means(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a panel, metric and length of the state norms: value (mean over cells), cells, of (cells at any length)."""
    whole = frame.groupby(["panel", "metric"])["cell"].nunique().to_dict()
    means = frame.groupby(["panel", "metric", "length"], sort=False).agg(
        value=("value", "mean"), cells=("cell", "size")
    )
    means = means.reset_index()
    return means.assign(of=[int(whole[key]) for key in zip(means["panel"], means["metric"], strict=True)])


def smoothed(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Running mean over `width` neighbours, centred, over fewer at the ends; a width of 1 changes nothing."""
    return pd.Series(values, dtype=float).rolling(width, center=True, min_periods=1).mean().to_numpy()


def loss(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Collected:
    """Training loss (nats per token) against tokens and training seconds.

    One row a point of the curve of each cell's newest training: cell, attempt, panel, first, second, line, step, tokens,
    wall_s, train_loss, smoothed (running mean over a 40th of the points). Of a sweep with more than MOST_POINTS points in
    all, every k-th point of a curve, smoothed over all of them, so that neither time nor memory grows with its length.
    """
    data = gather(store, sweep, revision=revision)
    newest = {}
    for cell in data.cells:
        attempt = cell.trained_attempt_id or (cell.attempt_id if cell.kind == "train" else None)
        if attempt is not None:
            newest[attempt] = cell
    most = max(FEWEST_POINTS, MOST_POINTS // max(1, len(newest)))
    parts: list[np.ndarray] = []
    shown: list[int] = []
    longest, widest = 0, 1
    with store.snapshot() as seen:
        for attempt, points in seen.curve_arrays(newest, CURVE, having=["train_loss"]):
            width = max(1, len(points) // SMOOTHED)
            longest, widest = max(longest, len(points)), max(widest, width)
            kept_here = kept(len(points), most)
            parts.append(np.column_stack([points[kept_here], smoothed(points[:, 3], width)[kept_here]]))
            shown.append(attempt)
    if not parts:
        raise ReportError(f"no training curve of sweep {data.sweep} is stored")
    frame = _curve_frame(parts, [newest[attempt].cell_id for attempt in shown], shown, groups_of(data))
    words = f"One line a cell. Smoothing: {f'running mean over {widest} points' if widest > 1 else 'none'}."
    notes = [words, *([f"Drawn: at most {most} of up to {longest:,} points a line."] if longest > most else [])]
    axes = line_axes(data)
    origins = zip(frame["cell"].drop_duplicates(), shown, strict=True)
    return collected(store, data, "loss", "Training loss", frame, origins, notes=notes, axis=axes[0] if axes else "")


def _curve_frame(
    parts: Sequence[np.ndarray], cells: Sequence[str], attempts: Sequence[int], groups: dict[str, dict[str, str]]
) -> pd.DataFrame:
    """Points of CURVE and `smoothed`, a part an attempt, as one frame that says whose each is."""
    counts = [len(part) for part in parts]
    columns: dict[str, Any] = {
        "cell": np.repeat(np.array(cells, dtype=object), counts),
        "attempt": np.repeat(attempts, counts),
    }
    for name in GROUP:
        columns[name] = np.repeat(np.array([groups[cell][name] for cell in cells], dtype=object), counts)
    numbers = np.concatenate(parts)
    for place, name in enumerate((*CURVE, "smoothed")):
        columns[name] = numbers[:, place].astype(np.int64) if name in ("step", "tokens") else numbers[:, place]
    return pd.DataFrame(columns)


def timeline(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Collected:
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
    return collected(store, data, "timeline", "Attempts over time", frame, _origins(frame), notes=[words])
