"""JSON Schema of a grid file, from its models, the config classes and the axis table; editors complete by it."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from ...model.block_parts import fla_catalogue
from ..config import MOVED_PROBE_SETTINGS, CellConfig
from ..data.registry import all_kinds
from ..probes import PROBES
from .grid_file import NUMBER, SCALAR, SWITCH, GridFile, IntervalKeys
from .settings import AXES, AXIS_NAME, COMPUTED, Axis


class _InOrder(GenerateJsonSchema):
    """Schema generator that keeps keys in the order of their declaration."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value


LEVELS = {"type": "array", "minItems": 2, "uniqueItems": True, "items": SCALAR}
"""Schema of a range given as a list of levels."""


def _open_numbers(node: Any) -> Any:
    """Return a copy of the schema with text allowed for numbers and booleans.

    1e9, 1_000 and on/off are text to JSON Schema. The keys default, identity, outside, title and required are removed
    at every depth.
    """
    if isinstance(node, list):
        return [_open_numbers(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _open_numbers(value) for key, value in node.items() if key not in ("default", "identity", "outside", "title", "required")}  # fmt: skip
    if out.get("type") in ("integer", "number"):
        # 1e9 is a float in YAML, also where an integer is expected
        out |= {"type": ["number", "string"], "pattern": NUMBER}
    elif out.get("type") == "boolean":
        out |= {"type": ["boolean", "string"], "pattern": SWITCH}
    return out


def _registered_levels(name: str, axis: Axis) -> dict[str, Any]:
    """Return the schema of an axis's registered levels: an enum of their names, and booleans if one is "off".

    Mixers of an installed library are no members. `name` is not used.
    """
    levels = [level for level in axis.levels() if ":" not in level]
    return {"enum": [*levels, *([True, False] if "off" in levels else [])]}


def _level(name: str, axis: Axis) -> dict[str, Any]:
    """Return the schema of one level; any text is allowed where a plugin may add levels."""
    # a plugin may add levels; the registered ones are listed for completion
    registered = _registered_levels(name, axis)
    return {"anyOf": [registered, {"type": "string"}]} if axis.accepts_plugins else registered


def _closed_without_plugins() -> dict[str, Any]:
    """Return the keywords "if" and "then" that allow only registered levels in grids without the key `plugins`.

    They concern the axes that accept plugins, under `axes` and `set`. A mixer may also be one of an installed library.
    """
    registered = {name: _registered_levels(name, axis) for name, axis in AXES.items() if axis.accepts_plugins}
    library = {"type": "string", "pattern": f"^{fla_catalogue.PREFIX}:"}
    registered["attn_type"] = {"anyOf": [registered["attn_type"], library]}
    lists = {name: {"items": level} for name, level in registered.items()}
    return {
        "if": {"not": {"required": ["plugins"]}},
        "then": {"properties": {"axes": {"properties": lists}, "set": {"properties": registered}}},
    }


def _config() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (section -> schema that a grid may set, definitions that the schemas refer to).

    Computed fields are left out, and former names of probe settings are added. Settings of probes and corpora are
    listed by name where they have any.
    """
    config = _open_numbers(CellConfig.model_json_schema())
    definitions = config.pop("$defs")
    for definition in definitions.values():
        if "properties" in definition:
            # nested settings may also be written as dotted paths
            definition["patternProperties"] = {r"^[a-z_]+\..+$": {}}
    for name in COMPUTED:
        section, _, key = name.rpartition(".")
        if section:
            definitions[f"{section.title()}Config"]["properties"].pop(key)
    probes = {name: _open_numbers(PROBES.load(name).Config.model_json_schema()) for name in PROBES}
    corpora = {name: _open_numbers(kind.Config.model_json_schema()) for name, kind in all_kinds().items()}
    for section, parts in (("EvalConfig", probes), ("DataConfig", corpora)):
        own = {name: schema for name, schema in parts.items() if schema.get("properties")}
        definitions[section]["properties"]["settings"]["properties"] = own
    for former, (probe, field) in MOVED_PROBE_SETTINGS.items():
        note = {"description": f"Former name of settings.{probe}.{field}."}
        definitions["EvalConfig"]["properties"][former] = probes[probe]["properties"][field] | note
    return {name: node for name, node in config["properties"].items() if name not in COMPUTED}, definitions


def grid_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a grid file; bases are grid files without axes.

    It is built anew on each call and includes parts that plugins have registered in this process.
    """
    sections, definitions = _config()
    file = _without(GridFile.model_json_schema(schema_generator=_InOrder), "title", "default")
    own = file.pop("$defs") | {
        "IntervalKeys": _without(IntervalKeys.model_json_schema(schema_generator=_InOrder), "title", "default")
    }
    keys = file["properties"]
    keys["axes"] |= {
        "properties": {
            name: {"description": axis.doc, "type": "array", "minItems": 1, "uniqueItems": True, "items": _level(name, axis)}
            for name, axis in AXES.items()
        },
        "patternProperties": {
            r"^[a-z]+\..+$": {"type": "array", "minItems": 1, "description": "Any dotted config path."},
            f"^(?!(?:{'|'.join(AXES)})$){AXIS_NAME.pattern}$": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"type": "object"},
                "description": "A custom axis: level names mapped to the settings of each level.",
            },
        },
        "additionalProperties": False,
    }  # fmt: skip
    keys["set"] |= {
        "properties": sections | {name: {"description": axis.doc, **_level(name, axis)} for name, axis in AXES.items()},
        "patternProperties": {r"^[a-z]+\..+$": {}},
        "additionalProperties": False,
    }  # fmt: skip
    keys["levels"] |= {"additionalProperties": {"type": "object", "additionalProperties": {"type": "object"}}}
    keys["resources"] = {"$ref": "#/$defs/Resources"}
    for study in ("SearchKeys", "TuneKeys"):
        own[study]["properties"]["ranges"] |= {
            "minProperties": 1,
            "properties": {name: {"description": axis.doc, **LEVELS} for name, axis in AXES.items()},
            "patternProperties": {r"^(model|train)\..+$": {"anyOf": [{"$ref": "#/$defs/IntervalKeys"}, LEVELS]}},
            "additionalProperties": False,
        }
    del own["TuneKeys"]["properties"]["pruner"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "atma-sweep grid",
        **{key: node for key, node in file.items() if key != "description"},
        **_closed_without_plugins(),
        "$defs": definitions | own,
    }


def _without(node: Any, *names: str) -> Any:
    """Return a copy of the schema without the named keywords at any depth.

    Properties and definitions that have one of these names stay.
    """
    if isinstance(node, list):
        return [_without(item, *names) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _without(child, *names) for name, child in value.items()} if key in ("properties", "$defs") else _without(value, *names)
        for key, value in node.items()
        if key not in names
    }  # fmt: skip
