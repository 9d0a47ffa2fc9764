"""Axes that a grid file makes itself: each level is a name for several settings at once, as two recipes are.

    axes:
      recipe:
        intended: {train.schedule: cosine}
        published: {train.schedule: linear, train.loss_reduction: sum}

And what a level of any axis sets besides, such as the learning rate that each mixer was found to need:

    levels:
      attn_type: {polar: {train.muon_lr: 0.02}, nope: {train.muon_lr: 0.04}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import CellConfig
from ..errors import GridError
from . import axes, settings
from .settings import Layer, Setting
from .yaml_document import Document

KEY = "levels"
NAME = re.compile(r"[a-z][a-z0-9_]*")
LEVEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
RULE = "a name of lower-case letters, digits and _"
LEVEL_RULE = "letters, digits, _ . + and -"
TAKEN = {*CellConfig.model_fields, "sweep", "cell", "slug", "state", "axes", "probe", "metric", "length", "value", "unit", "n"}  # fmt: skip
"""Sections of a config, and columns of the view `results`."""
NamedLevels = Mapping[str, Mapping[str, Layer]]
"""Axis -> level -> what it sets."""


def read(document: Document) -> NamedLevels:
    """The axes of a grid file whose levels are mappings. Raises GridError for what cannot be one."""
    given = document.data.get("axes")
    return (
        {
            name: _levels(document, name, levels)
            for name, levels in given.items()
            if isinstance(levels, Mapping) and name not in axes.AXES and "." not in str(name)
        }
        if isinstance(given, Mapping)
        else {}
    )


def besides(document: Document, given: Mapping[Any, Any], known: Mapping[str, Sequence[Any]]) -> NamedLevels:
    """What the grid's `levels` say, by axis and level of those that it has. Raises GridError."""
    found: dict[str, dict[str, Layer]] = {}
    for axis, levels in given.items():
        words = [axes.level_text(axis, level) for level in known.get(axis, ())]
        if not words:
            raise GridError(document.path, document.line(KEY, axis), f"{KEY}.{axis}", "not an axis of this grid", known, str(axis))  # fmt: skip
        if not isinstance(levels, Mapping):
            raise GridError(document.path, document.line(KEY, axis), f"{KEY}.{axis}", f"must map levels to settings, got {levels!r}")  # fmt: skip
        found[axis] = {}
        for level, sets in levels.items():
            word = axes.level_text(axis, level)
            if word not in words:
                raise GridError(document.path, document.line(KEY, axis, level), f"{KEY}.{axis}", f"no level {level!r} in this grid", words, word)  # fmt: skip
            found[axis][word] = _layer(document, sets, (KEY, axis, level))
    return found


def put(layer: Layer, axis: str, setting: Setting, *named: NamedLevels) -> None:
    """Puts what a level sets into a layer: of an axis of `named` what it says there, of any other its own. Raises GridError."""
    word = axes.level_text(axis, setting.value)
    own, besides = named
    if axis not in own:
        settings.add(layer, axis, setting)
    for said in (own, besides):
        for path, one in said.get(axis, {}).get(word, {}).items():
            settings.add(layer, path, one)


def paths(axis: str, named: NamedLevels, besides: NamedLevels) -> set[str]:
    """The settings that the levels of an axis reach."""
    own = axes.AXES[axis].levels() if axis in axes.AXES else named.get(axis, {"": {axis: None}})
    return {path for levels in (own, besides.get(axis, {})) for sets in levels.values() for path in sets}


def _levels(document: Document, name: Any, levels: Mapping[Any, Any]) -> dict[str, Layer]:
    def wrong(problem: str, *where: Any) -> GridError:
        key = ".".join(map(str, ("axes", name, *where)))
        return GridError(document.path, document.line("axes", name, *where), key, problem)

    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"an axis whose levels are named here has {RULE}, got {name!r}")
    if name in TAKEN:
        raise wrong("has a meaning already; give the axis another name")
    if not levels:
        raise wrong("has no levels; give at least one, or remove the axis")
    found: dict[str, Layer] = {}
    for level, sets in levels.items():
        if not isinstance(level, str) or not LEVEL.fullmatch(level):
            raise wrong(f"a level's name has {LEVEL_RULE}, got {level!r}", level)
        found[level] = _layer(document, sets, ("axes", name, level))
    return found


def _layer(document: Document, sets: Any, where: tuple[str | int, ...]) -> Layer:
    key = ".".join(map(str, where))
    if not isinstance(sets, Mapping):
        raise GridError(document.path, document.line(*where), key, f"must map settings to values ({{}} for none), got {sets!r}")  # fmt: skip
    layer: Layer = {}
    for path, value, line, written in settings.flatten(sets, document, where):
        settings.add(layer, path, Setting(value, document.path, line, f"{key}.{written}"))
    return layer
