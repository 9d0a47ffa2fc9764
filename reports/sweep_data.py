"""Data of a report: one consistent snapshot of a sweep, read in one transaction.

Imports neither pandas nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from ..results import metrics
from ..results.contrasts import Contrast, contrasts_from_options, length_weighted_mean
from ..results.designs.design_option import Design, design_from_options
from ..results.forecast import Forecast, forecast_from_options
from ..results.stopping.stopping_rule import StoppingRule, rule_from_options
from ..results.store.records import (
    AXES,
    Attempt,
    CellStanding,
    CellState,
    CodeAndGpu,
    MeasuredValue,
    ProbeRequest,
    Provenance,
    extra_axes,
    requests_from_options,
    standing,
)
from ..results.store.store import Store
from ..results.studies.tuning import TuningResult, tuning_from_options
from . import cell_filter
from .cell_filter import ReportError as ReportError
from .number_format import Column
from .stats.significance.trial_intervals import with_intervals

Result = TypeVar("Result")

REFERENCES = {"unigram_entropy": "unigram entropy", "bigram_entropy": "bigram entropy"}
"""Metrics of the probe `corpus` that tables print for comparison, in nats per token, with their display names."""
PRINTED_PROBE_PREFIX = "table-"
"""Beginning of the probes that hold a published number as a numbered table prints it, such as `table-2`."""
WEIGHTED_SUFFIX = "_weighted"
"""End of a metric's name for its mean over all context lengths, weighted by length."""
NO_LEVEL = "-"
"""Level of an axis that a cell does not have."""


ExtraLengths = Sequence[int] | Literal["all"] | None
"""Context lengths that a report shows besides those that the grid requests, in tokens.

None for no others; "all" for every measured length and every probe.
"""


def cell_level(cell: CellState, axis: str) -> str:
    """Return the level of a cell on an axis, one of AXES or an extra axis of the grid; NO_LEVEL if it has none."""
    return cell.levels[axis] if axis in AXES else cell.axes.get(axis, NO_LEVEL)


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """Revision of a sweep with the newest value of every (cell, probe, metric, length).

    A snapshot: it is read once and does not change. `cells` are in the grid's order. Accuracies have the interval of
    their trials (trial_intervals.py). `references` holds, by metric of REFERENCES, the distinct values among the cells,
    sorted: one, unless corpora differ.
    """

    sweep: str
    revision: int
    cells: Sequence[CellState]
    values: Mapping[tuple[str, str, str, int], MeasuredValue]
    references: Mapping[str, tuple[float, ...]]
    requested: Sequence[ProbeRequest] = ()
    """Every (probe, length) that the launch requested."""
    printed: Mapping[tuple[str, str, str, str, int], MeasuredValue] = field(default_factory=dict)
    """Published numbers as a table prints them, by (cell, table, probe, metric, length), such as table "2"."""
    sources: Mapping[int, CodeAndGpu] = field(default_factory=dict)
    """Code and GPU behind the numbers of an attempt, by attempt id, where recorded."""

    also: tuple[int, ...] = ()
    """Context lengths that are shown besides those that the launch requested, in tokens."""
    everything: bool = False
    """True if probes that the launch did not request are shown, too."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Failure class by attempt id, where recorded (results/failure_classes.py)."""
    contrasts: tuple[Contrast, ...] = ()
    """Contrasts that the grid declares."""
    tuned: TuningResult | None = None
    """Result of an earlier tuning study; None for none."""
    design: Design | None = None
    """Partial design of the launch; None for all combinations of the grid."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Complete frozen config by cell id."""
    stop: StoppingRule | None = None
    """Stopping rule for the contrast that seeds are added for; None for a fixed number of seeds."""
    forecast: Forecast | None = None
    """Cost forecast of the launch for each cell."""
    only: cell_filter.CellFilters = ()
    """Filters that excluded other cells of the sweep; declared contrasts are then excluded, too."""

    @cached_property
    def partial_design(self) -> Design | None:
        """The design, if the cells do not cover all of its combinations; None otherwise or without a design."""
        if self.design is None:
            return None
        indices = {self.design_index(self.design, cell) for cell in self.cells} - {None}
        return self.design if len(indices) < len(self.design.space.points) else None

    @staticmethod
    def design_index(design: Design, cell: CellState) -> int | None:
        """Return the index of a cell's combination among the points of a design.

        None for an extra cell of `include`.
        """
        return design.space.index({axis: cell_level(cell, axis) for axis in design.space.axes})

    def setting(self, cell: CellState, path: str) -> Any:
        """Return the value at a dotted path of the cell's frozen config, such as "train.seq_len"; None if absent."""
        value: Any = self.configs.get(cell.cell_id)
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def done(self) -> int:
        """Number of cells that are trained and measured at everything requested."""
        return sum(self.standing(cell) == "done" for cell in self.cells)

    def standing(self, cell: CellState) -> CellStanding:
        """Return the standing of a cell, as `status` shows it, with respect to what this revision requested.

        It is new, running, done, failed, diverged, interrupted, pruned, needs-eval (trained, but a requested number is
        missing) or "weights gone" (likewise, and its saved weights are missing too).
        """
        return standing(cell, self.requested)

    def status_word(self, cell: CellState) -> str:
        """Return the standing of a cell as tables print it: `oom` for a failed cell that ran out of memory.

        Else it is new, running, done, failed, diverged, interrupted, pruned, needs-eval or "weights gone".
        """
        cell_standing = self.standing(cell)
        return (
            "oom"
            if cell_standing == "failed" and self.failures.get(cell.attempt_id or 0, "").endswith("_oom")
            else cell_standing
        )

    @cached_property
    def requested_lengths_by_probe(self) -> Mapping[str, frozenset[int]]:
        """Context lengths that the launch requested, by probe, for probes with lengths."""
        probes = {probe for probe, length in self.requested if length}
        return {name: frozenset(length for probe, length in self.requested if probe == name) for name in probes}

    def is_requested(self, probe: str, length: int) -> bool:
        """Return True if the launch requested this length (tokens) of the probe, or no length of it at all."""
        return length in self.requested_lengths_by_probe.get(probe, (length,))

    @property
    def extra_lengths_option(self) -> ExtraLengths:
        """Lengths shown besides the requested ones, as the `lengths` of `load_sweep_data`."""
        return "all" if self.everything else self.also

    @cached_property
    def _probes(self) -> frozenset[str]:
        return frozenset(probe for probe, _ in self.requested)

    def is_shown(self, probe: str) -> bool:
        """Return True if tables show numbers of a probe.

        Columns follow the grid's request, so a later evaluation does not change them: a probe is shown if it was
        requested, is measured by training, or the report shows all probes. If the launch requested no probe, all are
        shown.
        """
        return self.everything or not self._probes or probe in self._probes or probe in metrics.TRAINING_SOURCES

    def has_any(self, probes: Iterable[str]) -> bool:
        """Return True if any of these probes was measured or requested, or if the sweep has no probe at all yet."""
        probes_with_data = self._probes | {probe for probe, _ in self._measured}
        return not probes_with_data or not probes_with_data.isdisjoint(probes)

    @cached_property
    def _measured(self) -> Mapping[tuple[str, str], frozenset[int]]:
        """Context lengths at which any cell has a value, or a reason for none, by (probe, metric)."""
        pairs: dict[tuple[str, str], set[int]] = {}
        for probe, metric, length in {key[1:] for key in self.values}:
            pairs.setdefault((probe, metric), set()).add(length)
        return {key: frozenset(lengths) for key, lengths in pairs.items()}

    def is_measured(self, probe: str, metric: str) -> bool:
        """Return True if any cell has a value of the metric, or a reason for none."""
        return (probe, metric) in self._measured

    @cached_property
    def shown_values(self) -> Mapping[tuple[str, str, str, int], MeasuredValue]:
        """Values of the probes and lengths that are shown, by (cell, probe, metric, length).

        A value may hold a reason instead of a number.
        """
        return {
            key: value
            for key, value in self.values.items()
            if self.is_shown(key[1]) and (not key[3] or key[3] in self.also or self.is_requested(key[1], key[3]))
        }

    def requested_lengths(self) -> dict[str, list[int]]:
        """Return the context lengths that are shown of each requested probe, shortest first, by probe (sorted).

        They are the requested ones, measured or not, and extra lengths of the report at which the probe was measured.
        Probes without lengths are left out.
        """
        measured = {(probe, length) for (probe, _), lengths in self._measured.items() for length in lengths}
        return {
            probe: sorted({*lengths, *(length for length in self.also if (probe, length) in measured)})
            for probe, lengths in sorted(self.requested_lengths_by_probe.items())
        }

    def lengths(self, probe: str, metric: str, *, include_unrequested: bool = False) -> list[int]:
        """Return the shown context lengths at which any cell has a value, or a reason for none, shortest first.

        Lengths are in tokens, and 0 stands for a number without a length. Empty for a probe that is not shown, unless
        `include_unrequested` is True; lengths that are not shown stay out in any case.
        """
        if not include_unrequested and not self.is_shown(probe):
            return []
        measured = self._measured.get((probe, metric), ())
        return sorted(
            length for length in measured if not length or length in self.also or self.is_requested(probe, length)
        )

    def levels(self, axis: str) -> list[str]:
        """Return the distinct levels of an axis, in the order of the cells; empty for an unknown axis.

        Cells without the axis are skipped.
        """
        if axis not in self._cache:
            named = (cell.levels if axis in AXES else cell.axes for cell in self.cells)
            self._cache[axis] = tuple(dict.fromkeys(levels[axis] for levels in named if axis in levels))
        return list(self._cache[axis])

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        """Results of `levels` by axis, of the averaged lengths by (probe, metric), and of averages by (cell, probe, metric)."""
        return {}

    def extra_axes(self) -> list[str]:
        """Return the axes beyond AXES (and the seed) whose level differs between cells, in the grid's order."""
        return list(self._extra_axes)

    @cached_property
    def _extra_axes(self) -> tuple[str, ...]:
        return tuple(extra_axes(self.cells))

    def configurations(self) -> dict[tuple[str, ...], list[CellState]]:
        """Return the cells by configuration: levels of AXES, then of the extra axes. Only seeds differ in a group.

        Keys and cells are in the order of the cells. The dict is a copy; its lists are shared and not to be changed.
        """
        return dict(self._configurations)

    @cached_property
    def _configurations(self) -> Mapping[tuple[str, ...], list[CellState]]:
        """Cells by configuration."""
        cells: dict[tuple[str, ...], list[CellState]] = {}
        for cell in self.cells:
            cells.setdefault(self.levels_of(cell), []).append(cell)
        return cells

    def levels_of(self, cell: CellState) -> tuple[str, ...]:
        """Return the levels of a cell on AXES, then on the extra axes."""
        return self._levels_of[cell.cell_id]

    @cached_property
    def _levels_of(self) -> dict[str, tuple[str, ...]]:
        axes = (*AXES, *self._extra_axes)
        return {cell.cell_id: tuple(cell_level(cell, axis) for axis in axes) for cell in self.cells}

    @cached_property
    def _described(self) -> Mapping[tuple[str, str], metrics.Metric]:
        """Description of each measured metric, by (probe, metric)."""
        values_by_metric: dict[tuple[str, str], list[MeasuredValue]] = {}
        for value in self.values.values():
            values_by_metric.setdefault((value.probe, value.metric), []).append(value)
        return {key: _metric(*key, values) for key, values in values_by_metric.items()}

    def metric(self, probe: str, name: str) -> metrics.Metric:
        """Return the description of a metric, from stored values, or else from the package's registry.

        A stored description is that of the newest value; its chance level is None if values disagree on it.
        """
        return self._described.get((probe, name)) or metrics.metric(probe, name)

    def unregistered_metrics(self) -> list[tuple[str, metrics.Metric]]:
        """Return (probe, metric) of the shown metrics that the package does not register, sorted by probe and name."""
        described = {key: metric for key, metric in self._described.items() if self.is_shown(key[0])}
        unregistered = [(key[0], metric) for key, metric in described.items() if metrics.builtin_metric(*key) is None]
        return sorted(unregistered, key=lambda item: (item[0], item[1].name))

    def value(self, cell: str, probe: str, metric: str, length: int, table: str | None = None) -> MeasuredValue | None:
        """Return the newest value of a cell; None if there is none or the probe is not shown.

        A value may hold a reason instead of a number. The average over lengths is returned for probes that are not
        shown, too.

        Args:
            cell: Cell id.
            probe: Name of the probe.
            metric: Name of the metric; with the ending "_weighted" the length-weighted average is computed and `length`
                ignored.
            length: Context length in tokens; 0 for a number without one.
            table: Table of the paper whose printed number is preferred.
        """
        if metric.endswith(WEIGHTED_SUFFIX):
            return self._average(cell, probe, metric)
        if not self.is_shown(probe):
            return None
        printed = self.printed.get((cell, table, probe, metric, length)) if table else None
        return printed or self.values.get((cell, probe, metric, length))

    def measured_value(self, cell: CellState, column: Column, table: str | None = None) -> MeasuredValue | None:
        """Return a cell's value in a column, which may hold a reason instead of a number; None without any.

        Args:
            cell: The cell.
            column: Column of the number; its format is not used.
            table: Table of the paper whose printed number is preferred.
        """
        return self.value(cell.cell_id, *column.key, table)

    def column_numbers(self, cells: Iterable[CellState], column: Column) -> list[float]:
        """Return the numbers of a column of those cells that have one, in their order."""
        return [
            value.value
            for _, value in self.measured_values(cells, column)
            if value is not None and value.value is not None
        ]

    def measured_values(
        self, cells: Iterable[CellState], column: Column
    ) -> Iterator[tuple[CellState, MeasuredValue | None]]:
        """Yield each cell with its value in a column, as `measured_value` returns it, in half the time."""
        if column.metric.endswith(WEIGHTED_SUFFIX) or not self.is_shown(column.probe):
            yield from ((cell, self.measured_value(cell, column)) for cell in cells)
            return
        key, values = column.key, self.values
        for cell in cells:
            yield cell, values.get((cell.cell_id, *key))

    def printed_spread(self, cell: CellState, column: Column) -> tuple[int, float | None] | None:
        """Return (number of runs, sample standard deviation or None) of a published mean over runs.

        None if the number is no published mean, as for every launched sweep.
        """
        if not self.printed_runs:
            return None
        spread_value = self.values.get((cell.cell_id, column.probe, column.metric + metrics.SD_SUFFIX, column.length))
        return (spread_value.n, spread_value.value) if spread_value is not None and spread_value.n else None

    @cached_property
    def printed_runs(self) -> int:
        """Largest number of runs behind a published mean; 0 without published means."""
        return max(
            (value.n or 0 for key, value in self.values.items() if key[2].endswith(metrics.SD_SUFFIX)), default=0
        )

    def _average(self, cell: str, probe: str, metric: str) -> MeasuredValue | None:
        """Return the length-weighted mean of a metric over the lengths of `averaged_lengths`, cached, with length 0.

        The value has the attempt of the newest one and neither n nor interval. If a length has a reason instead of a
        number, that reason is returned. None if a length was not measured, or without lengths.

        Args:
            cell: Cell id.
            probe: Name of the probe.
            metric: Name of the metric with the ending "_weighted".
        """
        key = cell, probe, metric
        if key not in self._cache:
            self._cache[key] = self._new_average(cell, probe, metric.removesuffix(WEIGHTED_SUFFIX))
        average: MeasuredValue | None = self._cache[key]
        return average

    def _new_average(self, cell: str, probe: str, base: str) -> MeasuredValue | None:
        """Return what `_average` caches; `base` is the metric without the ending."""
        metric = base + WEIGHTED_SUFFIX
        by_length = [self.values.get((cell, probe, base, length)) for length in self.averaged_lengths(probe, base)]
        present = [value for value in by_length if value is not None]
        if not present or len(present) < len(by_length):
            return None
        if missing := next((value for value in present if value.value is None), None):
            return replace(missing, metric=metric, length=0)
        mean = length_weighted_mean({value.length: value.value for value in present if value.value is not None})
        newest = max(present, key=lambda value: value.attempt_id)
        changes = {"metric": metric, "length": 0, "value": mean}
        # dataclasses.replace is several times slower, and this runs for every cell
        return MeasuredValue(**(vars(newest) | dict.fromkeys(("n", "low", "high", "description")) | changes))

    def averaged_lengths(self, probe: str, metric: str) -> Sequence[int]:
        """Return the context lengths that a metric's average covers, shortest first; cached.

        They are those that the launch requested of the probe, else all shown ones at which the metric was measured.
        """
        if (probe, metric) not in self._cache:
            requested = sorted(self.requested_lengths_by_probe.get(probe, ()))
            self._cache[probe, metric] = requested or [length for length in self.lengths(probe, metric) if length]
        lengths: Sequence[int] = self._cache[probe, metric]
        return lengths

    @cached_property
    def over_lengths(self) -> frozenset[tuple[str, str]]:
        """(probe, metric) pairs measured at context lengths; without a length, such a number is an average."""
        return frozenset(key for key, lengths in self._measured.items() if lengths - {0})


def _metric(probe: str, name: str, values: Sequence[MeasuredValue]) -> metrics.Metric:
    """Return the description in the newest value (highest attempt id).

    Its chance level is None unless all values agree on it.
    """
    newest = max(values, key=lambda value: value.attempt_id)
    newest_metric = metrics.metric(probe, name, newest.description, newest.unit)
    levels = {metrics.metric(probe, name, value.description, value.unit).chance for value in values}
    return newest_metric if len(levels) == 1 else replace(newest_metric, chance=None)


def load_sweep_data(
    store: Store,
    sweep: str | None = None,
    *,
    revision: int | None = None,
    orphans: bool = False,
    lengths: ExtraLengths = None,
) -> SweepData:
    """Read a sweep for a report.

    Within `cached_reads` each sweep is read from the database once; within `cell_filter` contexts only some cells are
    returned, without declared contrasts, stopping rule and design.

    Args:
        store: The database.
        sweep: Name of the sweep; None for the one launched last.
        revision: Revision number; None for the newest.
        orphans: Read the cells that the newest revision dropped instead of its own; they have no stopping rule and
            forecast.
        lengths: Context lengths to show besides the requested ones; "all" for every measured one and every probe.

    Raises:
        SweepUnknown: No such sweep.
        StoreError: The database cannot be read.
        ReportError: Nothing was measured at one of `lengths`, a filter is invalid or selects nothing, or cells of a
            partial design are filtered.
    """
    cache = _reading.get()
    cache = {} if cache is None else cache
    key = (store, sweep, revision, orphans, lengths if lengths == "all" else tuple(lengths or ()))
    if key not in cache:
        data = _read_sweep_data(store, sweep, revision, orphans, lengths)
        # one entry per way to request the same revision
        for named in (sweep, data.sweep):
            for number in (revision, data.revision):
                for extra in (key[-1], data.extra_lengths_option):
                    cache[(store, named, number, orphans, extra)] = data
    full_data = cache[key]
    filters = cell_filter.active_filters(full_data.sweep)
    if not filters:
        return full_data
    filtered_key = (store, full_data.sweep, full_data.revision, orphans, full_data.extra_lengths_option, filters)
    if filtered_key not in cache:
        cache[filtered_key] = _filtered_data(full_data, filters)
    return cache[filtered_key]


def provenances_of_attempts(store: Store, attempts: Collection[int]) -> dict[int, Provenance]:
    """Return the recorded provenance of each attempt, by attempt id; attempts without one are left out.

    Within `cached_reads` each is read from the database once.
    """
    cached = _reading.get()
    cache: dict[int, Provenance | None] = {} if cached is None else cached.setdefault((store, "provenances"), {})
    missing = [attempt for attempt in attempts if attempt not in cache]
    if missing:
        cache |= dict.fromkeys(missing) | store.provenances(missing)
    return {attempt: origin for attempt in attempts if (origin := cache[attempt]) is not None}


def attempts_of_sweep(store: Store, data: SweepData) -> Sequence[Attempt]:
    """Return all attempts of the cells, oldest first.

    Within `cached_reads` they are read from the database once.
    """
    return cached_result(data, "attempts", lambda: store.attempts_of([cell.cell_id for cell in data.cells]))


def cached_result(owner: object, name: Hashable, compute: Callable[[], Result]) -> Result:
    """Return what the function computes about an object; within `cached_reads` it is called once per name.

    The object is retained as long as its result, so that no other one has its identity meanwhile.
    """
    cache = _reading.get()
    if cache is None:
        return compute()
    key = (id(owner), name)
    if key not in cache:
        cache[key] = owner, compute()
    result: Result = cache[key][1]
    return result


_reading: ContextVar[dict[Any, Any] | None] = ContextVar("reading", default=None)


@contextmanager
def cached_reads() -> Iterator[None]:
    """Read every sweep once within this context, so that all tables and figures agree and take the time of one read.

    Changes of the database within the context are not seen. Without effect inside another such context. Usable as a
    decorator.
    """
    if _reading.get() is not None:
        yield
        return
    token = _reading.set({})
    try:
        yield
    finally:
        _reading.reset(token)


def _read_sweep_data(
    store: Store, sweep: str | None, revision: int | None, orphans: bool, lengths: ExtraLengths
) -> SweepData:
    """Read the SweepData of a revision in one transaction, with all cells, whatever filter is in force.

    Args:
        store: The database.
        sweep: Name of the sweep; None for the one launched last.
        revision: Revision number; None for the newest.
        orphans: Read the cells that the newest revision dropped instead of its own.
        lengths: Context lengths to show besides the requested ones; "all" for every measured one and every probe.

    Raises:
        SweepUnknown: No such sweep.
        StoreError: The database cannot be read.
        ReportError: Nothing was measured at one of `lengths`.
    """
    with store.snapshot() as snapshot:
        launched = snapshot.revision(sweep, revision)
        cells = snapshot.cell_states(launched.sweep, revision=launched.number, orphans=orphans)
        values = snapshot.values(launched.sweep, revision=launched.number, orphans=orphans)
        sources = snapshot.sources({value.attempt_id for value in values})
        configs = snapshot.configs([cell.cell_id for cell in cells])
        failures = snapshot.failures([c.attempt_id for c in cells if c.state == "failed" and c.attempt_id is not None])
    measured, printed = {}, {}
    for value in values:
        if value.probe.startswith(PRINTED_PROBE_PREFIX):
            probe, _, metric = value.metric.partition(".")
            printed[(value.cell_id, value.probe.removeprefix(PRINTED_PROBE_PREFIX), probe, metric, value.length)] = (
                value
            )
        else:
            measured[(value.cell_id, value.probe, value.metric, value.length)] = value
    requested = requests_from_options(launched.options)
    probes = {probe for probe, _ in requested}
    return SweepData(
        sweep=launched.sweep,
        revision=launched.number,
        cells=cells,
        values=with_intervals(measured),
        references=_references(values),
        requested=requested,
        everything=lengths == "all" and any(key[1] not in probes | {*metrics.TRAINING_SOURCES} for key in measured),
        also=_extra_lengths(
            launched.sweep, lengths, {key[3] for key in measured if key[3]}, {length for _, length in requested}
        ),
        printed=printed,
        sources=sources,
        failures=failures,
        contrasts=contrasts_from_options(launched.options),
        tuned=tuning_from_options(launched.options),
        design=design_from_options(launched.options),
        stop=None if orphans else rule_from_options(launched.options),
        configs=configs,
        forecast=None if orphans else forecast_from_options(launched.options),
    )


def _filtered_data(data: SweepData, filters: cell_filter.CellFilters) -> SweepData:
    """Return the data of the cells that pass the filters.

    Declared contrasts, stopping rule and design are removed, since their corrections need all cells. Extra lengths that
    no such cell has are an error.

    Raises:
        ReportError: The sweep is a partial design, a filter is invalid or selects nothing, or a length is not measured.
    """
    if data.partial_design is not None:
        raise ReportError(
            "--only cannot be used with a partial design, whose cells are analysed together; leave it out"
        )
    cells = cell_filter.filter_cells(data.cells, filters)
    ids = {cell.cell_id for cell in cells}
    values = {key: value for key, value in data.values.items() if key[0] in ids}
    requested = {length for _, length in data.requested}
    also = _extra_lengths(data.sweep, data.extra_lengths_option, {key[3] for key in values if key[3]}, requested)
    return replace(
        data, cells=cells, values=values, references=_references(values.values()), contrasts=(), stop=None, design=None, only=filters, also=also,
        printed={key: value for key, value in data.printed.items() if key[0] in ids},
        configs={cell: config for cell, config in data.configs.items() if cell in ids},
    )  # fmt: skip


def _extra_lengths(sweep: str, lengths: ExtraLengths, measured: set[int], requested: set[int]) -> tuple[int, ...]:
    """Return the lengths to show besides the requested ones, shortest first, with "all" expanded.

    Args:
        sweep: Name of the sweep, for the message alone.
        lengths: Wanted lengths, or "all" for the measured ones; requested ones among them are dropped.
        measured: Measured context lengths.
        requested: Context lengths that the launch requested; permitted without a measurement.

    Raises:
        ReportError: Nothing was measured at one of `lengths`.
    """
    selected = measured if lengths == "all" else set(lengths or ())
    unknown = sorted(selected - measured - requested)
    if unknown:
        lengths_text = ", ".join(map(str, sorted(measured))) or "none"
        raise ReportError(
            f"--length {unknown[0]}: no cell of sweep {sweep} is measured there; measured lengths: {lengths_text}"
        )
    return tuple(sorted(selected - requested))


def _references(values: Iterable[MeasuredValue]) -> dict[str, tuple[float, ...]]:
    """Return the distinct values of each entropy of the corpus that was measured, sorted, by metric.

    Metrics are unigram_entropy and bigram_entropy of the probe corpus, in nats per token.
    """
    values_by_metric: dict[str, set[float]] = {metric: set() for metric in REFERENCES}
    for value in values:
        if value.probe == "corpus" and value.metric in values_by_metric and value.value is not None:
            values_by_metric[value.metric].add(value.value)
    return {metric: tuple(sorted(numbers)) for metric, numbers in values_by_metric.items() if numbers}
