"""What a level means: the one table from axis and level to config overrides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...model import registry
from ...results.names import level_word

if TYPE_CHECKING:
    from ..config import CellConfig

Overrides = Mapping[str, Any]
"""Dotted config path -> value."""


@dataclass(frozen=True)
class Axis:
    """A named factor of the design."""

    doc: str
    levels: Callable[[], Mapping[str, Overrides]]
    level_of: Callable[[CellConfig], str]
    open: bool = False
    """Whether a plugin may add levels."""


def _switch(path: str) -> Callable[[], Mapping[str, Overrides]]:
    return lambda: {"off": {path: False}, "on": {path: True}}


def _memories() -> Mapping[str, Overrides]:
    named = {name: {"model.memory": name} for name in registry.MEMORIES}
    return {"off": {"model.memory": "none"}, "on": {"model.memory": "gated_delta"}, **named}


def _word(value: bool) -> str:
    return "on" if value else "off"


AXES: dict[str, Axis] = {
    "attn_type": Axis(
        "Mixer of the global layers.",
        lambda: {name: {"model.attn_type": name} for name in registry.MIXERS},
        lambda config: config.model.attn_type,
        open=True,
    ),
    "reg_mode": Axis(
        "Representation regularizer.",
        lambda: {name: {"train.regularizer": name} for name in ("baseline", *registry.REGULARIZERS)},
        lambda config: config.train.regularizer,
        open=True,
    ),
    "distractor": Axis("Distractor loss.", _switch("train.distractor"), lambda config: _word(config.train.distractor)),
    "memory": Axis(
        "Recurrent memory; on is gated_delta.",
        _memories,
        lambda config: {"none": "off", "gated_delta": "on"}.get(config.model.memory, config.model.memory),
        open=True,
    ),
    "window": Axis("Sliding window in training.", _switch("model.window"), lambda config: _word(config.model.window)),
}


def level_text(axis: str, level: Any) -> str:
    """A level as text: the level's word on one of the five axes, canonical JSON on a config path."""
    return level_word(level) if axis in AXES or isinstance(level, str) else json.dumps(level)


def levels_of(config: CellConfig) -> dict[str, str]:
    """The level of each of the five axes that `config` stands at."""
    return {name: axis.level_of(config) for name, axis in AXES.items()}


def synonyms_of(axis: str, level: str) -> list[str]:
    """Return the words of a grid that set the same as this level of one of the five axes."""
    levels = AXES[axis].levels()
    return [word for word, overrides in levels.items() if overrides == levels.get(level)]
