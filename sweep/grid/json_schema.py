"""The JSON Schema of a grid file, made from the config classes and the axis table, so that editors complete it."""

from __future__ import annotations

from typing import Any

from ...results.designs.design_option import METHODS
from ...results.names import NAME, RESERVED, RULE
from ...results.stopping.stopping_rule import FIRST, MOST, MOST_SEEDS, SPENDINGS
from ..config import FORMER, CellConfig
from ..data.registry import every_kind
from ..probes import PROBES
from . import axes, designs, named_levels, search_section, stop_section
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
                r"^[a-z]+\..+$": {"type": "array", "minItems": 1, "description": "Any dotted config path."},
                f"^(?!(?:{'|'.join(axes.AXES)})$){named_levels.NAME.pattern}$": {
                    "type": "object",
                    "minProperties": 1,
                    "additionalProperties": {"type": "object"},
                    "description": "An axis of your own: by level, what it sets.",
                },
            },
            "additionalProperties": False,
        },
        named_levels.KEY: {
            "type": "object",
            "description": "What a level of an axis sets besides: axis, level, settings.",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "object"}},
        },
        "exclude": {
            "type": "array",
            "items": rule,
            "description": "Drops the cells that match all keys of a rule; seed: [3, 4] is a key, too.",
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
        "design": _design(),
        "stop": _stop(),
        "search": _search(),
        "tune": _tune(),
        "set": {**settings, "description": "Settings of every cell, over those of the base."},
        "resources": resources,
        "plugins": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Python files beside the grid that register mixers, memories, position schemes, regularizers, corpora or probes.",
        },
    }


def _design() -> dict[str, Any]:
    told = {
        "fraction": "A share of them, such as 1/4: a regular fraction where there is one that keeps main effects apart, else d-optimal.",
        "runs": "How many, d-optimal; a larger number takes all that a smaller one does, and more.",
        "resolution": "The smallest regular fraction of that resolution: III (main effects apart from each other), IV (and from interactions of two axes), V (and these from each other).",
        "method": "regular: by products of axes with two levels; d-optimal: whichever cells tell most.",
        "model": "What is estimated: main effects, or interactions of two axes too; in either case those that contrasts are about.",
    }
    properties: dict[str, Any] = {name: {"description": words} for name, words in told.items()}
    properties["fraction"] |= {"type": ["string", "number"], "pattern": r"^\s*[0-9.]+(\s*/\s*[0-9]+)?\s*$"}
    properties["runs"] |= {"type": "integer", "minimum": 1}
    properties["resolution"] |= {
        "type": ["string", "integer"],
        "enum": [*designs.RESOLUTIONS, *range(3, len(designs.RESOLUTIONS) + 3)],
    }
    properties["method"] |= {"enum": list(METHODS)}
    properties["model"] |= {"enum": list(designs.MODELS)}
    return {
        "type": "object",
        "description": "Which part of the combinations is launched; seeds and include come on top. Without it, all are.",
        "properties": properties,
        "oneOf": [{"required": [name]} for name in designs.SIZES],
        "additionalProperties": False,
    }


def _stop() -> dict[str, Any]:
    told = {
        "contrast": "An axis of this grid, whose levels are compared.",
        "level": "The level that is held against the reference; needed where the axis has more than two.",
        "reference": "The level that it is held against; by default off, baseline, else the axis's first.",
        "metric": "What is compared: probe.metric, probe.metric@LENGTH or probe.metric@avg; needle@65536 is the probe's main number.",
        "ci": "Enough is an interval that is at most so wide, from end to end, in the unit that tables print: points of a share, nats of a loss.",
        "sure": "Enough is, too, an interval that leaves out zero.",
        "min_seeds": f"Seeds at the first look; by default {FIRST}, or as many as the grid's seeds.",
        "max_seeds": f"Seeds at the last look; by default {MOST}.",
        "wave": "Seeds that are added between two looks.",
        "spending": "How the level of 5% is shared out among the looks: little at first, or about the same at each.",
    }
    properties: dict[str, Any] = {name: {"description": words, **SCALAR} for name, words in told.items()}
    properties["contrast"]["type"] = "string"
    properties["metric"] |= {"type": "string", "pattern": r"^[a-z][a-z0-9_.]*(@([0-9]+|avg))?$"}
    properties["ci"] |= {"type": ["number", "string"], "pattern": NUMBER, "exclusiveMinimum": 0}
    properties["sure"] |= {"type": ["boolean", "string"], "pattern": SWITCH}
    for name, least in (("min_seeds", 2), ("max_seeds", 2), ("wave", 1)):
        properties[name] |= {"type": "integer", "minimum": least, "maximum": MOST_SEEDS}
    properties["spending"] |= {"enum": list(SPENDINGS)}
    properties["within"] = _contrast()["properties"]["within"]
    return {
        "type": "object",
        "description": "Seeds are added to the cells of this contrast until its interval is narrow enough (docs/designs.md).",
        "properties": properties,
        "required": list(stop_section.NEEDED),
        "anyOf": [{"required": ["ci"]}, {"required": ["sure"]}],
        "additionalProperties": False,
    }


def _search() -> dict[str, Any]:
    told = {
        "sampler": "How trials are proposed: tpe (the default), random, cmaes (numbers alone), nsga2 (several objectives).",
        "trials": "How many there are in all; more later go on with the same study.",
        "objective": "The number that is searched for, such as val_loss or needle@65536; several map to minimize or maximize.",
        "ranges": "What varies, by setting of model or train or by axis: {low, high, log, step}, or a list of levels.",
        "pruner": "Ends trials whose validation loss falls behind: asha, median or hyperband; without it all run to their end.",
        "seed": "Of the sampler's random numbers.",
        "startup": "Trials at random before tpe or cmaes begins.",
        "population": "Trials of a generation of cmaes or nsga2.",
    }
    whole = {"type": "integer", "maximum": search_section.MOST_TRIALS}
    number = {"type": ["number", "string"], "pattern": NUMBER}
    interval = {
        "type": "object",
        "properties": {"low": number, "high": number, "step": number, "log": {"type": "boolean"}},
        "required": ["low", "high"],
        "additionalProperties": False,
    }
    levels = {"type": "array", "minItems": 2, "uniqueItems": True, "items": SCALAR}
    properties: dict[str, Any] = {name: {"description": words} for name, words in told.items()}
    properties["sampler"] |= {"enum": list(search_section.SAMPLERS)}
    properties["trials"] |= whole | {"minimum": 1}
    properties["objective"] |= {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "string"}},
            {"type": "object", "minProperties": 1, "additionalProperties": {"enum": list(search_section.DIRECTIONS)}},
        ]
    }
    properties["ranges"] |= {
        "type": "object",
        "minProperties": 1,
        "properties": {name: {"description": axis.doc, **levels} for name, axis in axes.AXES.items()},
        "patternProperties": {r"^(model|train)\..+$": {"anyOf": [interval, levels]}},
        "additionalProperties": False,
    }
    properties["pruner"] |= {"enum": [*search_section.PRUNERS, None]}
    properties["seed"] |= {"type": "integer", "minimum": 0}
    properties["startup"] |= whole | {"minimum": 1}
    properties["population"] |= whole | {"minimum": 2}
    return {
        "type": "object",
        "description": "A study instead of a factorial: each trial is a cell, proposed from the results of those before.",
        "properties": properties,
        "required": ["objective", "ranges"],
        "additionalProperties": False,
    }


def _tune() -> dict[str, Any]:
    search = _search()
    known = {name: node for name, node in search["properties"].items() if name != "pruner"}
    known["trials"] = known["trials"] | {"description": "How many every level gets."}
    known["per"] = {
        "type": "string",
        "description": "The axis of this grid each of whose levels has a study of its own.",
    }
    known["at"] = {
        "type": "object",
        "additionalProperties": SCALAR,
        "description": "Where other axes stand meanwhile; without it where the base has them.",
    }
    return search | {
        "description": "Studies before the factorial, one for each level of an axis; its cells have the best settings of their level.",
        "properties": known,
        "required": ["per", "objective", "ranges"],
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
