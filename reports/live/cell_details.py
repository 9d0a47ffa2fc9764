"""Data and text of the command `show`: one cell with its config, attempts, curve and measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ...results import metrics
from ...results.console.progress import sparkline
from ...results.console.quantities import format_bytes, format_duration, format_tokens
from ...results.console.terminal_table import table_lines
from ...results.console.text import counted
from ...results.exchange.installed_parts import describe_plugins
from ...results.store import records
from ...results.store.store import Store
from ...results.weights import INITIAL_WEIGHTS, describe_initial
from ..stats.significance.trial_intervals import (
    CONSTANT_ACCURACY,
    DIGIT_ACCURACY,
    constant_answer_scores,
    with_intervals,
)
from .status import format_time

CURVE_LINES = 12
CURVE_WIDTH = 40
"""Characters of the sparkline of a curve."""
CURVE_HEADINGS = ("step", "tokens", "train loss", "val loss", "gradient norm", "schedule factor", "tokens/s")
LONG_S = 120.0
"""Seconds from which a measured duration is shown in minutes, hours or days."""
SCHEDULED_RATES = ("embedding_lr", "head_lr", "scalar_lr")
"""Learning rates of a config, besides that of the matrices, that the schedule's factor multiplies."""


@dataclass(frozen=True)
class CellDetails:
    """Stored details of one cell: config, attempts, curve, samples and measurements.

    `attempts` are all of them, oldest first. `curve` and `samples` are of the last finished training attempt, or the
    last training attempt if none finished. `values` have the intervals of reports.
    """

    cell: records.CellRecord
    attempts: Sequence[records.Attempt]
    curve: Sequence[records.CurvePoint]
    values: Sequence[records.MeasuredValue]
    source: str | None = None
    """Publication of the numbers of a published cell; None for a launched cell."""
    samples: Sequence[records.Sample] = ()
    """Texts that the network generated during the training of `curve`."""
    initial: Mapping[str, Any] | None = None
    """Weights that this training began from: source, sha256, new and unused tensors; None for random ones."""

    def as_json(self) -> dict[str, Any]:
        """Return the details as a dict for JSON; dates are still datetime objects.

        Keys: cell (an object), attempts, curve, samples and measurements (lists of objects), and initial_weights if
        there are any; keys inside are column names of the database. The curve is complete.
        """
        return {
            "cell": asdict(self.cell),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "curve": [asdict(point) for point in self.curve],
            "samples": [asdict(sample) for sample in self.samples],
            "measurements": [asdict(value) for value in self.values],
            **({} if self.initial is None else {INITIAL_WEIGHTS: dict(self.initial)}),
        }

    def text(self, width: int | None = None) -> str:
        """Return the details as text: config by section, attempts, thinned curve, measurements by probe, last samples.

        Sections of the config are model, data, train, eval, resources and checkpoint; of an external model open_weight,
        data, train, eval and resources. Plugins follow. Settings that are None or an empty mapping are left out, and sections without
        any other. A published cell has no attempts of its own.

        Args:
            width: Characters per line of tables; None for no limit. Other lines may be longer.
        """
        cell = self.cell
        lines = [f"cell {cell.id}  {cell.slug}", *([f"note: {cell.note}"] if cell.note else []), "config:"]
        sections: tuple[str, ...] = ("model", "data", "train", "eval", "resources", "checkpoint")
        if "open_weight" in cell.config:  # an external model has only these sections
            sections = ("open_weight", "data", "train", "eval", "resources")
        for section in sections:
            settings = [
                f"{k}={_setting(value)}" for k, value in cell.config.get(section, {}).items() if value not in (None, {})
            ]
            lines += [f"  {section:<10}  {', '.join(settings)}"] if settings else []
        plugins = describe_plugins(cell.config.get("plugins", ()))
        lines += [f"  plugins     {'; '.join(plugins)}"] if plugins else []
        if self.source is not None:
            lines.append(f"attempts: none; published numbers of {self.source}, as printed and as logged")
            lines += self._curve_lines(width) if self.curve else []
        else:
            lines += [] if self.initial is None else [describe_initial(self.initial)]
            lines += [*self._attempt_lines(), *self._curve_lines(width)]
        return "\n".join([*lines, *self._measurement_lines(width), *self._sample_lines()])

    def _measurement_lines(self, width: int | None) -> list[str]:
        """Return a heading and the measurements by probe and, if there are several, by attempt; newest values only."""
        numbers = {attempt.id: attempt.number for attempt in self.attempts}
        run_dirs = {attempt.id: attempt.run_dir for attempt in self.attempts}
        constant = constant_answer_scores(self.values, self.source is not None)
        groups: dict[tuple[str, int], list[records.MeasuredValue]] = {}
        for value in self.values:
            groups.setdefault((value.probe, value.attempt_id), []).append(value)
        attempts = {attempt for _, attempt in groups}
        by_attempt = len(attempts) > 1 and self.source is None
        heading = "measurements" if self.values else "measurements: none yet"
        if len(attempts) == 1 and self.source is None:
            heading += f" (attempt {numbers[next(iter(attempts))]})"
        lines = [f"{heading}:" if self.values else heading]
        for (probe, attempt), values in groups.items():
            of_attempt = f" (attempt {numbers[attempt]})" if by_attempt else ""
            lines += [
                f"  {line}" for line in _probe_lines(f"{probe}{of_attempt}", values, constant, width and width - 2)
            ]
            files = {name for value in values if (name := (value.description or {}).get(metrics.SAMPLES))}
            if files:
                folder = f"{run_dirs[attempt]}/{metrics.SAMPLES}"
                lines.append(f"    samples of {counted(len(files), 'task')}: {folder}, in the runs folder")
        return lines

    def _sample_lines(self) -> list[str]:
        """Return a heading and one line per sample of the last sampled step; empty without samples.

        A line is `"PROMPT" -> "TEXT"`, quoted as in JSON.
        """
        if not self.samples:
            return []
        steps = sorted({sample.step for sample in self.samples})
        rest_text = f", the last of {len(steps)} sampled steps; --json prints all" if len(steps) > 1 else ""
        last = [sample for sample in self.samples if sample.step == steps[-1]]
        quoted = partial(json.dumps, ensure_ascii=False)
        lines = (f"  {quoted(sample.prompt)} -> {quoted(sample.text)}" for sample in last)
        return [f"samples after step {steps[-1]}{rest_text}:", *lines]

    def _attempt_lines(self) -> list[str]:
        """Return a heading and one line per attempt; "attempts: none yet" alone without any.

        A line has number, state, duration, step (or kind if it does not train), start, host, id and, if any, cause.
        """
        lines = ["attempts:" if self.attempts else "attempts: none yet"]
        for attempt in self.attempts:
            cause = f": {attempt.cause}" if attempt.cause else ""
            progress_text = f"step {attempt.step}/{attempt.steps_total}" if attempt.kind == "train" else attempt.kind
            lines.append(
                f"  attempt {attempt.number}: {attempt.state} {'in' if attempt.finished_at else 'for'} "
                f"{format_duration(attempt.elapsed_s)}, {progress_text}, started {format_time(attempt.started_at)} on {attempt.host}, "
                f"attempt_id {attempt.id}{cause}"
            )
        return lines

    def _curve_lines(self, width: int | None) -> list[str]:
        """Return lines of the curve: a header, the learning rates, and a table of at most 12 points with the last one.

        The header has the training losses as a sparkline. Points are evenly thinned; a missing number is "-". "curve:
        none yet" alone without points.

        Args:
            width: Characters per line of the table; None for no limit.
        """
        if not self.curve:
            return ["curve: none yet"]
        stride = max(1, -(-len(self.curve) // CURVE_LINES))
        shown = [point for index, point in enumerate(self.curve) if (len(self.curve) - 1 - index) % stride == 0]
        losses = [point.train_loss for point in self.curve if point.train_loss is not None]
        lines = [f"curve ({counted(len(self.curve), 'point')}): {sparkline(losses, CURVE_WIDTH)}".rstrip(": ")]
        train = self.cell.config.get("train", {})
        if train.get("loss_on") == "marked":
            lines.append("  losses: mean over the targets that the corpus marks")
        matrices = ["matrix_lr"] if train.get("optimizer") == "adamw" else ["muon_lr"]
        matrices += ["matrix_lr"] if train.get("muon_for") == "square" and matrices != ["matrix_lr"] else []
        rates = [
            f"{name} {train[name]:.6g}"
            for name in (*matrices, *SCHEDULED_RATES)
            if isinstance(train.get(name), int | float)
        ]
        if rates:
            lines.append(f"  learning rates: schedule factor x {', '.join(rates)}")
        rows = [
            [
                f"{p.step:,}", format_tokens(p.tokens),
                *("-" if value is None else f"{value:.4f}" for value in (p.train_loss, p.val_loss, p.grad_norm, p.lr)),
                f"{p.tokens_per_s:,.0f}" if p.tokens_per_s else "-",
            ]
            for p in shown
        ]  # fmt: skip
        return [*lines, *filter(None, table_lines(CURVE_HEADINGS, rows, 0, width))]


def _setting(value: object) -> str:
    """Return the value of a setting as in a grid file; integers from 10,000 on with `_` between thousands.

    Hashes of 64 digits, which are wider than a terminal, have the 12 digits by which `data list` names them.
    """
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:12]
    return f"{value:_}" if type(value) is int and value >= 10_000 else str(value)


def _number(value: float, unit: str) -> str:
    """Return a measured value without its unit; shares in percent, bytes and long durations in readable units.

    Five significant digits below 10,000, integers above.
    """
    if unit == metrics.FRACTION:
        return f"{100 * value:.4g} %"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s" and value >= LONG_S:
        return format_duration(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.5g}"


def _unit(value: records.MeasuredValue) -> str:
    """Return the unit behind the text of `_number`; empty where the text contains it or there is none."""
    unit = value.unit
    hidden = unit in (metrics.FRACTION, "bytes", "1", "") or (unit == "s" and (value.value or 0.0) >= LONG_S)
    return "" if hidden else unit


def _interval(value: records.MeasuredValue) -> str:
    """Return the interval of a value in its unit, of a share in percent, such as 12.5–15; empty without one."""
    if value.low is None or value.high is None:
        return ""
    scale = 100 if value.unit == metrics.FRACTION else 1
    return f"{scale * value.low:.3g}–{scale * value.high:.3g}"


def _probe_lines(
    name: str, values: Sequence[records.MeasuredValue], constant: Mapping[int, float], width: int | None
) -> list[str]:
    """Return the values of a probe: the name, then a line per metric with a column per context length.

    Below a metric with intervals is a line of these, below the needle's accuracy one of the constant-digit baseline unless it was measured, and
    values that are missing are replaced by their reason on a line of their own. Columns that do not fit the width follow
    in further blocks.

    Args:
        name: Name of the probe.
        values: Its values.
        constant: Score of the best constant answer as a fraction, by context length.
        width: Characters per line; None for no limit.
    """
    by_metric: dict[str, dict[int, records.MeasuredValue]] = {}
    for value in values:
        by_metric.setdefault(value.metric, {})[value.length] = value
    lengths = sorted({value.length for value in values if value.value is not None})
    rows: list[tuple[str, dict[int, str]]] = []
    """Label and text by length of each line."""
    reasons = []
    for metric, entries in by_metric.items():
        measured = {length: value for length, value in entries.items() if value.value is not None}
        reasons += [
            f"  {metric}{_at(length)}: {value.reason}" for length, value in entries.items() if value.value is None
        ]
        if not measured:
            continue
        counts = {value.n for value in measured.values()}
        details = [_unit(value) for value in measured.values()][:1]
        details += [f"n={n:,}" for n in counts if n and len(counts) == 1]
        details += [f"plugin {source[:12]}" for source in {value.source for value in measured.values()} if source]
        texts = {length: _number(value.value or 0.0, value.unit) for length, value in measured.items()}
        details = [detail for detail in details if detail not in ("", metric)]
        rows.append((f"{metric} ({', '.join(details)})" if details else metric, texts))
        if len(counts) > 1:
            rows.append(("  n", {length: f"{value.n or 0:,}" for length, value in measured.items()}))
        intervals = {length: text for length, value in measured.items() if (text := _interval(value))}
        rows += [("  95% interval", intervals)] if intervals else []
        is_needle = (values[0].probe, metric) == DIGIT_ACCURACY or metric == ".".join(DIGIT_ACCURACY)
        baseline = {length: f"{100 * constant[length]:.4g} %" for length in measured if length in constant}
        is_needle &= CONSTANT_ACCURACY[1] not in by_metric
        rows += [("  constant-digit baseline", baseline)] if is_needle and baseline else []
    label = max((len(row[0]) for row in rows), default=0)
    widths = [max(len(f"{length:,}"), *(len(texts.get(length, "")) for _, texts in rows)) for length in lengths]
    lines: list[str] = []
    for shown in _column_blocks(lengths, widths, None if width is None else width - label - 2):
        head = "  ".join(f"{f'{length:,}' if length else '':>{wide}}" for length, wide in shown)
        lines.append(f"{'' if lines else name:<{label + 2}}  {head}".rstrip())
        for row_name, texts in rows:
            if any(length in texts for length, _ in shown):
                cells = "  ".join(f"{texts.get(length, ''):>{wide}}" for length, wide in shown)
                lines.append(f"  {row_name:<{label}}  {cells}".rstrip())
    return [*(lines or [name]), *reasons]


def _column_blocks(lengths: Sequence[int], widths: Sequence[int], width: int | None) -> list[list[tuple[int, int]]]:
    """Return the columns as (length, characters) in blocks that fit a width, each with one column at least."""
    blocks: list[list[tuple[int, int]]] = []
    for column in zip(lengths, widths, strict=True):
        if blocks and (width is None or sum(wide + 2 for _, wide in (*blocks[-1], column)) <= width):
            blocks[-1].append(column)
        else:
            blocks.append([column])
    return blocks


def _at(length: int) -> str:
    return f" at {length:,}" if length else ""


def cell_details(store: Store, cell_name: str, sweep: str | None = None) -> CellDetails:
    """Return the details of a cell, with the intervals that a report prints.

    Args:
        store: The database.
        cell_name: Id or slug, the beginning of either, or a slug without its seed.
        sweep: Sweep to search; None for the newest one, then all.

    Raises:
        CellUnknown: No such cell.
        CellAmbiguous: Several cells match.
        SweepUnknown: No such sweep.
    """
    cell = store.find_cell(cell_name, sweep)
    attempts = store.attempts(cell.id)
    trainings = [attempt for attempt in attempts if attempt.kind == "train"]
    finished = [attempt for attempt in trainings if attempt.state == "done"]
    newest = (finished or trainings)[-1:] or []
    curve = store.curve(newest[0].id) if newest else []
    samples = store.samples([attempt.id for attempt in newest]).get(newest[0].id, []) if newest else []
    values = {(value.cell_id, value.probe, value.metric, value.length): value for value in store.measurements(cell.id)}
    # intervals as in reports
    shown = list(with_intervals(values).values())
    origin = store.provenance(newest[0].id) if newest else None
    initial = origin.extra.get(INITIAL_WEIGHTS) if origin is not None else None
    return CellDetails(cell, attempts, curve, shown, _published_source(store, attempts), samples, initial)


def _published_source(store: Store, attempts: Sequence[records.Attempt]) -> str | None:
    """Return source and version of the publication of these attempts, as one text; None if they ran.

    The last attempt decides; without attempts, or with an incomplete record of the publication, it is None.
    """
    provenance = store.provenance(attempts[-1].id) if attempts else None
    published = provenance.extra.get("published") if provenance is not None else None
    is_complete = isinstance(published, dict) and {"source", "version"} <= set(published)
    return f"{published['source']}{published['version']}" if published and is_complete else None
