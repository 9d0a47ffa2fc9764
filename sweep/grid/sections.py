"""Sections of a grid file that are about its cells: contrasts, the rule for adding seeds (`stop`), studies (`search`, `tune`)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

from ...results import metrics
from ...results.contrasts import Contrast, reference_level
from ...results.names import why_not
from ...results.stopping.stopping_rule import FIRST, StoppingRule
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
"""Keys of a contrast by the names that they have under `stop`."""


def read_contrasts(
    document: GridDocument, items: Sequence[ContrastKeys], axis_levels: Mapping[str, list[Any]]
) -> tuple[Contrast, ...]:
    """Return the contrasts of a grid file whose axes have these levels, those of `include` too. Raises GridError."""
    levels = canonical_levels(axis_levels)
    contrasts: list[Contrast] = []
    for index, item in enumerate(items):
        contrast = _contrast(document, (CONTRASTS, index), item, levels)
        if contrast in contrasts:
            raise document.error((CONTRASTS, index), "given twice; keep one of them")
        contrasts.append(contrast)
    return tuple(contrasts)


def contrast_key_path(document: GridDocument, index: int, *keys: str) -> KeyPath:
    """Return where the file has a grid's contrast: in their list, or for the one that `stop` adds, there."""
    items = document.data.get(CONTRASTS)
    if isinstance(items, list) and index < len(items):
        return (CONTRASTS, index, *keys)
    return (STOP, *(KEY_ALIASES[key] for key in keys))


def check_lengths(document: GridDocument, contrasts: Sequence[Contrast], cells: Iterable[Cell]) -> None:
    """Raise GridError for a contrast about a probe or a context length that no cell is evaluated at."""
    requests = requested_by(cells) if contrasts else ()
    for index, contrast in enumerate(contrasts):
        try:
            check_measured(contrast.probe, contrast.metric, contrast.length, requests)
        except PydanticCustomError as error:
            raise document.as_grid_error(error, *contrast_key_path(document, index, "measure")) from error


def requested_by(cells: Iterable[Cell]) -> Collection[tuple[str, int]]:
    """Return the probes and context lengths that some cell is evaluated at."""
    configs = {id(cell.config.eval): cell.config.eval for cell in cells}
    return {pair for config in configs.values() for pair in requested(config)}


def canonical_level(axis: str, level: Any) -> str:
    """Return a level as cells name it: of two names for one thing (memory: on, gated_delta) the first."""
    word = level_text(axis, level)
    if axis not in AXES:
        return word
    levels = AXES[axis].levels()
    return next((name for name, overrides in levels.items() if word in levels and overrides == levels[word]), word)


def canonical_levels(axis_levels: Mapping[str, list[Any]]) -> dict[str, dict[str, None]]:
    """Return the levels of every axis as cells name them, each once."""
    return {
        axis: dict.fromkeys(canonical_level(axis, level) for level in levels) for axis, levels in axis_levels.items()
    }


def _contrast(
    document: GridDocument, where: KeyPath, item: ContrastKeys, levels: Mapping[str, Mapping[str, None]]
) -> Contrast:
    """Return a contrast between levels of the grid; `setting` it stands in the file. Raises GridError."""

    def error(problem: str, *keys: str, allowed: Iterable[str] = (), word: str | None = None) -> GridError:
        names = (KEY_ALIASES.get(key, key) for key in keys) if where[0] == STOP else keys
        return document.error((*where, *names), problem, allowed, word)

    def resolve_axis(name: Any, *keys: str) -> str:
        if not isinstance(name, str) or name not in levels:
            raise error("not an axis of this grid", *keys, allowed=levels, word=str(name))
        return name

    def resolve_level(axis: str, level: Any, *keys: str) -> str:
        word = canonical_level(axis, level)
        if word not in levels[axis]:
            problem = f"no level {level!r} of {axis} in this grid"
            raise error(problem, *keys, allowed=levels[axis], word=str(level))
        return word

    axis = resolve_axis(item.axis, "axis")
    level = resolve_level(axis, item.level, "level")
    reference = None if item.reference is None else resolve_level(axis, item.reference, "reference")
    if reference == level:
        raise error(f"is the level {level} itself; a contrast needs two", "reference")
    within = {}
    for name, within_level in item.within.items():
        if name == axis:
            raise error("is the axis of the contrast itself", "within", name)
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
    """Return the rule of a grid file whose axes have these levels, those of `include` too, and whose cells all have these seeds.

    Raises GridError.
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
    """Return the declared contrasts, and the rule's as the last one unless it is among them."""
    levels = canonical_levels(axis_levels)
    is_declared = any(
        rule.about(contrast, contrast.reference or reference_level([*levels[contrast.axis]])) for contrast in declared
    )
    return tuple(declared) if is_declared else (*declared, rule.contrast)


def about(contrast: Contrast) -> metrics.Metric:
    """Return the description of the number that a contrast is about."""
    return next(metric for metric in own_metrics(contrast.probe) if metric.name == contrast.metric)


def _stop_contrast(document: GridDocument, keys: StopKeys, levels: Mapping[str, Mapping[str, None]]) -> Contrast:
    """Return the contrast of the rule, its level and reference filled in where the axis has two levels."""
    axis, level, reference = keys.contrast, keys.level, keys.reference
    if isinstance(axis, str) and axis in levels:
        names = [*levels[axis]]
        reference = reference_level(names) if reference is None else canonical_level(axis, reference)
        if level is None:
            candidates = [word for word in names if word != reference]
            if len(candidates) != 1:
                problem = f"has the levels {', '.join(names)}; say which one with level"
                raise document.error((STOP, "contrast"), problem)
            level = candidates[0]
    item = ContrastKeys.model_construct(
        measure=keys.metric, axis=axis, level=level, reference=reference, within=keys.within
    )
    return _contrast(document, (STOP,), item, levels)


def _first_and_last_look(document: GridDocument, keys: StopKeys, seeds: int) -> tuple[int, int]:
    """Return the seeds at the first look and at the last."""
    first = keys.min_seeds if keys.min_seeds is not None else max(FIRST, seeds)
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
    """The studies that go before a factorial."""

    per: str
    """The axis each of whose levels has a study of its own."""
    levels: Mapping[str, Any]
    """By their words, as the file writes them."""
    search: Search
    """The same for each of them."""
    fixed_levels: Mapping[str, Any] = field(default_factory=dict)
    """By axis: the level at which it stands meanwhile; one that is not named stands where the grid's base has it."""
    line: int = 1

    def study_name(self, grid: str, word: str) -> str:
        """Return the name of a level's study."""
        return f"{grid}-tune-{word}"


def read_tune(
    document: GridDocument, keys: TuneKeys, levels: Mapping[str, Sequence[Any]], name: str, *named_levels: NamedLevels
) -> Tune:
    """Return the studies of a grid named `path`, with these levels by axis. Raises GridError for what cannot be tuned."""
    if "stop" in document.data:
        raise document.error((TUNE,), "stop adds seeds to cells that are known beforehand, and these are not; launch with tune first, and put what it found into set")  # fmt: skip
    per = keys.per
    if not isinstance(per, str) or per not in levels:
        raise document.error((TUNE, "per"), "must be an axis of this grid", levels, str(per))
    for path in keys.ranges:
        for axis in levels:
            if settings.paths_of_axis(path, {}, {}) & settings.paths_of_axis(axis, *named_levels):
                problem = f"is varied by the axis {axis}; what is tuned cannot be an axis of the factorial"
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
        if why := why_not(study := tune.study_name(name, word)):
            raise document.error((TUNE, "per"), f"the study of {per} {word} would be named {study}, which {why}")
    return tune


def corner_cells(document: GridDocument, search: Search, expansion: Expansion, key: str = SEARCH) -> list[Cell]:
    """Return the cells at the ends of all ranges, one setting at a time, the others at their first level or low end.

    Raises GridError for a range that holds what no cell can have, and for an objective that no cell is measured by.
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
                f"there is no validation before the end: {config.train.steps} steps, eval.validate_every {config.eval.validate_every}; "
                "lower that",
            )
    return list(cells.values())
