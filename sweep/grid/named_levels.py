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
from . import axes, settings
from .settings import Layer, Setting
from .yaml_document import Document, KeyPath, shown

KEY = "levels"
NAME = re.compile(r"[a-z][a-z0-9_]*")
LEVEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
RULE = "a name of lower-case letters, digits and _"
LEVEL_RULE = "letters, digits, _ . + and -"
TAKEN = {*CellConfig.model_fields, "sweep", "cell", "slug", "state", "axes", "probe", "metric", "length", "value", "unit", "n"}  # fmt: skip
"""Sections of a config, and columns of the view `results`."""
NamedLevels = Mapping[str, Mapping[str, Layer]]
"""Axis -> level -> what it sets."""


def read(document: Document, given: Mapping[str, Any]) -> NamedLevels:
    """Return the axes of a grid file whose levels are mappings. Raises GridError for what cannot be one."""
    return {
        name: _levels(document, name, levels)
        for name, levels in given.items()
        if isinstance(levels, Mapping) and name not in axes.AXES and "." not in name
    }


def besides(document: Document, given: Mapping[str, Any], known: Mapping[str, Sequence[Any]]) -> NamedLevels:
    """Return what the grid's `levels` say, by axis and level of those that it has. Raises GridError."""
    found: dict[str, dict[str, Layer]] = {}
    for axis, levels in given.items():
        words = [axes.level_text(axis, level) for level in known.get(axis, ())]
        if not words:
            raise document.error((KEY, axis), "not an axis of this grid", known, axis)
        if not isinstance(levels, Mapping):
            raise document.error((KEY, axis), f"must map levels to settings, got {levels!r}")
        found[axis] = {}
        for level, sets in levels.items():
            word = axes.level_text(axis, level)
            if word not in words:
                raise document.error((KEY, axis), f"no level {level!r} in this grid", words, word, below=(level,))
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


def _levels(document: Document, name: str, levels: Mapping[str, Any]) -> dict[str, Layer]:
    """Return what each level of an axis of the file's own sets. Raises GridError."""
    where = ("axes", name)
    if not NAME.fullmatch(name):
        raise document.error(where, f"an axis whose levels are named here has {RULE}, got {name!r}")
    if name in TAKEN:
        raise document.error(where, "has a meaning already; give the axis another name")
    if not levels:
        raise document.error(where, "has no levels; give at least one, or remove the axis")
    for level in levels:
        if not LEVEL.fullmatch(level):
            raise document.error((*where, level), f"a level's name has {LEVEL_RULE}, got {level!r}")
    return {level: _layer(document, sets, (*where, level)) for level, sets in levels.items()}


def _layer(document: Document, sets: Any, where: KeyPath) -> Layer:
    """Return the settings of one level. Raises GridError."""
    if not isinstance(sets, Mapping):
        raise document.error(where, f"must map settings to values ({{}} for none), got {sets!r}")
    layer: Layer = {}
    for path, value, line, written in settings.flatten(sets, document, where):
        settings.add(layer, path, Setting(value, document.path, line, f"{shown(where)}.{written}"))
    return layer
