"""Cells: one combination of levels, resolved to a config, with its id and slug."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ...model import registry
from ...model.config import ModelConfig
from ..config import MUON_FIELDS, CellConfig, DataConfig, TrainConfig
from .plugins import PLUGGABLE
from .settings import levels_of


def _without_defaults(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that enter an id: neither outside the id, nor at their identity default.

    KeyError for a field without identity default that the values lack.

    Args:
        cls: Config class that declares the fields.
        values: JSON values of a config; fields newer than it may be missing and count as at their identity default.
    """
    fields: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        # a config older than the field lacks it and counts as having the identity default
        if extra.get("outside") or ("identity" in extra and values.get(name, extra["identity"]) == extra["identity"]):
            continue
        fields[name] = values[name]
    return fields


def model_identity(
    config: ModelConfig, identity_defaults: Mapping[str, Collection[str]] | None = None
) -> dict[str, Any]:
    """Return the model section's part of an id as field -> JSON value, without settings of switched-off parts.

    Fields outside the id and fields at their identity default are left out. Settings of parts stand under their section
    (such as "memories") by name of the part, unless none is left.

    Args:
        config: The section.
        identity_defaults: Config section of settings (such as "memories") -> its fields to leave out. Used for parts
            whose plugin is not loaded, whose identity defaults are unknown; None uses the registered classes.
    """
    dump = config.model_dump(mode="json")
    model = _without_defaults(ModelConfig, dump)
    if not config.window:
        model.pop("window_size", None)
    for section, table in registry.SETTINGS.items():
        parts = {}
        for name, part in dump[section].items():
            if identity_defaults is not None and section in identity_defaults:
                parts[name] = {field: value for field, value in part.items() if field not in identity_defaults[section]}
            else:
                parts[name] = _without_defaults(table.load(name).Config, part)
        model.pop(section, None)
        if any(parts.values()):
            model[section] = {name: part for name, part in parts.items() if part}
    return model


def train_identity(config: TrainConfig) -> dict[str, Any]:
    """Return the train section's part of an id as field -> JSON value, without settings of switched-off terms.

    Fields outside the id and fields at their identity default are left out. So are Muon's settings with AdamW (else
    `matrix_lr`, unless Muon has square matrices alone), weight and sketch of the regularizer "baseline", and weight and count of a distractor that is off.
    """
    train = _without_defaults(TrainConfig, config.model_dump(mode="json"))
    unused = MUON_FIELDS if config.optimizer == "adamw" else ("matrix_lr",) if config.muon_for == "matrices" else ()
    for name in unused:
        train.pop(name, None)
    if config.regularizer == "baseline":
        for name in ("regularizer_weight", "regularizer_sketch"):
            train.pop(name, None)
    if not config.distractor:
        for name in ("distractor_weight", "distractor_count"):
            train.pop(name, None)
    return train


def data_identity(config: DataConfig) -> dict[str, Any]:
    """Return the data section's part of an id (field -> JSON value)."""
    return _without_defaults(DataConfig, config.model_dump(mode="json"))


def identity(config: CellConfig) -> dict[str, Any]:
    """Return the content from which an id is computed: keys model, data, train and seed.

    Fields at their identity default and settings of switched-off parts are left out.
    """
    model, data, train = model_identity(config.model), data_identity(config.data), train_identity(config.train)
    return {"model": model, "data": data, "train": train, "seed": config.seed}


def canonical_json(value: Any) -> str:
    """Return canonical JSON: sorted keys, no spaces, ASCII; equal values give equal text.

    Raises ValueError for NaN and infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def cell_id(config: CellConfig) -> str:
    """Return the first 12 hex digits of the SHA-256 of the identity as canonical JSON."""
    return _digest(canonical_json(identity(config)))


MOST_UNKNOWN = 8
"""Limit on settings of unknown parts, of which `possible_ids` tries every subset."""


def possible_ids(config: CellConfig) -> Iterator[str]:
    """Yield the ids that a config may have while plugins of its mixer, memory or positions are not loaded.

    Only the plugin knows which of its settings are at an identity default, so there is one id per subset of them, 2**n
    for n settings. Without unknown parts, the config's own id is yielded.

    Raises:
        KeyError: On the first step, for a part that none of the config's plugins provides, and for more than 8 settings
            (MOST_UNKNOWN).
    """
    unknown: dict[str, list[str]] = {}
    for section, table in registry.SETTINGS.items():
        part = next(part for part in PLUGGABLE if part.registry is table)
        name, source = (getattr(config.model, field) for field in (part.name, part.source))
        if name in table or name == part.none_name:
            continue
        if source not in {plugin.sha256 for plugin in config.plugins}:
            raise KeyError(name)
        unknown[section] = list(getattr(config.model, section).get(name, {}))
    fields = [(section, field) for section, names in unknown.items() for field in names]
    if len(fields) > MOST_UNKNOWN:
        raise KeyError(
            f"{len(fields)} settings are of plugins that are not loaded; ids can be checked for at most {MOST_UNKNOWN}"
        )
    data, train = canonical_json(data_identity(config.data)), canonical_json(train_identity(config.train))
    for chosen in itertools.product((False, True), repeat=len(fields)):
        idle: dict[str, list[str]] = {section: [] for section in unknown}
        for section, field in itertools.compress(fields, chosen):
            idle[section].append(field)
        model = canonical_json(model_identity(config.model, idle))
        yield id_of_parts(model=model, data=data, train=train, seed=config.seed)


def id_of_parts(*, model: str, data: str, train: str, seed: int) -> str:
    """Return the cell id from the sections' identities as canonical JSON; equals `cell_id` of the config."""
    return _digest(f'{{"data":{data},"model":{model},"seed":{seed},"train":{train}}}')


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def slug(config: CellConfig, extra: Mapping[str, str] | None = None) -> str:
    """Return the readable name of a cell, such as `polar-baseline-d0-m1-w0-s0`.

    Parts: mixer, regularizer, distractor, memory, window, then those of `extra`, then the seed.

    Args:
        config: The cell's config.
        extra: Path -> level text of axes other than the five; a part is the path's last name followed by the level.
    """
    parts = [slug_part(path.rpartition(".")[2] + value) for path, value in (extra or {}).items()]
    return "-".join([base_slug(config), *parts, f"s{config.seed}"])


def base_slug(config: CellConfig) -> str:
    """Return the slug prefix of a cell: the levels of the five built-in axes, such as `polar-baseline-d0-m1-w0`.

    off is 0 and on is 1; other levels of distractor, memory and window are written out after the letter.
    """
    level = levels_of(config)

    def bit(letter: str, word: str) -> str:
        return letter + {"off": "0", "on": "1"}.get(word, word)

    bits = (bit(name[0], level[name]) for name in ("distractor", "memory", "window"))
    return "-".join(map(slug_part, (level["attn_type"], level["reg_mode"], *bits)))


_NOT_IN_SLUGS = re.compile(r"[^A-Za-z0-9_.+]+")


def slug_part(text: str) -> str:
    """Return the text with each run of characters other than letters, digits, `_`, `.`, `+` replaced by `_`."""
    return _NOT_IN_SLUGS.sub("_", text)


@dataclass(frozen=True, slots=True)
class Cell:
    """A combination of levels and a seed, resolved to a config."""

    id: str
    """First 12 hex digits of the hash of its identity, as `cell_id` returns them."""
    slug: str
    """Readable name, as `slug` returns it."""
    config: CellConfig
    axes: dict[str, str]
    """Axis -> level, as the grid names them; only the axes that the grid varies."""

    @property
    def levels(self) -> dict[str, str]:
        """Level of each of the five built-in axes, also of those that the grid does not vary."""
        return levels_of(self.config)
