"""A grid's `search:`, the study that it asks for: read and checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

from ...results.studies.search import Choice, Direction, Interval, Pruner, Range, Sampler, Search
from ..errors import GridError
from ..probes import requested
from . import axes, settings
from .axes import level_text
from .cell import Cell
from .expansion import Expansion
from .measures import Measure, NoMeasure, measure
from .yaml_document import Document

KEY = "search"
KEYS = ("sampler", "trials", "objective", "ranges", "pruner", "seed", "startup", "population")
RANGES = f"{KEY}.ranges"
INTERVAL = ("low", "high", "log", "step")
SAMPLERS, PRUNERS = get_args(Sampler), get_args(Pruner)
DIRECTIONS = get_args(Direction)
SECTIONS = ("model", "train")
"""Of a config: what makes another cell, but for the text, which all trials share."""
MOST_TRIALS = 10_000
ALONE = ("axes", "levels", "exclude", "include", "design", "contrasts", "stop", "tune")
"""Keys that are about the cells of a factorial grid."""
PRUNED = "val.val_loss"
"""The number whose curve a pruner reads."""
REASON = (
    "a pruner ends cells by their validation loss on the way, which in the published sweep would have ended the best ones at retrieval "
    "(docs/designs.md, Why a factorial grid is not pruned); cells of a factorial run to their end"
)


def check_no_pruner(document: Document) -> None:
    """That no pruner is asked for where cells are not proposed. Raises GridError with the reason."""
    search = document.data.get(KEY)
    inside = isinstance(search, Mapping) and search.get("pruner") is not None
    if "pruner" in document.data:
        raise GridError(document.path, document.line("pruner"), "pruner", REASON)
    if inside and document.data.get("axes"):
        raise GridError(document.path, document.line(KEY, "pruner"), f"{KEY}.pruner", REASON)


def read(document: Document, given: Mapping[str, Any], seeds: Sequence[int]) -> Search:
    """The study that a grid file asks for. Raises GridError for what is none."""
    asked = Asked(document, given)
    asked.check_keys()
    for key in ALONE:
        if document.data.get(key):
            raise GridError(
                document.path, document.line(key), key,
                f"is about the cells of a factorial grid, and those of {KEY} are proposed; what varies goes into {KEY}.ranges",
            )  # fmt: skip
    if len(seeds) > 1:
        raise GridError(document.path, document.line("seeds"), "seeds", "a trial is one cell, so that a study has one seed; give seeds: [0]")  # fmt: skip
    return asked.search()


def ends(document: Document, search: Search, expansion: Expansion, key: str = KEY) -> list[Cell]:
    """The cells at the ends of all ranges, one setting at a time, the others at their first level or low end.

    Raises GridError for a range that holds what no cell can have, and for an objective that no cell is measured by.
    """
    every = {
        path: one.levels if isinstance(one, Choice) else (one.low, one.high) for path, one in search.ranges.items()
    }
    first = {path: levels[0] for path, levels in every.items()}
    found: dict[str, Cell] = {}
    for params in [first, *({**first, path: level} for path, levels in every.items() for level in levels[1:])]:
        found |= {cell.id: cell for cell in expansion.cells(params, None)}
    configs = {id(cell.config.eval): cell.config.eval for cell in found.values()}
    asked = {pair for config in configs.values() for pair in requested(config)}
    for text in search.objectives:
        try:
            measure(text).check(asked)
        except NoMeasure as error:
            raise GridError(document.path, document.line(key, "objective"), f"{key}.objective", error.problem, error.allowed, error.word) from error  # fmt: skip
    if search.pruner is not None:
        _check_curve(document, found.values())
    return list(found.values())


def _check_curve(document: Document, cells: Iterable[Cell]) -> None:
    for config in (cell.config for cell in cells):
        if config.eval.validate_every >= config.train.steps:
            raise GridError(
                document.path, document.line(KEY, "pruner"), f"{KEY}.pruner",
                f"there is no validation before the end: {config.train.steps} steps, eval.validate_every {config.eval.validate_every}; "
                "lower that",
            )  # fmt: skip


class Asked:
    """The section as it stands in the file, under `key`."""

    def __init__(
        self, document: Document, given: Mapping[str, Any], key: str = KEY, keys: Sequence[str] = KEYS
    ) -> None:
        self.document, self.given, self.key, self.keys = document, given, key, keys

    def error(
        self, problem: str, *where: str | int, allowed: Collection[str] = (), word: str | None = None
    ) -> GridError:
        """About a key of the section, or about all of it."""
        key = ".".join(map(str, (self.key, *where)))
        return GridError(self.document.path, self.document.line(self.key, *where), key, problem, allowed, word)

    def check_keys(self) -> None:
        """That it has what a study needs, and nothing unknown. Raises GridError."""
        for key in self.given:
            if key not in self.keys:
                raise self.error("no such key", str(key), allowed=self.keys, word=str(key))
        for key in ("objective", "ranges"):
            if not self.given.get(key):
                raise self.error(f"lacks {key}; a study needs objective and ranges")

    def search(self) -> Search:
        """The whole of it. Raises GridError."""
        ranges = self._ranges()
        sampler = self._word("sampler", SAMPLERS) or "tpe"
        objectives = self._objectives()
        pruner = self._pruner(objectives)
        numbers = sum(isinstance(one, Interval) for one in ranges.values())
        if sampler == "cmaes" and numbers < 2:
            raise self.error(
                f"cmaes searches two or more numbers at once, and {numbers} of these ranges has low and high; use tpe, "
                "or give such ranges", "sampler",
            )  # fmt: skip
        if sampler == "cmaes" and len(objectives) > 1:
            raise self.error("cmaes has one objective; use tpe or nsga2 for several", "sampler")
        options = {key: self._count(key, None) for key in ("startup", "population") if key in self.given}
        of = {"startup": ("tpe", "cmaes"), "population": ("cmaes", "nsga2")}
        for key in options:
            if sampler not in of[key]:
                raise self.error(f"is a number of {' and '.join(of[key])}; the sampler is {sampler}", key)
        seed = self.given.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise self.error(f"must be a whole number from 0, got {seed!r}", "seed")
        return Search(
            ranges, objectives, sampler, self._count("trials", 20), pruner, seed, options  # type: ignore[arg-type]
        )  # fmt: skip

    def _word(self, key: str, known: Sequence[str]) -> str | None:
        value = self.given.get(key)
        if value is None:
            return None
        if value not in known:
            raise self.error(f"no {key} {value!r}", key, allowed=known, word=str(value))
        return str(value)

    def _count(self, key: str, default: int | None) -> int:
        value, least = self.given.get(key, default), 2 if key == "population" else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TRIALS:
            raise self.error(f"must be a whole number from {least} to {MOST_TRIALS}, got {value!r}", key)
        return value

    def _pruner(self, objectives: Mapping[str, Direction]) -> str | None:
        name = self._word("pruner", PRUNERS)
        if name is None:
            return None
        if len(objectives) > 1:
            raise self.error("a pruner has one objective to judge by, and the study several; leave it out", "pruner")
        if dict(objectives) != {PRUNED: "minimize"}:
            raise self.error(
                f"a pruner judges by the validation loss on the way, and the objective is {next(iter(objectives))}; leave it out, or "
                "search for val_loss", "pruner",
            )  # fmt: skip
        return name

    # --- objectives ---------------------------------------------------------------------------------------------------

    def _objectives(self) -> dict[str, Direction]:
        given = self.given["objective"]
        pairs = dict(given) if isinstance(given, Mapping) else dict.fromkeys(self._names(given))
        found: dict[str, Direction] = {}
        for name, direction in pairs.items():
            where = ("objective", name) if isinstance(given, Mapping) else ("objective",)
            try:
                one = measure(name)
            except NoMeasure as error:
                raise self.error(error.problem, *where, allowed=error.allowed, word=error.word) from error
            if one.text in found:
                raise self.error(f"{one.text} is given twice; keep one of them", *where)
            found[one.text] = self._direction(one, direction, where)
        return found

    def _names(self, given: Any) -> list[str]:
        names = given if isinstance(given, list) else [given]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise self.error(f"must be a number such as val_loss, or map several to minimize or maximize, got {given!r}", "objective")  # fmt: skip
        return names

    def _direction(self, one: Measure, given: Any, where: Sequence[str]) -> Direction:
        if given is None and one.metric.direction:
            return "minimize" if one.metric.direction < 0 else "maximize"
        if given not in DIRECTIONS:
            problem = f"no direction {given!r}" if given is not None else "neither side of it is better by itself"
            raise self.error(f"{problem}; write objective: {{{one.text}: minimize}} or maximize", *where)
        return given

    # --- ranges -------------------------------------------------------------------------------------------------------

    def _ranges(self) -> dict[str, Range]:
        given = self.given["ranges"]
        if not isinstance(given, Mapping):
            raise self.error(f"must map settings to a range each, got {given!r}", "ranges")
        return {str(path): self._range(str(path), one) for path, one in given.items()}

    def _range(self, path: str, given: Any) -> Range:
        where = ("ranges", path)
        if path not in axes.AXES:
            wrong = settings.unknown(path)
            if wrong is not None:
                problem, allowed, word = wrong
                raise self.error(
                    problem, *where, allowed=[*allowed, *(axes.AXES if "." not in path else ())], word=word
                )
            if path.partition(".")[0] not in SECTIONS:
                raise self.error(
                    "is the same for all trials, or makes no other cell; only settings of model and train are searched", *where
                )  # fmt: skip
        if isinstance(given, list):
            return self._choice(path, given)
        if not isinstance(given, Mapping):
            raise self.error(f"must be {{low: .., high: ..}} or a list of levels, got {given!r}", *where)
        if path in axes.AXES:
            raise self.error("is no number; give a list of its levels", *where, allowed=list(axes.AXES[path].levels()))
        return self._interval(path, given)

    def _choice(self, path: str, levels: list[Any]) -> Choice:
        where = ("ranges", path)
        words = [level_text(path, level) for level in levels]
        if len(set(words)) < max(2, len(words)):
            raise self.error("needs two or more levels, all different; what does not vary goes into set", *where)
        if path in axes.AXES:
            known = axes.AXES[path].levels()
            for word in words:
                if word not in known:
                    raise self.error(f"no level {word!r}", *where, allowed=list(known), word=word)
            return Choice(tuple(words))
        if not all(level is None or isinstance(level, bool | int | float | str) for level in levels):
            raise self.error(f"levels must be single values, got {levels!r}", *where)
        return Choice(tuple(levels))

    def _interval(self, path: str, given: Mapping[str, Any]) -> Interval:
        where = ("ranges", path)
        for key in given:
            if key not in INTERVAL:
                raise self.error("no such key", *where, str(key), allowed=INTERVAL, word=str(key))
        low, high = (self._number(path, key, given) for key in ("low", "high"))
        step = self._number(path, "step", given) if given.get("step") is not None else None
        log = given.get("log", False)
        if not isinstance(log, bool):
            raise self.error(f"must be true or false, got {log!r}", *where, "log")
        if low >= high:
            raise self.error(f"low must be below high, got {low:g} and {high:g}", *where)
        if log and low <= 0:
            raise self.error(f"an even spread in the logarithm needs low above 0, got {low:g}", *where, "low")
        if step is not None and (log or step <= 0 or step > high - low):
            raise self.error(
                "has log, and so no steps; leave one of them out" if log else f"must be above 0 and at most high - low, got {step:g}",
                *where, "step",
            )  # fmt: skip
        return Interval(low, high, log, step)

    def _number(self, path: str, key: str, given: Mapping[str, Any]) -> float:
        value = given.get(key)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = given[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"must be a number, got {given.get(key)!r}", "ranges", path, *([key] if key in given else []))  # fmt: skip
        if not settings.is_whole(path):
            return float(value)
        if value != int(value):
            raise self.error(f"{path} takes whole numbers, got {value:g}", "ranges", path, key)
        return int(value)
