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
CALLED = {"measure": "metric", "axis": "contrast"}
"""Keys of a contrast by the names that they have under `stop`."""


def read_contrasts(
    document: GridDocument, given: Sequence[ContrastKeys], known: Mapping[str, list[Any]]
) -> tuple[Contrast, ...]:
    """Return the contrasts of a grid file whose axes have these levels, those of `include` too. Raises GridError."""
    levels = levels_of(known)
    found: list[Contrast] = []
    for index, item in enumerate(given):
        one = _contrast(document, (CONTRASTS, index), item, levels)
        if one in found:
            raise document.error((CONTRASTS, index), "given twice; keep one of them")
        found.append(one)
    return tuple(found)


def place(document: GridDocument, index: int, *keys: str) -> KeyPath:
    """Return where the file has a grid's contrast: in their list, or for the one that `stop` adds, there."""
    given = document.data.get(CONTRASTS)
    if isinstance(given, list) and index < len(given):
        return (CONTRASTS, index, *keys)
    return (STOP, *(CALLED[key] for key in keys))


def check_lengths(document: GridDocument, contrasts: Sequence[Contrast], cells: Iterable[Cell]) -> None:
    """Raise GridError for a contrast about a probe or a context length that no cell is evaluated at."""
    asked = requested_by(cells) if contrasts else ()
    for index, one in enumerate(contrasts):
        try:
            check_measured(one.probe, one.metric, one.length, asked)
        except PydanticCustomError as error:
            raise document.located(error, *place(document, index, "measure")) from error


def requested_by(cells: Iterable[Cell]) -> Collection[tuple[str, int]]:
    """Return the probes and context lengths that some cell is evaluated at."""
    configs = {id(cell.config.eval): cell.config.eval for cell in cells}
    return {pair for config in configs.values() for pair in requested(config)}


def canonical(axis: str, level: Any) -> str:
    """Return a level as cells name it: of two names for one thing (memory: on, gated_delta) the first."""
    word = level_text(axis, level)
    if axis not in AXES:
        return word
    every = AXES[axis].levels()
    return next((name for name, overrides in every.items() if word in every and overrides == every[word]), word)


def levels_of(known: Mapping[str, list[Any]]) -> dict[str, dict[str, None]]:
    """Return the levels of every axis as cells name them, each once."""
    return {axis: dict.fromkeys(canonical(axis, level) for level in some) for axis, some in known.items()}


def _contrast(
    document: GridDocument, where: KeyPath, item: ContrastKeys, levels: Mapping[str, Mapping[str, None]]
) -> Contrast:
    """Return a contrast between levels of the grid; `where` it stands in the file. Raises GridError."""

    def error(problem: str, *keys: str, allowed: Iterable[str] = (), word: str | None = None) -> GridError:
        names = (CALLED.get(key, key) for key in keys) if where[0] == STOP else keys
        return document.error((*where, *names), problem, allowed, word)

    def axis_of(name: Any, *keys: str) -> str:
        if not isinstance(name, str) or name not in levels:
            raise error("not an axis of this grid", *keys, allowed=levels, word=str(name))
        return name

    def level_of(axis: str, level: Any, *keys: str) -> str:
        word = canonical(axis, level)
        if word not in levels[axis]:
            problem = f"no level {level!r} of {axis} in this grid"
            raise error(problem, *keys, allowed=levels[axis], word=str(level))
        return word

    axis = axis_of(item.axis, "axis")
    level = level_of(axis, item.level, "level")
    reference = None if item.reference is None else level_of(axis, item.reference, "reference")
    if reference == level:
        raise error(f"is the level {level} itself; a contrast needs two", "reference")
    within = {}
    for name, other in item.within.items():
        if name == axis:
            raise error("is the axis of the contrast itself", "within", name)
        axis_of(name, "within", name)
        within[name] = level_of(name, other, "within", name)
    return Contrast(
        probe=item.measure.probe, metric=item.measure.metric.name, length=item.measure.length,
        axis=axis, level=level, reference=reference, within=within,
        margin=None if item.margin is None else float(item.margin),
    )  # fmt: skip


# --- stop -------------------------------------------------------------------------------------------------------------


def read_stop(
    document: GridDocument, given: StopKeys, known: Mapping[str, list[Any]], seeds: Sequence[int]
) -> StoppingRule:
    """Return the rule of a grid file whose axes have these levels, those of `include` too, and whose cells all have these seeds.

    Raises GridError.
    """
    contrast = _stop_contrast(document, given, levels_of(known))
    first, most = _looks(document, given, len(seeds))
    more = itertools.islice(itertools.count(max(seeds) + 1), most - len(seeds))
    width = given.ci / 100 if given.ci is not None and given.metric.metric.percent else given.ci
    return StoppingRule(
        contrast=contrast, width=width, sure=given.sure, seeds=(*seeds, *more), first=first, wave=given.wave,
        spending=given.spending,
    )  # fmt: skip


def with_contrast(
    declared: Sequence[Contrast], rule: StoppingRule, known: Mapping[str, list[Any]]
) -> tuple[Contrast, ...]:
    """Return the declared contrasts, and the rule's as the last one unless it is among them."""
    levels = levels_of(known)
    there = any(rule.about(one, one.reference or reference_level([*levels[one.axis]])) for one in declared)
    return tuple(declared) if there else (*declared, rule.contrast)


def about(contrast: Contrast) -> metrics.Metric:
    """Return the description of the number that a contrast is about."""
    return next(one for one in own_metrics(contrast.probe) if one.name == contrast.metric)


def _stop_contrast(document: GridDocument, given: StopKeys, levels: Mapping[str, Mapping[str, None]]) -> Contrast:
    """Return the contrast of the rule, its level and reference filled in where the axis has two levels."""
    axis, level, reference = given.contrast, given.level, given.reference
    if isinstance(axis, str) and axis in levels:
        known = [*levels[axis]]
        reference = reference_level(known) if reference is None else canonical(axis, reference)
        if level is None:
            others = [word for word in known if word != reference]
            if len(others) != 1:
                problem = f"has the levels {', '.join(known)}; say which one with level"
                raise document.error((STOP, "contrast"), problem)
            level = others[0]
    item = ContrastKeys.model_construct(
        measure=given.metric, axis=axis, level=level, reference=reference, within=given.within
    )
    return _contrast(document, (STOP,), item, levels)


def _looks(document: GridDocument, given: StopKeys, seeds: int) -> tuple[int, int]:
    """Return the seeds at the first look and at the last."""
    first = given.min_seeds if given.min_seeds is not None else max(FIRST, seeds)
    if first < seeds:
        problem = f"is below the {seeds} seeds that every cell of the grid has; leave it out"
        raise document.error((STOP, "min_seeds"), problem)
    most = given.max_seeds
    if most < first:
        default = "" if "max_seeds" in given.model_fields_set else " (the default)"
        what = f"the {first} seeds of the first look" if given.min_seeds is None else f"min_seeds: {first}"
        problem = f"{most}{default} is below {what}; give max_seeds: {first} or more"
        raise document.error((STOP, "max_seeds"), problem)
    return first, most


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
    at: Mapping[str, Any] = field(default_factory=dict)
    """By axis: the level at which it stands meanwhile; one that is not named stands where the grid's base has it."""
    line: int = 1

    def sweep(self, grid: str, word: str) -> str:
        """Return the name of a level's study."""
        return f"{grid}-tune-{word}"


def read_tune(
    document: GridDocument, given: TuneKeys, levels: Mapping[str, Sequence[Any]], name: str, *named: NamedLevels
) -> Tune:
    """Return the studies of a grid named `name`, with these levels by axis. Raises GridError for what cannot be tuned."""
    if "stop" in document.data:
        raise document.error((TUNE,), "stop adds seeds to cells that are known beforehand, and these are not; launch with tune first, and put what it found into set")  # fmt: skip
    per = given.per
    if not isinstance(per, str) or per not in levels:
        raise document.error((TUNE, "per"), "must be an axis of this grid", levels, str(per))
    for path in given.ranges:
        for axis in levels:
            if settings.paths(path, {}, {}) & settings.paths(axis, *named):
                problem = f"is varied by the axis {axis}; what is tuned cannot be an axis of the factorial"
                raise document.error((TUNE, "ranges", path), problem)
    for axis, level in given.at.items():
        where = (TUNE, "at", axis)
        if axis == per or axis not in levels:
            others = [one for one in levels if one != per]
            raise document.error(where, "must be another axis of this grid", others, axis)
        known = [level_text(axis, one) for one in levels[axis]]
        if level_text(axis, level) not in known:
            raise document.error(where, f"no level {level!r} in this grid", known, str(level))
    words = {level_text(per, level): level for level in levels[per]}
    found = Tune(per, words, given.search(), given.at, document.line(TUNE))
    for word in words:
        if why := why_not(study := found.sweep(name, word)):
            raise document.error((TUNE, "per"), f"the study of {per} {word} would be named {study}, which {why}")
    return found


def ends(document: GridDocument, search: Search, expansion: Expansion, key: str = SEARCH) -> list[Cell]:
    """Return the cells at the ends of all ranges, one setting at a time, the others at their first level or low end.

    Raises GridError for a range that holds what no cell can have, and for an objective that no cell is measured by.
    """
    every = {
        path: one.levels if isinstance(one, LevelChoice) else (one.low, one.high) for path, one in search.ranges.items()
    }
    first = {path: levels[0] for path, levels in every.items()}
    found: dict[str, Cell] = {}
    for params in [first, *({**first, path: level} for path, levels in every.items() for level in levels[1:])]:
        found |= {cell.id: cell for cell in expansion.cells(params, None)}
    asked = requested_by(found.values())
    for text in search.objectives:
        one = measure(text)
        try:
            check_measured(one.probe, one.metric.name, one.length, asked)
        except PydanticCustomError as error:
            raise document.located(error, key, "objective") from error
    for config in (cell.config for cell in found.values()):
        if search.pruner is not None and config.eval.validate_every >= config.train.steps:
            raise document.error(
                (SEARCH, "pruner"),
                f"there is no validation before the end: {config.train.steps} steps, eval.validate_every {config.eval.validate_every}; "
                "lower that",
            )
    return list(found.values())
