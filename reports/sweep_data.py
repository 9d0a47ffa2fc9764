"""What a report is made of: one snapshot of a sweep, read in one transaction. Imports neither pandas nor torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ..results import metrics
from ..results.contrasts import Contrast, contrasts_of, weighted
from ..results.designs.design_option import Design, design_of
from ..results.forecast import Forecast, forecast_of
from ..results.stopping.stopping_rule import StoppingRule, rule_of
from ..results.store.records import (
    AXES,
    CellState,
    CodeAndGpu,
    MeasuredValue,
    Provenance,
    Request,
    Standing,
    extra_axes,
    requests_from_options,
    standing,
)
from ..results.store.store import Store
from ..results.studies.tuning import TuningResult, tuned_of
from . import cell_filter
from .cell_filter import ReportError as ReportError
from .number_format import Column
from .stats.significance.trial_intervals import with_intervals

REFERENCES = {"unigram_entropy": "unigram entropy", "bigram_entropy": "bigram entropy"}
"""Metrics of the probe `corpus` that tables give as a yardstick, in nats per token."""
PRINTED = "table-"
"""Beginning of the probes that hold a published number as a numbered table prints it, such as `table-2`."""
WEIGHTED_SUFFIX = "_weighted"
"""End of a metric's name that stands for its mean over all context lengths, each weighted by itself."""
NO_LEVEL = "-"
"""Of an axis that a cell does not have."""


ExtraLengths = Sequence[int] | Literal["all"] | None
"""Context lengths that a report shows besides those that the grid asks for: these, or none; all: every measured one, and every
probe."""


def cell_level(cell: CellState, axis: str) -> str:
    """The level of an axis at which a cell stands: of one of AXES, or of one that the grid has besides."""
    return cell.levels[axis] if axis in AXES else cell.axes.get(axis, NO_LEVEL)


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """A revision of a sweep with the newest value of every (cell, probe, metric, length), accuracies with the interval of
    their trials (trial_intervals.py).

    `references` holds, by metric of REFERENCES, the distinct values among the cells (one, unless corpora differ).
    """

    sweep: str
    revision: int
    cells: Sequence[CellState]
    values: Mapping[tuple[str, str, str, int], MeasuredValue]
    references: Mapping[str, tuple[float, ...]]
    requested: Sequence[Request] = ()
    """Every (probe, length) that the launch asked for."""
    printed: Mapping[tuple[str, str, str, str, int], MeasuredValue] = field(default_factory=dict)
    """By (cell, table, probe, metric, length): a published number as that table prints it."""
    sources: Mapping[int, CodeAndGpu] = field(default_factory=dict)
    """By attempt, for those that said where their numbers come from."""

    also: tuple[int, ...] = ()
    """Context lengths that are shown besides those that the launch asked for."""
    everything: bool = False
    """Whether also probes are shown that the launch did not ask for."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """By attempt, the class of its failure, where one was recorded (results/failure_classes.py)."""
    contrasts: tuple[Contrast, ...] = ()
    """The differences that the grid was launched to see."""
    tuned: TuningResult | None = None
    """What was tuned before it; None for nothing."""
    design: Design | None = None
    """The partial design that was launched; None for all combinations of the grid."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By cell: its complete frozen config."""
    stop: StoppingRule | None = None
    """When the contrast that seeds are added for is known closely enough; None where none are added."""
    forecast: Forecast | None = None
    """What the launch predicted that each cell takes."""
    only: cell_filter.CellFilters = ()
    """Filters that have left other cells of the sweep out; the contrasts that it declares are left out then, too."""

    @cached_property
    def partial(self) -> Design | None:
        """The design, where combinations that the grid allows are not among the cells."""
        if self.design is None:
            return None
        found = {self.place(self.design, cell) for cell in self.cells} - {None}
        return self.design if len(found) < len(self.design.space.points) else None

    @staticmethod
    def place(design: Design, cell: CellState) -> int | None:
        """Which combination of a design a cell is; None for one of `include` that is none of them."""
        return design.space.index({axis: cell_level(cell, axis) for axis in design.space.axes})

    def setting(self, cell: CellState, path: str) -> Any:
        """What the cell's frozen config says at a dotted path, as "train.seq_len"; None where it says nothing."""
        found: Any = self.configs.get(cell.cell_id)
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def done(self) -> int:
        """How many cells are trained and measured at everything that was asked for."""
        return sum(self.standing(cell) == "done" for cell in self.cells)

    def standing(self, cell: CellState) -> Standing:
        """Where a cell stands, as `status` says it."""
        return standing(cell, self.requested)

    def word(self, cell: CellState) -> str:
        """Where a cell stands in the word that a table prints: `oom` for one that ran out of memory."""
        found = self.standing(cell)
        return "oom" if found == "failed" and self.failures.get(cell.attempt_id or 0, "").endswith("_oom") else found

    @cached_property
    def asked(self) -> Mapping[str, frozenset[int]]:
        """The context lengths that the launch asked for, by probe."""
        probes = {probe for probe, length in self.requested if length}
        return {name: frozenset(length for probe, length in self.requested if probe == name) for name in probes}

    def asks(self, probe: str, length: int) -> bool:
        """Whether the launch asked for that; of a probe that it did not ask for at all, whatever was measured counts."""
        return length in self.asked.get(probe, (length,))

    @property
    def beyond(self) -> ExtraLengths:
        """What is shown besides what the launch asked for, as `load_sweep_data` takes it."""
        return "all" if self.everything else self.also

    @cached_property
    def _probes(self) -> frozenset[str]:
        return frozenset(probe for probe, _ in self.requested)

    def shows(self, probe: str) -> bool:
        """Whether tables show numbers of a probe: columns come from the grid, so that a later evaluation changes none."""
        return self.everything or not self._probes or probe in self._probes or probe in metrics.TRAINING_SOURCES

    def has_any(self, probes: Iterable[str]) -> bool:
        """Whether one of these was measured or asked for; of a sweep that has nothing at all yet, that may come."""
        known = self._probes | {probe for probe, _ in self._measured}
        return not known or not known.isdisjoint(probes)

    @cached_property
    def _measured(self) -> Mapping[tuple[str, str], frozenset[int]]:
        """By (probe, metric): the lengths at which any cell has a value or a reason."""
        pairs: dict[tuple[str, str], set[int]] = {}
        for probe, metric, length in {key[1:] for key in self.values}:
            pairs.setdefault((probe, metric), set()).add(length)
        return {key: frozenset(lengths) for key, lengths in pairs.items()}

    def is_measured(self, probe: str, metric: str) -> bool:
        """Return whether any cell has a value of the metric, or a reason for having none."""
        return (probe, metric) in self._measured

    @cached_property
    def shown(self) -> Mapping[tuple[str, str, str, int], MeasuredValue]:
        """`values` without those of probes and lengths that are not shown."""
        return {
            key: value
            for key, value in self.values.items()
            if self.shows(key[1]) and (not key[3] or key[3] in self.also or self.asks(key[1], key[3]))
        }

    def requested_lengths(self) -> dict[str, list[int]]:
        """The context lengths that are shown of the probes that the launch asked for, shortest first."""
        measured = {(probe, length) for (probe, _), lengths in self._measured.items() for length in lengths}
        return {
            probe: sorted({*lengths, *(length for length in self.also if (probe, length) in measured)})
            for probe, lengths in sorted(self.asked.items())
        }

    def lengths(self, probe: str, metric: str, *, unasked: bool = False) -> list[int]:
        """The context lengths that are shown and at which any cell has a value or a reason, shortest first; `unasked`: also
        of a probe that the launch did not ask for."""
        if not unasked and not self.shows(probe):
            return []
        measured = self._measured.get((probe, metric), ())
        return sorted(length for length in measured if not length or length in self.also or self.asks(probe, length))

    def levels(self, axis: str) -> list[str]:
        """The levels of an axis, in the order of the cells."""
        if axis not in self._cache:
            named = (cell.levels if axis in AXES else cell.axes for cell in self.cells)
            self._cache[axis] = tuple(dict.fromkeys(levels[axis] for levels in named if axis in levels))
        return list(self._cache[axis])

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        """Results of `levels` by axis and of `averaged` by (probe, metric)."""
        return {}

    def extra_axes(self) -> list[str]:
        """The axes beyond the five AXES (and the seed) whose level differs between cells, in the grid's order."""
        return list(self._extra_axes)

    @cached_property
    def _extra_axes(self) -> tuple[str, ...]:
        return tuple(extra_axes(self.cells))

    def configurations(self) -> dict[tuple[str, ...], list[CellState]]:
        """Cells that differ in nothing but their seed, by (levels of AXES, then of the extra axes)."""
        return dict(self._configurations)

    @cached_property
    def _configurations(self) -> Mapping[tuple[str, ...], list[CellState]]:
        cells: dict[tuple[str, ...], list[CellState]] = {}
        for cell in self.cells:
            cells.setdefault(self.levels_of(cell), []).append(cell)
        return cells

    def levels_of(self, cell: CellState) -> tuple[str, ...]:
        """Return the levels of a cell, of AXES and then of the extra axes."""
        return self._levels_of[cell.cell_id]

    @cached_property
    def _levels_of(self) -> dict[str, tuple[str, ...]]:
        axes = (*AXES, *self._extra_axes)
        return {cell.cell_id: tuple(cell_level(cell, axis) for axis in axes) for cell in self.cells}

    @cached_property
    def _described(self) -> Mapping[tuple[str, str], metrics.Metric]:
        found: dict[tuple[str, str], list[MeasuredValue]] = {}
        for value in self.values.values():
            found.setdefault((value.probe, value.metric), []).append(value)
        return {key: _metric(*key, some) for key, some in found.items()}

    def metric(self, probe: str, name: str) -> metrics.Metric:
        """What is known of a metric: by the package, or by the probe that stored it."""
        return self._described.get((probe, name)) or metrics.metric(probe, name)

    def strange(self) -> list[tuple[str, metrics.Metric]]:
        """The metrics that are shown and that the package does not know, each with its probe, in the order of their names."""
        described = {key: about for key, about in self._described.items() if self.shows(key[0])}
        found = [(key[0], about) for key, about in described.items() if metrics.known(*key) is None]
        return sorted(found, key=lambda one: (one[0], one[1].name))

    def value(self, cell: str, probe: str, metric: str, length: int, table: str | None = None) -> MeasuredValue | None:
        """The newest value; with `table`, first the number as that table of the paper prints it. A metric whose name ends
        in WEIGHTED is worked out."""
        if metric.endswith(WEIGHTED_SUFFIX):
            return self._average(cell, probe, metric)
        if not self.shows(probe):
            return None
        printed = self.printed.get((cell, table, probe, metric, length)) if table else None
        return printed or self.values.get((cell, probe, metric, length))

    def given(self, cell: CellState, column: Column, table: str | None = None) -> MeasuredValue | None:
        """What a cell has in a column, as `value` finds it."""
        return self.value(cell.cell_id, *column.key, table)

    def numbers(self, cells: Iterable[CellState], column: Column) -> list[float]:
        """The numbers of a column, of those of these cells that have one."""
        found = (self.given(cell, column) for cell in cells)
        return [value.value for value in found if value is not None and value.value is not None]

    def printed_spread(self, cell: CellState, column: Column) -> tuple[int, float | None] | None:
        """Of a number that is a mean over runs which the database does not hold: how many they are, and their sample standard
        deviation where it is known. None of any other number."""
        if not self.printed_runs:
            return None
        told = self.values.get((cell.cell_id, column.probe, column.metric + metrics.SD_SUFFIX, column.length))
        return (told.n, told.value) if told is not None and told.n else None

    @cached_property
    def printed_runs(self) -> int:
        """Over how many runs, at most, numbers are means of which the database does not hold the parts; 0 for none."""
        return max(
            (value.n or 0 for key, value in self.values.items() if key[2].endswith(metrics.SD_SUFFIX)), default=0
        )

    def _average(self, cell: str, probe: str, metric: str) -> MeasuredValue | None:
        """The mean over the lengths that the launch asked for; where one lacks a number, the reason for that; None where one was not
        measured."""
        base = metric.removesuffix(WEIGHTED_SUFFIX)
        found = [self.values.get((cell, probe, base, length)) for length in self.averaged(probe, base)]
        have = [value for value in found if value is not None]
        if not have or len(have) < len(found):
            return None
        if lacking := next((value for value in have if value.value is None), None):
            return replace(lacking, metric=metric, length=0)
        mean = weighted({value.length: value.value for value in have if value.value is not None})
        newest = max(have, key=lambda value: value.attempt_id)
        return replace(newest, metric=metric, length=0, value=mean, n=None, low=None, high=None, description=None)

    def averaged(self, probe: str, metric: str) -> Sequence[int]:
        """The context lengths that an average of a metric is over: those that the launch asked for, shortest first."""
        if (probe, metric) not in self._cache:
            asked = sorted(self.asked.get(probe, ()))
            self._cache[probe, metric] = asked or [length for length in self.lengths(probe, metric) if length]
        found: Sequence[int] = self._cache[probe, metric]
        return found

    @cached_property
    def over_lengths(self) -> frozenset[tuple[str, str]]:
        """The (probe, metric) that are measured at context lengths: a number of these that has none is an average over them."""
        return frozenset(key for key, lengths in self._measured.items() if lengths - {0})


def _metric(probe: str, name: str, values: Sequence[MeasuredValue]) -> metrics.Metric:
    """As the newest number says it; the chance level only where it is the same for all."""
    newest = max(values, key=lambda value: value.attempt_id)
    about = metrics.metric(probe, name, newest.description, newest.unit)
    levels = {metrics.metric(probe, name, value.description, value.unit).chance for value in values}
    return about if len(levels) == 1 else replace(about, chance=None)


def load_sweep_data(
    store: Store,
    sweep: str | None = None,
    *,
    revision: int | None = None,
    orphans: bool = False,
    lengths: ExtraLengths = None,
) -> SweepData:
    """Reads a sweep (None: the one launched last) for a report, which shows the context lengths that the launch asked for
    and `lengths` besides; inside `cached_reads` from the database but once, inside `subset.only` with some cells alone.

    Raises SweepUnknown, StoreError, ReportError for a length at which nothing was measured.
    """
    held = _reading.get()
    held = {} if held is None else held
    asked = (store, sweep, revision, orphans, lengths if lengths == "all" else tuple(lengths or ()))
    if asked not in held:
        data = _gathered(store, sweep, revision, orphans, lengths)
        # the same revision by whichever name it is asked for
        for named in (sweep, data.sweep):
            for number in (revision, data.revision):
                for beyond in (asked[-1], data.beyond):
                    held[(store, named, number, orphans, beyond)] = data
    whole = held[asked]
    words = cell_filter.asked(whole.sweep)
    if not words:
        return whole
    some = (store, whole.sweep, whole.revision, orphans, whole.beyond, words)
    if some not in held:
        held[some] = _some(whole, words)
    return held[some]


def provenances_of_attempts(store: Store, attempts: Collection[int]) -> dict[int, Provenance]:
    """Return, by attempt, the origin of its numbers for those that recorded one; inside `cached_reads` each is read once."""
    held = _reading.get()
    cache: dict[int, Provenance | None] = {} if held is None else held.setdefault((store, "provenances"), {})
    missing = [attempt for attempt in attempts if attempt not in cache]
    if missing:
        cache |= dict.fromkeys(missing) | store.provenances(missing)
    return {attempt: origin for attempt in attempts if (origin := cache[attempt]) is not None}


_reading: ContextVar[dict[Any, Any] | None] = ContextVar("reading", default=None)


@contextmanager
def cached_reads() -> Iterator[None]:
    """Inside, every sweep is read once for all that is made of it: tables and figures then agree with each other even
    while it runs, and take the time of one. One inside another is the same."""
    if _reading.get() is not None:
        yield
        return
    token = _reading.set({})
    try:
        yield
    finally:
        _reading.reset(token)


def _gathered(store: Store, sweep: str | None, revision: int | None, orphans: bool, lengths: ExtraLengths) -> SweepData:
    with store.snapshot() as seen:
        launched = seen.revision(sweep, revision)
        cells = seen.cell_states(launched.sweep, revision=launched.number, orphans=orphans)
        values = seen.values(launched.sweep, revision=launched.number, orphans=orphans)
        sources = seen.sources({value.attempt_id for value in values})
        configs = seen.configs([cell.cell_id for cell in cells])
        failures = seen.failures([c.attempt_id for c in cells if c.state == "failed" and c.attempt_id is not None])
    mine, printed = {}, {}
    for value in values:
        if value.probe.startswith(PRINTED):
            probe, _, metric = value.metric.partition(".")
            printed[(value.cell_id, value.probe.removeprefix(PRINTED), probe, metric, value.length)] = value
        else:
            mine[(value.cell_id, value.probe, value.metric, value.length)] = value
    requested = requests_from_options(launched.options)
    probes = {probe for probe, _ in requested}
    return SweepData(
        sweep=launched.sweep,
        revision=launched.number,
        cells=cells,
        values=with_intervals(mine),
        references=_references(values),
        requested=requested,
        everything=lengths == "all" and any(key[1] not in probes | {*metrics.TRAINING_SOURCES} for key in mine),
        also=_also(launched.sweep, lengths, {key[3] for key in mine if key[3]}, {length for _, length in requested}),
        printed=printed,
        sources=sources,
        failures=failures,
        contrasts=contrasts_of(launched.options),
        tuned=tuned_of(launched.options),
        design=design_of(launched.options),
        stop=None if orphans else rule_of(launched.options),
        configs=configs,
        forecast=None if orphans else forecast_of(launched.options),
    )


def _some(data: SweepData, words: cell_filter.CellFilters) -> SweepData:
    """The data of these cells alone. Contrasts are left out: they are corrected together, which some of them cannot be."""
    if data.partial is not None:
        raise ReportError("--only: the cells of a partial design are estimated together; leave it out")
    cells = cell_filter.kept(data.cells, words)
    ids = {cell.cell_id for cell in cells}
    values = {place: value for place, value in data.values.items() if place[0] in ids}
    asked = {length for _, length in data.requested}
    also = _also(data.sweep, data.beyond, {place[3] for place in values if place[3]}, asked)
    return replace(
        data, cells=cells, values=values, references=_references(values.values()), contrasts=(), stop=None, design=None, only=words, also=also,
        printed={place: value for place, value in data.printed.items() if place[0] in ids},
        configs={cell: config for cell, config in data.configs.items() if cell in ids},
    )  # fmt: skip


def _also(sweep: str, lengths: ExtraLengths, measured: set[int], asked: set[int]) -> tuple[int, ...]:
    """The further lengths, shortest first, `all` spelled out."""
    wanted = measured if lengths == "all" else set(lengths or ())
    unknown = sorted(wanted - measured - asked)
    if unknown:
        known = ", ".join(map(str, sorted(measured))) or "none"
        raise ReportError(
            f"--length {unknown[0]}: no cell of sweep {sweep} is measured there; measured lengths: {known}"
        )
    return tuple(sorted(wanted - asked))


def _references(values: Iterable[MeasuredValue]) -> dict[str, tuple[float, ...]]:
    found: dict[str, set[float]] = {metric: set() for metric in REFERENCES}
    for value in values:
        if value.probe == "corpus" and value.metric in found and value.value is not None:
            found[value.metric].add(value.value)
    return {metric: tuple(sorted(numbers)) for metric, numbers in found.items() if numbers}
