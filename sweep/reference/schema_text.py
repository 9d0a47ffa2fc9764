"""Nodes of a JSON Schema as text for people: the values that a key may have, and tables of keys."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...model.bounds import MAX_FLOAT

TYPE_NAMES = {"integer": "integer", "number": "number", "boolean": "on, off", "string": "text", "null": "null", "object": "mapping"}  # fmt: skip
LIMITS = {"minimum": "≥", "ge": "≥", "exclusiveMinimum": ">", "gt": ">", "maximum": "≤", "le": "≤", "exclusiveMaximum": "<", "lt": "<"}  # fmt: skip
"""Keyword of a limit -> its sign. Pydantic leaves ge, gt, le and lt as they are where it knows no keyword for them."""


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with a final newline.

    `|` and `<` in entries are escaped, line breaks become spaces, and pages that they name by path become links.
    """
    lines = [headings, ["---"] * len(headings)]
    for row in rows:
        texts = (" ".join(entry.split()).replace("|", "\\|").replace("<", "&lt;") for entry in row)
        lines.append([link_pages(text) for text in texts])
    return "".join("|" + "".join(f" {text} |" if text else " |" for text in line) + "\n" for line in lines)


def link_pages(text: str) -> str:
    """Return the text with a link for each path of a page, such as docs/explanation/security.md, from docs/reference."""
    return re.sub(r"\bdocs/((?:[\w-]+/)*)([\w-]+\.md)", r"[\2](../\1\2)", text)


def code(value: Any) -> str:
    """Return a value as YAML would have it, as Markdown code."""
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return f"`{text if isinstance(text, str) and text else json.dumps(text)}`"


def resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition that a node refers to, overridden by the node's own keywords; the node without a reference."""
    reference = node.get("$ref")
    return {**definitions[reference.rpartition("/")[2]], **node} if reference else node


def values_text(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the values that a node allows, such as "integer ≥ 1, ≤ 1,000 or null"; empty where all are allowed."""
    node = resolve(node, definitions)
    if "const" in node:
        return code(node["const"])
    if "enum" in node:
        return ", ".join(dict.fromkeys(map(code, node["enum"])))
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(values_text(option, definitions) for option in node["anyOf"]))
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if len(kinds) > 1 and "pattern" in node:
        # numbers and switches may be written as text
        kinds = [kind for kind in kinds if kind != "string"]
    items = values_text(node["items"], definitions) if "items" in node else ""
    items = re.sub(r"^(integer|number|text|mapping)\b", r"\1s", items) or "values"
    names = [f"list of {items}" if kind == "array" else TYPE_NAMES[kind] for kind in kinds]
    limits = [
        f"{sign} {_number_text(node[keyword])}"
        for keyword, sign in LIMITS.items()
        if abs(node.get(keyword, math.inf)) < MAX_FLOAT
    ]
    return f"{' or '.join(names)} {', '.join(limits)}".strip()


def _number_text(number: float) -> str:
    """Return a limit in digits, or as a power of 2 or 10 from a million on."""
    for base in (10, 2):
        if number >= 1e6 and base ** (exponent := round(math.log(number, base))) == number:
            return f"{base}^{exponent}"
    return f"{number:,}"
