"""Sections of a grid file about its cells: `contrasts`, the stopping rule (`stop`), `search` and `tune`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

from ...results import metrics
from ...results.contrasts import Contrast, reference_level
from ...results.names import sweep_name_problem
from ...results.stopping.stopping_rule import DEFAULT_FIRST_SEEDS, StoppingRule
from ...results.studies.search import LevelChoice, Search
from ..errors import GridError
from ..probes import requested
from . import settings
from .cell import Cell
from .expansion import SEARCH, TUNE, Expansion
from .grid_file import ContrastKeys, StopKeys, TuneKeys, check_measured, measure, own_metrics
from .settings import AXES, NamedLevels, level_text
from .yaml_document import GridDocument, KeyPath

CONTRASTS, STOP = "contrasts", "stop"
EVALUATION = "eval."
KEY_ALIASES = {"measure": "metric", "axis": "contrast"}
"""Keys of a contrast -> their names under `stop`."""


def read_contrasts(
    document: GridDocument, items: Sequence[ContrastKeys], axis_levels: Mapping[str, list[Any]]
) -> tuple[Contrast, ...]:
    """Return the declared contrasts of a grid file in the order written, with levels in canonical form.

    A contrast without `reference` keeps None. The length of its measure is None for an average.

    Args:
        document: The grid file, for the lines of errors.
        items: The validated items of `contrasts`.
        axis_levels: Axis -> its levels as written, those of `include` too.

    Raises:
        GridError: For an unknown axis or level, a reference equal to the level, or a contrast that is given twice.
    """
    levels = canonical_levels(axis_levels)
    contrasts: list[Contrast] = []
    for index, item in enumerate(items):
        contrast = _contrast(document, (CONTRASTS, index), item, levels)
        if contrast in contrasts:
            raise document.error((CONTRASTS, index), "given twice; keep one of them")
        contrasts.append(contrast)
    return tuple(contrasts)


def contrast_key_path(document: GridDocument, index: int, *keys: str) -> KeyPath:
    """Return the key path of contrast number `index`: an item of `contrasts`, or the keys of `stop`.

    Args:
        document: The grid file.
        index: Index in the grid's contrasts, from 0; the contrast of `stop` comes last.
        keys: "measure" or "axis", which `stop` calls metric and contrast; for an item of `contrasts` any keys. KeyError
            for other keys below `stop`.
    """
    items = document.data.get(CONTRASTS)
    if isinstance(items, list) and index < len(items):
        return (CONTRASTS, index, *keys)
    return (STOP, *(KEY_ALIASES[key] for key in keys))


def check_lengths(document: GridDocument, contrasts: Sequence[Contrast], cells: Iterable[Cell]) -> None:
    """Raise GridError for a contrast on a probe or context length at which no cell is evaluated.

    One cell that measures it is enough.

    Args:
        document: The grid file, for the lines of errors.
        contrasts: Declared contrasts, that of `stop` last.
        cells: All cells of the grid.
    """
    requests = requested_by(cells) if contrasts else ()
    for index, contrast in enumerate(contrasts):
        try:
            check_measured(contrast.probe, contrast.metric, contrast.length, requests)
        except PydanticCustomError as error:
            raise document.as_grid_error(error, *contrast_key_path(document, index, "measure")) from error


def requested_by(cells: Iterable[Cell]) -> Collection[tuple[str, int]]:
    """Return the (probe, context length) pairs at which at least one cell is evaluated."""
    configs = {id(cell.config.eval): cell.config.eval for cell in cells}
    return {pair for config in configs.values() for pair in requested(config)}


def canonical_level(axis: str, level: Any) -> str:
    """Return the level's canonical name: the first of several names that set the same values (gated_delta -> on).

    On axes that are not built in, and for unknown levels, the level as text.
    """
    word = level_text(axis, level)
    if axis not in AXES:
        return word
    levels = AXES[axis].levels()
    return next((name for name, overrides in levels.items() if word in levels and overrides == levels[word]), word)


def canonical_levels(axis_levels: Mapping[str, list[Any]]) -> dict[str, dict[str, None]]:
    """Return axis -> its canonical level names in the order written, each once; the values are all None."""
    return {
        axis: dict.fromkeys(canonical_level(axis, level) for level in levels) for axis, levels in axis_levels.items()
    }


def _contrast(
    document: GridDocument, where: KeyPath, item: ContrastKeys, levels: Mapping[str, Mapping[str, None]]
) -> Contrast:
    """Return the contrast that an item declares, with canonical levels; without `reference`, None stays.

    Args:
        document: The grid file, for the lines of errors.
        where: Key path of the item; below `stop` the keys of errors are translated.
        item: The keys, whose axes and levels are not checked yet.
        levels: Axis -> canonical levels of the grid.

    Raises:
        GridError: For an unknown axis or level, a reference equal to the level, and the contrast's own axis in
            `within`.
    """

    def error(problem: str, *keys: str, allowed: Iterable[str] = (), word: str | None = None) -> GridError:
        """Return a GridError at the item's keys, translated to their names under `stop`."""
        names = (KEY_ALIASES.get(key, key) for key in keys) if where[0] == STOP else keys
        return document.error((*where, *names), problem, allowed, word)

    def resolve_axis(name: Any, *keys: str) -> str:
        if not isinstance(name, str) or name not in levels:
            raise error("not an axis of this grid", *keys, allowed=levels, word=str(name))
        return name

    def resolve_level(axis: str, level: Any, *keys: str) -> str:
        """Return the canonical level. Raises GridError if the grid has no such level of the axis."""
        word = canonical_level(axis, level)
        if word not in levels[axis]:
            problem = f"no level {level!r} of {axis} in this grid"
            raise error(problem, *keys, allowed=levels[axis], word=str(level))
        return word

    axis = resolve_axis(item.axis, "axis")
    level = resolve_level(axis, item.level, "level")
    reference = None if item.reference is None else resolve_level(axis, item.reference, "reference")
    if reference == level:
        raise error(f"is {level}, the same as level; a contrast needs two different levels", "reference")
    within = {}
    for name, within_level in item.within.items():
        if name == axis:
            raise error("is the axis that the contrast compares; remove it from within", "within", name)
        resolve_axis(name, "within", name)
        within[name] = resolve_level(name, within_level, "within", name)
    return Contrast(
        probe=item.measure.probe, metric=item.measure.metric.name, length=item.measure.length,
        axis=axis, level=level, reference=reference, within=within,
        margin=None if item.margin is None else float(item.margin),
    )  # fmt: skip


# --- stop -------------------------------------------------------------------------------------------------------------


def read_stop(
    document: GridDocument, keys: StopKeys, axis_levels: Mapping[str, list[Any]], seeds: Sequence[int]
) -> StoppingRule:
    """Return the stopping rule of a grid file.

    The interval width is converted from percentage points to a fraction for metrics in percent. The rule's seeds are
    the grid's, followed by the integers after the largest, up to `max_seeds` in all.

    Args:
        document: The grid file, for the lines of errors.
        keys: The validated keys of `stop`.
        axis_levels: Axis -> its levels as written, those of `include` too.
        seeds: Seeds that every cell of the grid has, at least one.

    Raises:
        GridError: For an unknown axis or level, a missing level of an axis with several, and for looks that do not fit
            the number of seeds.
    """
    contrast = _stop_contrast(document, keys, canonical_levels(axis_levels))
    first, max_seeds = _first_and_last_look(document, keys, len(seeds))
    further_seeds = itertools.islice(itertools.count(max(seeds) + 1), max_seeds - len(seeds))
    width = keys.ci / 100 if keys.ci is not None and keys.metric.metric.percent else keys.ci
    return StoppingRule(
        contrast=contrast, width=width, sure=keys.sure, seeds=(*seeds, *further_seeds), first=first, wave=keys.wave,
        spending=keys.spending,
    )  # fmt: skip


def with_contrast(
    declared: Sequence[Contrast], rule: StoppingRule, axis_levels: Mapping[str, list[Any]]
) -> tuple[Contrast, ...]:
    """Return the declared contrasts, with the rule's contrast appended unless an equal one is declared already.

    Margins are not compared. A declared contrast without reference has the default one of its axis.
    """
    levels = canonical_levels(axis_levels)
    is_declared = any(
        rule.applies_to(contrast, contrast.reference or reference_level([*levels[contrast.axis]]))
        for contrast in declared
    )
    return tuple(declared) if is_declared else (*declared, rule.contrast)


def contrast_metric(contrast: Contrast) -> metrics.Metric:
    """Return the metric that a contrast compares; StopIteration if its probe has no such metric."""
    return next(metric for metric in own_metrics(contrast.probe) if metric.name == contrast.metric)


def _stop_contrast(document: GridDocument, keys: StopKeys, levels: Mapping[str, Mapping[str, None]]) -> Contrast:
    """Return the rule's contrast, with level and reference filled in where the file gives none.

    The default reference is that of the axis's levels. The level may be missing only if one other level remains. Raises
    GridError.
    """
    axis, level, reference = keys.contrast, keys.level, keys.reference
    if isinstance(axis, str) and axis in levels:
        names = [*levels[axis]]
        reference = reference_level(names) if reference is None else canonical_level(axis, reference)
        if level is None:
            candidates = [word for word in names if word != reference]
            if len(candidates) != 1:
                problem = f"has the levels {', '.join(names)}; choose one with level"
                raise document.error((STOP, "contrast"), problem)
            level = candidates[0]
    item = ContrastKeys.model_construct(
        measure=keys.metric, axis=axis, level=level, reference=reference, within=keys.within
    )
    return _contrast(document, (STOP,), item, levels)


def _first_and_last_look(document: GridDocument, keys: StopKeys, seeds: int) -> tuple[int, int]:
    """Return the numbers of seeds at the first and at the last interim look.

    The first is `min_seeds`, by default 3 (DEFAULT_FIRST_SEEDS) or `seeds` if that is larger; the last is `max_seeds`.

    Args:
        document: The grid file, for the lines of errors.
        keys: The validated keys of `stop`.
        seeds: Number of seeds that every cell of the grid has.

    Raises:
        GridError: If the first look is below `seeds`, or the last below the first.
    """
    first = keys.min_seeds if keys.min_seeds is not None else max(DEFAULT_FIRST_SEEDS, seeds)
    if first < seeds:
        problem = f"is below the {seeds} seeds that every cell of the grid has; leave it out"
        raise document.error((STOP, "min_seeds"), problem)
    last = keys.max_seeds
    if last < first:
        default = "" if "max_seeds" in keys.model_fields_set else " (the default)"
        what = f"the {first} seeds of the first look" if keys.min_seeds is None else f"min_seeds: {first}"
        problem = f"{last}{default} is below {what}; give max_seeds: {first} or more"
        raise document.error((STOP, "max_seeds"), problem)
    return first, last


# --- studies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tune:
    """Studies that run before a factorial and select settings for each level of one axis."""

    per: str
    """Axis whose levels each get a study."""
    levels: Mapping[str, Any]
    """Level name -> level as the file writes it."""
    search: Search
    """Search that every study runs."""
    fixed_levels: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> level at which it is fixed during the studies; other axes stay at the value of the grid's base."""
    line: int = 1
    """Line of `tune` in the file."""

    def study_name(self, grid: str, word: str) -> str:
        """Return the sweep name of the study of level `word` of a grid named `grid`."""
        return f"{grid}-tune-{word}"


def read_tune(
    document: GridDocument, keys: TuneKeys, levels: Mapping[str, Sequence[Any]], name: str, *named_levels: NamedLevels
) -> Tune:
    """Return the studies that tune a grid: one per level of the axis `per`.

    Args:
        document: The grid file, for the lines of errors.
        keys: The validated keys of `tune`.
        levels: Axis -> its levels as written, those of `include` too.
        name: Name of the grid, which begins the names of the studies.
        named_levels: Custom axes, then the additional settings of levels.

    Raises:
        GridError: For a grid with `stop`, for a tuned setting that an axis varies, for unknown axes or levels, and for
            a study name that is no valid sweep name.
    """
    if "stop" in document.data:
        raise document.error((TUNE,), "cannot be combined with stop, because tuned cells are not known before the studies finish; launch with tune first, then copy its settings into set")  # fmt: skip
    per = keys.per
    if not isinstance(per, str) or per not in levels:
        raise document.error((TUNE, "per"), "must be an axis of this grid", levels, str(per))
    for path in keys.ranges:
        for axis in levels:
            if settings.paths_of_axis(path, {}, {}) & settings.paths_of_axis(axis, *named_levels):
                problem = f"is varied by the axis {axis}; a tuned setting cannot be an axis of the grid"
                raise document.error((TUNE, "ranges", path), problem)
    for axis, level in keys.at.items():
        where = (TUNE, "at", axis)
        if axis == per or axis not in levels:
            candidates = [candidate for candidate in levels if candidate != per]
            raise document.error(where, "must be another axis of this grid", candidates, axis)
        names = [level_text(axis, value) for value in levels[axis]]
        if level_text(axis, level) not in names:
            raise document.error(where, f"no level {level!r} in this grid", names, str(level))
    levels_by_word = {level_text(per, level): level for level in levels[per]}
    tune = Tune(per, levels_by_word, keys.search(), keys.at, document.line(TUNE))
    for word in levels_by_word:
        if why := sweep_name_problem(study := tune.study_name(name, word)):
            raise document.error(
                (TUNE, "per"), f"the study of level {word} of axis {per} would be named {study}, which {why}"
            )
    return tune


def corner_cells(document: GridDocument, search: Search, expansion: Expansion, key: str = SEARCH) -> list[Cell]:
    """Return the distinct cells at the ends of a study's ranges, one range moved at a time.

    The first cell has every range at its low end or first level; each other cell moves one range to its high end or
    another level. Cells with an equal id are returned once.

    Args:
        document: The grid file, for the lines of errors.
        search: The study.
        expansion: Makes the cells.
        key: Key of the section, "search" or "tune", for errors.

    Raises:
        GridError: For a range with an invalid end, an objective that no cell measures, and a pruner without a
            validation before the last step.
    """
    values_by_path = {
        path: domain.levels if isinstance(domain, LevelChoice) else (domain.low, domain.high)
        for path, domain in search.ranges.items()
    }
    defaults = {path: levels[0] for path, levels in values_by_path.items()}
    cells: dict[str, Cell] = {}
    for params in [
        defaults,
        *({**defaults, path: level} for path, levels in values_by_path.items() for level in levels[1:]),
    ]:
        cells |= {cell.id: cell for cell in expansion.cells(params, None)}
    requests = requested_by(cells.values())
    for text in search.objectives:
        target = measure(text)
        try:
            check_measured(target.probe, target.metric.name, target.length, requests)
        except PydanticCustomError as error:
            raise document.as_grid_error(error, key, "objective") from error
    for config in (cell.config for cell in cells.values()):
        if search.pruner is not None and config.eval.validate_every >= config.train.steps:
            raise document.error(
                (SEARCH, "pruner"),
                f"a pruner needs a validation before the last step, but eval.validate_every is {config.eval.validate_every} and the run has "
                f"{config.train.steps} steps; lower eval.validate_every",
            )
    return list(cells.values())
