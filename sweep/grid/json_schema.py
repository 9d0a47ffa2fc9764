"""The JSON Schema of a grid file, made from the config classes and the axis table, so that editors complete it."""

from __future__ import annotations

from typing import Any

from ...results.names import NAME, RESERVED, RULE
from ..config import FORMER, CellConfig
from ..data.registry import every_kind
from ..probes import PROBES
from . import axes
from .grid import shipped
from .settings import COMPUTED

SCALAR = {"type": ["string", "number", "boolean", "null"]}
NUMBER = r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?([eE][-+]?[0-9]+)?$"
SWITCH = "^([Oo][Nn]|[Oo][Ff][Ff]|[Yy][Ee][Ss]|[Nn][Oo]|[Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee])$"


def _open_numbers(node: Any) -> Any:
    """1e9 and 1_000 are numbers to us and text to JSON Schema, and on/off are booleans: allow the text too."""
    if isinstance(node, list):
        return [_open_numbers(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {
        key: _open_numbers(value)
        for key, value in node.items()
        if key not in ("default", "identity", "outside", "title", "required")
    }
    if out.get("type") in ("integer", "number"):
        # 1e9 is a float to YAML even where a whole number is asked
        out |= {"type": ["number", "string"], "pattern": NUMBER}
    elif out.get("type") == "boolean":
        out |= {"type": ["boolean", "string"], "pattern": SWITCH}
    return out


def _settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The config as a tree of optional sections, which may also be written as dotted paths."""
    properties = {name: node for name, node in schema["properties"].items() if name not in COMPUTED}
    for name, axis in axes.AXES.items():
        properties[name] = {"description": axis.doc, **_level(name, axis)}
    return {
        "type": "object",
        "properties": properties,
        "patternProperties": {r"^[a-z]+\..+$": {}},
        "additionalProperties": False,
    }


def _booleans(axis: str) -> list[bool]:
    return [True, False] if "off" in axes.AXES[axis].levels() else []


def _known(name: str, axis: axes.Axis) -> dict[str, Any]:
    return {"enum": [*axis.levels(), *_booleans(name)]}


def _level(name: str, axis: axes.Axis) -> dict[str, Any]:
    # that of a part may be any name, since a plugin may add parts; the known ones are there for completion
    known = _known(name, axis)
    return {"anyOf": [known, {"type": "string"}]} if axis.open else known


def _closed_without_plugins() -> dict[str, Any]:
    """In a grid without plugins only the known levels are right."""
    known = {name: _known(name, axis) for name, axis in axes.AXES.items() if axis.open}
    lists = {name: {"items": level} for name, level in known.items()}
    return {
        "if": {"not": {"required": ["plugins"]}},
        "then": {"properties": {"axes": {"properties": lists}, "set": {"properties": known}}},
    }


def _add_probe_settings(section: dict[str, Any]) -> None:
    """Each probe's own settings, and beside them the names that some of them had before."""
    known = {name: _open_numbers(PROBES.load(name).Config.model_json_schema()) for name in PROBES}
    section["settings"]["properties"] = {name: schema for name, schema in known.items() if schema["properties"]}
    for former, (probe, field) in FORMER.items():
        told = {"description": f"The former name of settings.{probe}.{field}."}
        section[former] = known[probe]["properties"][field] | told


def _add_corpus_settings(section: dict[str, Any]) -> None:
    known = {name: _open_numbers(kind.Config.model_json_schema()) for name, kind in every_kind().items()}
    section["settings"]["properties"] = {name: schema for name, schema in known.items() if schema.get("properties")}


def _levels(name: str, axis: axes.Axis) -> dict[str, Any]:
    items = _level(name, axis)
    return {"description": axis.doc, "type": "array", "minItems": 1, "uniqueItems": True, "items": items}


def _properties(settings: dict[str, Any], resources: dict[str, Any]) -> dict[str, Any]:
    rule = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"anyOf": [SCALAR, {"type": "array", "items": SCALAR}]},
    }
    return {
        "name": {
            "type": "string",
            "pattern": f"^(?!{RESERVED}){NAME.pattern}$",
            "description": f"Name of the sweep in the database: {RULE}; not {RESERVED}..., the paper's numbers.",
        },
        "description": {"type": "string"},
        "extends": {
            "type": "string",
            "description": f"A base: {', '.join(shipped('base'))}, or a file of your own beside the grid.",
        },
        "axes": {
            "type": "object",
            "description": "Factors and their levels; the cells are all combinations, the last axis fastest.",
            "properties": {name: _levels(name, axis) for name, axis in axes.AXES.items()},
            "patternProperties": {
                r"^[a-z]+\..+$": {"type": "array", "minItems": 1, "description": "Any dotted config path."}
            },
            "additionalProperties": False,
        },
        "exclude": {
            "type": "array",
            "items": rule,
            "description": "Drops the cells that match all keys of a rule.",
        },
        "include": {"type": "array", "items": rule, "description": "Adds combinations, after exclude."},
        "seeds": {
            "description": "How many seeds (3 means 0, 1, 2), or which.",
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "integer", "minimum": 0}},
            ],
        },
        "contrasts": {
            "type": "array",
            "items": _contrast(),
            "description": "The differences that the sweep is launched to see: tested and corrected together; all else is exploratory.",
        },
        "set": {**settings, "description": "Settings of every cell, over those of the base."},
        "resources": resources,
        "plugins": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Python files beside the grid that register mixers, memories, position schemes, regularizers, corpora or probes.",
        },
    }


def _contrast() -> dict[str, Any]:
    told = {
        "measure": "What is compared: probe.metric, probe.metric@LENGTH, or probe.metric@avg for the length-weighted average.",
        "axis": "An axis of this grid.",
        "level": "The level that is held against the reference.",
        "reference": "The level that it is held against; by default off, baseline, else the axis's first.",
        "margin": "The difference that would not matter, in the measure's own unit (0.05 of an accuracy is 5 points).",
    }
    properties: dict[str, Any] = {name: {"description": words, **SCALAR} for name, words in told.items()}
    properties["measure"] |= {"type": "string", "pattern": r"^[a-z][a-z0-9_]*\.[^@]+(@([0-9]+|avg))?$"}
    properties["axis"]["type"] = "string"
    properties["margin"] |= {"type": ["number", "string"], "pattern": NUMBER, "exclusiveMinimum": 0}
    properties["within"] = {
        "description": "Axis to level: only cells that stand there.",
        "type": "object",
        "additionalProperties": SCALAR,
    }
    needed = ["measure", "axis", "level"]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def grid_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a grid file; bases are grid files without axes."""
    config = _open_numbers(CellConfig.model_json_schema())
    definitions = config.pop("$defs")
    for definition in definitions.values():
        if "properties" in definition:
            definition["patternProperties"] = {r"^[a-z_]+\..+$": {}}
    for name in COMPUTED:
        section, _, key = name.rpartition(".")
        if section:
            definitions[f"{section.title()}Config"]["properties"].pop(key)
    _add_probe_settings(definitions["EvalConfig"]["properties"])
    _add_corpus_settings(definitions["DataConfig"]["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "atma-sweep grid",
        "type": "object",
        "additionalProperties": False,
        "properties": _properties(_settings(config), definitions["Resources"]),
        **_closed_without_plugins(),
        "$defs": definitions,
    }
