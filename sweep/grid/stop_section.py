"""A grid's `stop:`, how closely a contrast is to be known before no more seeds are added: read and checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...results import metrics
from ...results.contrasts import Contrast, reference_level
from ...results.names import level_word
from ...results.stopping.stopping_rule import FIRST, MOST, MOST_SEEDS, OBRIEN_FLEMING, SPENDINGS, Rule
from ..errors import GridError
from .contrasts import CALLED, Item, canonical, levels_of
from .measures import NoMeasure, named, own_metrics
from .yaml_document import Document

KEY = "stop"
KEYS = (
    "contrast", "level", "reference", "within", "metric", "ci", "sure", "min_seeds", "max_seeds", "wave", "spending",
)  # fmt: skip
NEEDED = ("contrast", "metric")


def read(document: Document, given: Mapping[str, Any], known: Mapping[str, list[Any]], seeds: Sequence[int]) -> Rule:
    """The rule of a grid file whose axes have these levels, those of `include` too, and whose cells all have these seeds.

    Raises GridError.
    """
    return _Asked(document, given, known).rule(seeds)


def with_contrast(declared: Sequence[Contrast], rule: Rule, known: Mapping[str, list[Any]]) -> tuple[Contrast, ...]:
    """The declared contrasts, and the rule's as the last one unless it is among them."""
    levels = levels_of(known)
    there = any(rule.about(one, one.reference or reference_level([*levels[one.axis]])) for one in declared)
    return tuple(declared) if there else (*declared, rule.contrast)


class _Asked:
    """The section as it stands in the file."""

    def __init__(self, document: Document, given: Mapping[str, Any], known: Mapping[str, list[Any]]) -> None:
        self.given, self.levels = given, levels_of(known)
        self.item = Item(document, (KEY,), self._as_contrast(), self.levels, CALLED)
        self.document = document

    def rule(self, seeds: Sequence[int]) -> Rule:
        self._check_keys()
        contrast = self._contrast()
        width, sure = self._width(about(contrast)), level_word(self.given.get("sure", False))
        if sure not in ("on", "off"):
            raise self._error(f"must be true or false, got {self.given['sure']!r}", "sure")
        if width is None and sure == "off":
            raise self._error("must say when it is enough: ci, how wide the interval may be, or sure: true")
        spending = self.given.get("spending", OBRIEN_FLEMING)
        if spending not in SPENDINGS:
            raise self._error(f"no spending {spending!r}", "spending", allowed=SPENDINGS, word=str(spending))
        first, most = self._ends(len(seeds))
        return Rule(
            contrast=contrast, width=width, sure=sure == "on", seeds=self._further(seeds, most), first=first,
            wave=self._whole("wave", 1, least=1), spending=spending,
        )  # fmt: skip

    def _check_keys(self) -> None:
        for key in self.given:
            if key not in KEYS:
                raise self._error("no such key", str(key), allowed=KEYS, word=str(key))
        for key in NEEDED:
            if self.given.get(key) is None:
                raise self._error(f"lacks {key}; it needs {', '.join(NEEDED)}, and ci or sure")

    # --- the contrast ---------------------------------------------------------------------------------------------------

    def _as_contrast(self) -> dict[str, Any]:
        """The keys of a contrast, under its own names."""
        back = {called: key for key, called in CALLED.items()}
        return {back.get(key, key): value for key, value in self.given.items() if back.get(key, key) in ("measure", "axis", "level", "reference", "within")}  # fmt: skip

    def _contrast(self) -> Contrast:
        item = self.item.item
        item["measure"] = self._measure(item["measure"])
        axis = item["axis"]
        known = [*self.levels[axis]] if isinstance(axis, str) and axis in self.levels else []
        if known:
            given = item.get("reference")
            item["reference"] = reference_level(known) if given is None else canonical(axis, given)
        if known and item.get("level") is None:
            others = [level for level in known if level != item["reference"]]
            if len(others) != 1:
                raise self._error(f"has the levels {', '.join(known)}; say which one with level", "contrast")
            item["level"] = others[0]
        return self.item.read()

    def _measure(self, given: Any) -> str:
        """The number in full, as a contrast names it."""
        name, at, place = str(given).partition("@")
        try:
            probe, metric = named(name)
        except NoMeasure as error:
            raise self._error(error.problem, "metric", allowed=error.allowed, word=error.word) from error
        return f"{probe}.{metric.name}{at}{place}"

    # --- numbers --------------------------------------------------------------------------------------------------------

    def _width(self, of: metrics.Metric) -> float | None:
        """In the metric's own unit; a share's is asked for in points."""
        value = self.given.get("ci")
        if "ci" not in self.given:
            return None
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                number = None
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            unit = "points" if of.percent else of.unit
            raise self._error(f"must be the width of the interval in {unit}, above 0, got {value!r}", "ci")
        return number / 100 if of.percent else float(number)

    def _ends(self, seeds: int) -> tuple[int, int]:
        """Seeds at the first look and at the last."""
        first = self._whole("min_seeds", max(FIRST, seeds), least=2)
        if first < seeds:
            raise self._error(f"is below the {seeds} seeds that every cell of the grid has; leave it out", "min_seeds")
        most = self._whole("max_seeds", MOST, least=2)
        if most < first:
            default = "" if "max_seeds" in self.given else " (the default)"
            what = f"min_seeds: {first}" if "min_seeds" in self.given else f"the {first} seeds of the first look"
            raise self._error(f"{most}{default} is below {what}; give max_seeds: {first} or more", "max_seeds")
        return first, most

    def _whole(self, key: str, default: int, *, least: int) -> int:
        value = self.given.get(key, default)
        if key not in self.given:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_SEEDS:
            raise self._error(f"must be a whole number from {least} to {MOST_SEEDS}, got {value!r}", key)
        return value

    def _further(self, seeds: Sequence[int], most: int) -> tuple[int, ...]:
        """The grid's, then the whole numbers after the largest of them."""
        return (*seeds, *itertools.islice(itertools.count(max(seeds) + 1), most - len(seeds)))

    def _error(self, problem: str, *where: str, allowed: Sequence[str] = (), word: str | None = None) -> GridError:
        return self.item.error(problem, *where, allowed=allowed, word=word)


def about(contrast: Contrast) -> metrics.Metric:
    """What is known of the number that a contrast is about."""
    return next(one for one in own_metrics(contrast.probe) if one.name == contrast.metric)
