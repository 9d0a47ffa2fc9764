"""YAML 1.2 with line numbers: plain values plus the line on which each key stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from .errors import GridError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """One file: its values as plain dicts and lists, and where each key or item stands (1-based lines)."""

    path: Path
    text: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]

    def line(self, *keys: str | int) -> int:
        """The line of the key, or of the nearest enclosing one."""
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.lines:
                return self.lines[keys[:end]]
        return 1


def _plain(node: Any, at: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, CommentedMap):
        out: dict[str, Any] = {}
        for key, value in node.items():
            here = (*at, str(key))
            lines[here] = node.lc.key(key)[0] + 1
            out[str(key)] = _plain(value, here, lines)
        return out
    if isinstance(node, CommentedSeq):
        items = []
        for index, value in enumerate(node):
            lines[(*at, index)] = node.lc.item(index)[0] + 1
            items.append(_plain(value, (*at, index), lines))
        return items
    if node is None or isinstance(node, bool):
        return node
    # ruamel's scalar classes remember their spelling; a plan needs the plain value
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return str(node)


def load(path: Path) -> Document:
    """Reads one mapping from `path`.

    Raises GridError when the file cannot be read, is not YAML, repeats a key, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GridError(path, None, "", f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    yaml = YAML(typ="rt", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        node = yaml.load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        key = str(error.problem).split('"')[1] if '"' in str(error.problem) else ""
        raise GridError(path, line, key, "key given twice; keep one of them") from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise GridError(path, line, "", f"not valid YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise GridError(path, None, "", f"not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(node, CommentedMap):
        raise GridError(path, 1, "", "must hold a mapping of keys such as name, extends and axes")
    lines: dict[KeyPath, int] = {}
    return Document(path, text, _plain(node, (), lines), lines)
