"""The contrasts that a grid declares: read, checked against its axes, levels, probes and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...results import metrics
from ...results.contrasts import AVERAGE, Contrast
from ..errors import GridError
from ..probes import PROBES, requested
from .axes import AXES, level_text
from .cell import Cell
from .measures import own_metrics
from .yaml_document import Document

KEY = "contrasts"
KEYS = ("measure", "axis", "level", "reference", "within", "margin")
NEEDED = ("measure", "axis", "level")
EVALUATION = "eval."
CALLED = {"measure": "metric", "axis": "contrast"}
"""Keys of a contrast by the names that they have under `stop`."""


def read(document: Document, given: list[Any], known: Mapping[str, list[Any]]) -> tuple[Contrast, ...]:
    """The contrasts of a grid file whose axes have these levels, those of `include` too. Raises GridError."""
    levels = levels_of(known)
    found: list[Contrast] = []
    for index, item in enumerate(given):
        read = Item(document, (KEY, index), item, levels)
        read.check_keys()
        one = read.read()
        if one in found:
            raise read.error("given twice; keep one of them")
        found.append(one)
    return tuple(found)


def place(document: Document, index: int, *keys: str) -> tuple[str | int, ...]:
    """Where the file says that of a grid's contrasts: in their list, or for the one that `stop` adds, there."""
    given = document.data.get(KEY)
    return (
        (KEY, index, *keys)
        if isinstance(given, list) and index < len(given)
        else ("stop", *(CALLED[key] for key in keys))
    )


def shown(keys: Iterable[str | int]) -> str:
    """A place in the file as people write it: contrasts[0].within.memory."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)[1:]


def check_lengths(document: Document, contrasts: Iterable[Contrast], cells: Iterable[Cell]) -> None:
    """That every contrast is about a probe and a context length that some cell is evaluated at. Raises GridError."""
    contrasts = list(contrasts)
    if not contrasts:
        return
    settings = {str(cell.config.eval): cell.config.eval for cell in cells}
    asked = {pair for config in settings.values() for pair in requested(config)}
    for index, one in enumerate(contrasts):
        lengths = sorted(length for probe, length in asked if probe == one.probe)
        where = place(document, index, "measure")
        line, key = document.line(*where), shown(where)
        if not lengths and one.probe in PROBES:
            probes = sorted({probe for probe, _ in asked})
            raise GridError(
                document.path, line, key, f"no cell runs the probe {one.probe} (eval.probes)", probes, one.probe
            )
        if lengths and one.length is not None and one.length not in lengths:
            told = [f"{one.probe}.{one.metric}" + (f"@{length}" if length else "") for length in lengths]
            raise GridError(document.path, line, key, f"no cell is evaluated at {one.measure} (eval.lengths)", told)


def canonical(axis: str, level: Any) -> str:
    """A level as cells tell it: of two names for one thing (memory: on, gated_delta) the first."""
    word = level_text(axis, level)
    if axis not in AXES:
        return word
    every = AXES[axis].levels()
    return next((name for name, overrides in every.items() if word in every and overrides == every[word]), word)


def levels_of(known: Mapping[str, list[Any]]) -> dict[str, dict[str, None]]:
    """The levels of every axis as cells tell them, each once."""
    return {axis: dict.fromkeys(canonical(axis, level) for level in some) for axis, some in known.items()}


class Item:
    """One contrast as it stands in the file. `called`: the keys that have another name there."""

    def __init__(
        self,
        document: Document,
        place: tuple[str | int, ...],
        item: Any,
        levels: Mapping[str, Mapping[str, None]],
        called: Mapping[str, str] | None = None,
    ) -> None:
        self.document, self.place, self.item, self.levels = document, place, item, levels
        self._called = called or {}

    def check_keys(self) -> None:
        """That it has what a contrast needs, and nothing unknown. Raises GridError."""
        if not isinstance(self.item, dict):
            raise self.error(f"must map {', '.join(NEEDED)} and more, got {self.item!r}")
        for key in self.item:
            if key not in KEYS:
                raise self.error("no such key", key, allowed=KEYS, word=key)
        for key in NEEDED:
            if self.item.get(key) is None:
                raise self.error(f"lacks {key}; a contrast needs {', '.join(NEEDED)}")

    def read(self) -> Contrast:
        """The contrast. Raises GridError."""
        probe, metric, length = self._measure()
        axis = self._axis(self.item["axis"], "axis")
        level = self._level(axis, self.item["level"], "level")
        given = self.item.get("reference")
        reference = None if given is None else self._level(axis, given, "reference")
        if reference == level:
            raise self.error(f"is the level {level} itself; a contrast needs two", "reference")
        return Contrast(
            probe=probe,
            metric=metric,
            length=length,
            axis=axis,
            level=level,
            reference=reference,
            within=self._within(axis),
            margin=self._margin(),
        )

    def _measure(self) -> tuple[str, str, int | None]:
        text = self.item["measure"]
        name, at, place = str(text).partition("@")
        probe, dot, metric = name.partition(".")
        if not isinstance(text, str) or not dot:
            raise self.error(f"must read probe.metric or probe.metric@length, got {text!r}", "measure")
        if probe not in (known := [*PROBES, *metrics.OF_TRAINING]):
            raise self.error(f"no probe {probe!r}", "measure", allowed=known, word=probe)
        names = [one.name for one in own_metrics(probe)]
        if metric not in names:
            raise self.error(f"the probe {probe} has no metric {metric!r}", "measure", allowed=names, word=metric)
        by_length = probe in PROBES and PROBES.load(probe).by_length
        if by_length != bool(at):
            needs = (
                f"needs a context length: {name}@65536, or {name}@{AVERAGE}"
                if by_length
                else f"has no context length: {name}"
            )
            raise self.error(needs, "measure")
        if not at or place == AVERAGE:
            return probe, metric, None if at else 0
        if not place.isdecimal() or not 0 < int(place) < 2**63:
            raise self.error(f"the context length must be a whole number or {AVERAGE}, got {place!r}", "measure")
        return probe, metric, int(place)

    def _axis(self, name: Any, *where: str) -> str:
        if not isinstance(name, str) or name not in self.levels:
            raise self.error("not an axis of this grid", *where, allowed=self.levels, word=str(name))
        return name

    def _level(self, axis: str, level: Any, *where: str) -> str:
        word = canonical(axis, level)
        if word not in self.levels[axis]:
            raise self.error(
                f"no level {level!r} of {axis} in this grid", *where, allowed=self.levels[axis], word=str(level)
            )
        return word

    def _within(self, axis: str) -> dict[str, str]:
        given = self.item.get("within", {})
        if not isinstance(given, dict):
            raise self.error(f"must map axes to a level, got {given!r}", "within")
        found = {}
        for name, level in given.items():
            if name == axis:
                raise self.error("is the axis of the contrast itself", "within", name)
            found[self._axis(name, "within", name)] = self._level(name, level, "within", name)
        return found

    def _margin(self) -> float | None:
        given = self.item.get("margin")
        if given is None:
            return None
        number = given
        if isinstance(given, str):
            try:
                number = float(given)
            except ValueError:
                number = None
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise self.error(
                f"must be a number above 0, in the unit of the measure (0.05 is 5 points), got {given!r}", "margin"
            )
        return float(number)

    def error(self, problem: str, *where: str, allowed: Iterable[str] = (), word: str | None = None) -> GridError:
        """About the contrast, or one of its keys."""
        keys = (*self.place, *(self._called.get(key, key) for key in where))
        return GridError(self.document.path, self.document.line(*keys), shown(keys), problem, allowed, word)
