"""Settings of a grid: dotted paths of the config, axes whose levels stand for settings, and layers of overrides.

An axis is one of the five of AXES, a dotted path, or a custom one of the file, whose levels each make several settings:

    axes:
      recipe:
        intended: {train.schedule: cosine}
        published: {train.schedule: linear, train.loss_reduction: sum}

`levels` adds settings to levels of any axis, such as the learning rate of each mixer:

    levels:
      attn_type: {polar: {train.muon_lr: 0.02}, nope: {train.muon_lr: 0.04}}
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from ...model import registry
from ...model.block_parts import fla_catalogue
from ...model.registry import Registry
from ...results.errors import install_hint
from ...results.names import is_utf8, normalized_level, quoted_short
from ..config import HUB_PREFIX, MOVED_PROBE_SETTINGS, CellConfig
from ..data.registry import CORPORA
from ..errors import GridError
from ..probes import PROBES
from .plugins import PLUGGABLE
from .yaml_document import GridDocument, KeyPath, format_key_path

Overrides = Mapping[str, Any]
"""Dotted config path -> value."""


@dataclass(frozen=True)
class Axis:
    """A built-in factor of the design, with its levels and the config values that they stand for."""

    doc: str
    levels: Callable[[], Mapping[str, Overrides]]
    """Returns level -> its settings; plugins may have added levels since the last call."""
    level_of: Callable[[CellConfig], str]
    """Returns the level of a config."""
    accepts_plugins: bool = False
    """True if a plugin may add levels."""


def _switch(path: str) -> Callable[[], Mapping[str, Overrides]]:
    return lambda: {"off": {path: False}, "on": {path: True}}


def _memories() -> Mapping[str, Overrides]:
    named = {name: {"model.memory": name} for name in registry.MEMORIES}
    return {"off": {"model.memory": "none"}, "on": {"model.memory": "gated_delta"}, **named}


def _on_off(is_on: bool) -> str:
    return "on" if is_on else "off"


AXES: dict[str, Axis] = {
    "attn_type": Axis(
        "Mixer of the global layers; none is a memory alone.",
        lambda: {name: {"model.attn_type": name} for name in (*registry.MIXERS.every_name(), "none")},
        lambda config: config.model.attn_type,
        accepts_plugins=True,
    ),
    "reg_mode": Axis(
        "Representation regularizer.",
        lambda: {name: {"train.regularizer": name} for name in ("baseline", *registry.REGULARIZERS)},
        lambda config: config.train.regularizer,
        accepts_plugins=True,
    ),
    "distractor": Axis(
        "Distractor loss.", _switch("train.distractor"), lambda config: _on_off(config.train.distractor)
    ),
    "memory": Axis(
        "Recurrent memory; on is gated_delta.",
        _memories,
        lambda config: {"none": "off", "gated_delta": "on"}.get(config.model.memory, config.model.memory),
        accepts_plugins=True,
    ),
    "window": Axis("Sliding window in training.", _switch("model.window"), lambda config: _on_off(config.model.window)),
}


def level_text(axis: str, level: Any) -> str:
    """Return a level as text: canonical words such as "on" on the five built-in axes, text unchanged, else JSON."""
    return normalized_level(level) if axis in AXES or isinstance(level, str) else json.dumps(level)


def levels_of(config: CellConfig) -> dict[str, str]:
    """Return axis -> level of the config, for each of the five axes."""
    return {name: axis.level_of(config) for name, axis in AXES.items()}


def missing_library(word: str) -> str:
    """Return the end of an error about an unknown name that says which library offers it, and is not installed.

    Empty for a name without the prefix of a library, and if the library is installed.
    """
    if word.partition(":")[0] != fla_catalogue.PREFIX or ":" not in word or fla_catalogue.fla_names():
        return ""
    return f"; flash-linear-attention, which may have it, is not installed: {install_hint('fla')}"


def unknown_level(word: str, levels: Iterable[str], where: str = "") -> tuple[str, list[str]]:
    """Return (problem, allowed levels) for a level that an axis does not have; `where` follows the level in the text.

    A word with a colon may be one of the levels that an installed library offers, any other one of the rest.
    """
    return f"no level {word!r}{where}{missing_library(word)}", [
        name for name in levels if (":" in name) == (":" in word)
    ]


def synonyms_of(axis: str, level: str) -> list[str]:
    """Return the names of all levels that set the same values as this level of a built-in axis, itself included.

    Empty for an unknown level; KeyError for any other axis.
    """
    levels = AXES[axis].levels()
    return [word for word, overrides in levels.items() if overrides == levels.get(level)]


# --- dotted paths -----------------------------------------------------------------------------------------------------

COMPUTED = {
    "data.fingerprint": "is computed from the text; remove it",
    **{f"{part.section}.{part.source}": "is computed from the plugin file; remove it" for part in PLUGGABLE},
    "train.init_sha256": "is computed from the weights; remove it",
    "plugins": "is a key of the grid itself; move it there",
    "seed": "is given by the grid's key seeds, for example seeds: [0, 1]",
}
"""Fields that no grid may set -> the remedy that the error states."""
_PART_REGISTRIES: dict[tuple[str, ...], Registry[Any]] = {
    **{("model", field): parts for field, parts in registry.SETTINGS.items()},
    ("eval", "settings"): PROBES,
    ("data", "settings"): CORPORA,
}
"""Section and field that hold settings by the name of a part -> registry of the parts."""
_MOVED_PROBE_SETTINGS = {
    f"eval.{name}": f"eval.settings.{probe}.{field}" for name, (probe, field) in MOVED_PROBE_SETTINGS.items()
}


@dataclass(frozen=True)
class Setting:
    """A value of the config and the file, line and key that wrote it (line None for the command line)."""

    value: Any
    file: Path | str
    line: int | None
    key: str

    def error(self, problem: str, allowed: Iterable[str] = (), word: str | None = None) -> GridError:
        """Return an error about the setting where it was written; `word` may be a misspelling."""
        return GridError(self.file, self.line, self.key, problem, allowed, word)


Layer = dict[str, Setting]
"""Dotted path -> setting, all of one precedence."""


def _schema_node(path: str) -> Any:
    """Return the schema node of a dotted path.

    Returns:
        The config class of a section ("" is the whole config), the registry whose parts have settings, the pydantic
        field of a value, or None for a path that does not exist.
    """
    node: Any = CellConfig
    parts = tuple(path.split(".")) if path else ()
    for index, part in enumerate(parts):
        if isinstance(node, Registry):
            node = node.load(part).Config if part in node else None
        elif (field := getattr(node, "model_fields", {}).get(part)) is None:
            return None
        else:
            section = (kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind))
            node = _PART_REGISTRIES.get(parts[: index + 1]) or next(section, field)
    return node


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def keys_below(path: str) -> list[str]:
    """Return the dotted paths directly below `path` ("" for the whole config), without computed fields.

    Fields come as declared; names of parts and their settings are sorted. Empty for a value or an unknown path.
    """
    node, prefix = _schema_node(path), f"{path}." if path else ""
    names = sorted(node) if isinstance(node, Registry) else getattr(node, "model_fields", ())
    paths = [prefix + name for name in names if prefix + name not in COMPUTED]
    return sorted(paths) if tuple(path.split(".")[:2]) in _PART_REGISTRIES else paths


def is_integer_setting(path: str) -> bool:
    """Return True if `path` names a setting that takes integers (or integers and None), but no floats or booleans.

    The path must exist: AttributeError otherwise.
    """
    annotation = _schema_node(_MOVED_PROBE_SETTINGS.get(path, path)).annotation
    kinds = {annotation, *get_args(annotation)}
    return int in kinds and float not in kinds and bool not in kinds


def path_problem(path: str) -> tuple[str, list[str], str | None] | None:
    """Return None if `path` names a value of the config that a grid may set, else the reason why not.

    Returns:
        (problem, allowed paths, misspelled word). Allowed paths are those beside the first wrong part; those below the
        path if it is a section; none for computed fields. The word is None for a computed field and for a section.
    """
    if path in COMPUTED:
        return COMPUTED[path], [], None
    path = _MOVED_PROBE_SETTINGS.get(path, path)
    parts = path.split(".")
    for index in range(len(parts)):
        section, allowed = ".".join(parts[:index]), keys_below(".".join(parts[:index]))
        node = _schema_node(section)
        if isinstance(node, Registry) and parts[index] in node:  # also a part of an installed library
            continue
        if isinstance(node, Registry) and ":" in parts[index]:
            allowed = [f"{section}.{name}" for name in node.choices(parts[index])]
        if ".".join(parts[: index + 1]) not in allowed:
            no = f"no such setting under {section}" if section else "no such section"
            return no, allowed, path if section else parts[0]
    if _is_section(_schema_node(path)) or isinstance(_schema_node(path), Registry):
        return "is a section, not a value", keys_below(path), None
    return None


def flatten(
    tree: Mapping[str, Any], document: GridDocument, prefix: tuple[str | int, ...]
) -> Iterator[tuple[str, Any, int, str]]:
    """Yield (dotted path, value, line, key as written) of every leaf of `tree`.

    Dotted keys and nesting may be mixed; lists are leaves. Paths are relative to `tree`, without `prefix`.

    Args:
        tree: Nested settings.
        document: The file, for lines.
        prefix: Key path of `tree` in the file.

    Raises:
        GridError: For an empty mapping below `tree`.
    """
    for key, value in tree.items():
        key_path = (*prefix, key)
        if isinstance(value, Mapping):
            inner = list(flatten(value, document, key_path))
            if not value:
                raise document.error(key_path, "is empty; remove it or give it a value")
            for path, leaf, line, written in inner:
                yield f"{key}.{path}", leaf, line, f"{key}.{written}"
        else:
            yield key, value, document.line(*key_path), key


def add_setting(layer: Layer, path: str, setting: Setting) -> None:
    """Add a setting to a layer in place; the name of a built-in axis adds the settings of its level instead.

    Former names of probe settings are translated. The value itself is not checked, except a level of a built-in axis.

    Raises:
        GridError: For an unknown path or level, and for a path that the layer already has.
    """
    if path in AXES:
        word = normalized_level(setting.value)
        levels = AXES[path].levels()
        if word not in levels:
            problem, allowed = unknown_level(word, levels, f" of axis {path}")
            raise setting.error(problem, allowed, word)
        for inner, value in levels[word].items():
            add_setting(layer, inner, replace(setting, value=value))
        return
    wrong = path_problem(path)
    if wrong:
        problem, allowed, misspelt = wrong
        if "." not in path and misspelt is not None:
            allowed = [*allowed, *AXES]
        raise setting.error(problem, allowed, misspelt)
    path = _MOVED_PROBE_SETTINGS.get(path, path)
    before = layer.get(path)
    if before is not None:
        previous = f"{before.key} in line {before.line}" if before.line else before.key
        raise setting.error(f"sets {path}, which {previous} sets too; keep one of them")
    layer[path] = setting


def merge(layers: Iterable[Layer]) -> Layer:
    """Return one new layer in which later layers win.

    Overriding settings move to the end, so that errors can point to the last one. Relative file paths become absolute,
    resolved against the folder of the file that wrote them, or the working folder for the command line.

    Raises:
        GridError: For a file path that is not valid.
    """
    merged: Layer = {}
    for layer in layers:
        for path, setting in layer.items():
            merged.pop(path, None)
            if path == "eval.texts" and isinstance(setting.value, list):
                texts = [_resolve_path_setting(replace(setting, value=text)).value for text in setting.value]
                setting = replace(setting, value=texts)
            merged[path] = _resolve_path_setting(setting) if _is_path(path, setting.value) else setting
    return merged


def _is_path(path: str, value: Any) -> bool:
    """Return True if the setting is a local file path.

    `checkpoint.path` may be a URL instead. `data.heldout` counts as a path if it has "/" or ".", else it is a corpus.
    `train.init_from` is a path if it names a checkpoint.
    """
    if path == "train.init_from":
        return isinstance(value, str) and (value.startswith(HUB_PREFIX) or is_checkpoint(value)) and "://" not in value
    if path == "data.heldout":
        return isinstance(value, str) and ("/" in value or "." in value)
    if path == "checkpoint.path":
        return isinstance(value, str) and "://" not in value
    return path in ("data.path", "data.tokenizer_file")


def is_checkpoint(source: str) -> bool:
    """Return True if a `train.init_from` names the file or folder of a checkpoint, not a cell or a model of the hub."""
    return not source.startswith(HUB_PREFIX) and ("/" in source or source.endswith(".safetensors"))


def _resolve_path_setting(setting: Setting) -> Setting:
    """Return the setting with its path made absolute, relative to the file that wrote it.

    Unchanged for an empty or non-text value. Raises GridError for text that is no path or not in UTF-8.
    """
    if not isinstance(setting.value, str) or not setting.value:
        return setting
    root = setting.file.parent if isinstance(setting.file, Path) else Path()
    prefix = HUB_PREFIX if setting.value.startswith(HUB_PREFIX) else ""
    try:
        path = str(resolve_path(setting.value.removeprefix(prefix), root))
        if prefix and not Path(path).is_dir():
            return setting  # a repository of the hub
        path = prefix + path
        if not is_utf8(path):
            raise ValueError(f"{quoted_short(path)} is not valid UTF-8 and cannot be recorded; rename it")
        return replace(setting, value=path)
    except ValueError as error:
        raise setting.error(str(error)) from error


def resolve_path(text: str, root: Path = Path()) -> Path:
    """Return the absolute path of `text` relative to `root`, "~" expanded; it need not exist.

    Raises ValueError for text that the operating system rejects as a path.
    """
    try:
        path = (root / Path(text).expanduser()).resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(path)
    except (OSError, ValueError, RuntimeError) as error:
        # a NUL character, ~ with an unknown user, or a name that is too long
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ValueError(f"{quoted_short(text)} is not a valid path: {reason}") from error
    return path


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted paths as nested mappings: {"train.tokens": 1} becomes {"train": {"tokens": 1}}.

    No path may be the beginning of another.
    """
    out: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, last = path.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return out


# --- axes of a file's own ---------------------------------------------------------------------------------------------

AXIS_NAME = re.compile(r"[a-z][a-z0-9_]*")
LEVEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
AXIS_RULE = "a name of lower-case letters, digits and _"
LEVEL_RULE = "letters, digits, _ . + and -"
RESERVED_NAMES = {*CellConfig.model_fields, "sweep", "cell", "slug", "state", "axes", "probe", "metric", "length", "value", "unit", "n"}  # fmt: skip
"""Names that no axis may have: sections of a config, and columns of the view `results`."""
NamedLevels = Mapping[str, Mapping[str, Layer]]
"""Axis -> level -> its settings."""


def named_axes(document: GridDocument, axes: Mapping[str, Any]) -> NamedLevels:
    """Return axis -> level -> its settings, of the custom axes: those whose levels are mappings of settings.

    Built-in axes and dotted paths are left out. Raises GridError for invalid names and settings.
    """
    return {
        name: _levels(document, name, levels)
        for name, levels in axes.items()
        if isinstance(levels, Mapping) and name not in AXES and "." not in name
    }


def read_level_settings(
    document: GridDocument, section: Mapping[str, Any], axis_levels: Mapping[str, Sequence[Any]]
) -> NamedLevels:
    """Return axis -> level text -> additional settings, from the grid's `levels` section; other levels are missing.

    Args:
        document: The grid file, for the lines of errors.
        section: The value of `levels`.
        axis_levels: Axis -> its levels as written.

    Raises:
        GridError: For an axis or level that the grid does not have, and for unknown settings.
    """
    settings_by_level: dict[str, dict[str, Layer]] = {}
    for axis, levels in section.items():
        names = [level_text(axis, level) for level in axis_levels.get(axis, ())]
        if not names:
            raise document.error(("levels", axis), "not an axis of this grid", axis_levels, axis)
        if not isinstance(levels, Mapping):
            raise document.error(("levels", axis), f"must map levels to settings, got {levels!r}")
        settings_by_level[axis] = {}
        for level, sets in levels.items():
            word = level_text(axis, level)
            if word not in names:
                raise document.error(("levels", axis), f"no level {level!r} in this grid", names, word, below=(level,))
            settings_by_level[axis][word] = _layer(document, sets, ("levels", axis, level))
    return settings_by_level


def add_level(layer: Layer, axis: str, setting: Setting, *named: NamedLevels) -> None:
    """Add all settings of an axis level to a layer in place; a level without settings adds none.

    Args:
        layer: The layer.
        axis: Name of a built-in or custom axis, or the path of a setting, whose value is then the level.
        setting: The level, with the line that wrote it.
        named: Exactly two: custom axes, then the additional settings of levels.

    Raises:
        GridError: For an unknown path or level of a built-in axis, and for a path that is set twice.
    """
    word = level_text(axis, setting.value)
    custom_axes, level_settings = named
    if axis not in custom_axes:
        add_setting(layer, axis, setting)
    for source in (custom_axes, level_settings):
        for path, level_setting in source.get(axis, {}).get(word, {}).items():
            add_setting(layer, path, level_setting)


def paths_of_axis(axis: str, named: NamedLevels, level_settings: NamedLevels) -> set[str]:
    """Return the dotted paths that any level of an axis sets, additional level settings included.

    Args:
        axis: A built-in axis, a custom one, or the dotted path of a setting, which sets itself.
        named: Custom axes.
        level_settings: Additional settings of levels.
    """
    overrides = AXES[axis].levels() if axis in AXES else named.get(axis, {"": {axis: None}})
    return {path for levels in (overrides, level_settings.get(axis, {})) for sets in levels.values() for path in sets}


def _levels(document: GridDocument, name: str, levels: Mapping[str, Any]) -> dict[str, Layer]:
    """Return level -> its settings of a custom axis, in the order of the file.

    Raises GridError for an axis name that is not valid or reserved, an invalid level name, no levels, or a wrong
    setting.
    """
    where = ("axes", name)
    if not AXIS_NAME.fullmatch(name):
        raise document.error(where, f"a custom axis needs {AXIS_RULE}, got {name!r}")
    if name in RESERVED_NAMES:
        raise document.error(where, "is a reserved name; rename the axis")
    if not levels:
        raise document.error(where, "has no levels; give at least one, or remove the axis")
    for level in levels:
        if not LEVEL_NAME.fullmatch(level):
            raise document.error((*where, level), f"a level name may contain only {LEVEL_RULE}, got {level!r}")
    return {level: _layer(document, sets, (*where, level)) for level, sets in levels.items()}


def _layer(document: GridDocument, sets: Any, where: KeyPath) -> Layer:
    """Return the settings of one level of a custom axis, or of `levels`, keyed by dotted path.

    {} gives an empty layer. Raises GridError, at key path `where`, if `sets` is no mapping or has an unknown, empty or
    repeated setting.
    """
    if not isinstance(sets, Mapping):
        raise document.error(where, f"must map settings to values ({{}} for none), got {sets!r}")
    layer: Layer = {}
    for path, value, line, written in flatten(sets, document, where):
        add_setting(layer, path, Setting(value, document.path, line, f"{format_key_path(where)}.{written}"))
    return layer
