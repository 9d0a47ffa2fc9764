"""YAML 1.2 with line numbers: plain values plus the line on which each key stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from .errors import GridError

KeyPath = tuple[str | int, ...]
MOST_BYTES = 2**20
"""Of a file."""
MOST_VALUES = 100_000
"""Of a file, keys, lists and mappings counted too, as written and with every alias put in its place."""


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


class TooManyValues(YAMLError):
    """A file that would make more than MOST_VALUES; stopped at that number, not after it."""

    def __init__(self) -> None:
        super().__init__(f"more than {MOST_VALUES:,} values, aliases put in their places; write a grid with fewer")


class _BoundedComposer(Composer):
    """Stops at MOST_VALUES nodes, so that no file takes long to read."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self._nodes = 0

    def compose_node(self, parent: Any, index: int) -> Any:
        self._nodes += 1
        if self._nodes > MOST_VALUES:
            raise TooManyValues
        return super().compose_node(parent, index)


def reader(kind: str) -> YAML:
    """A YAML reader of ruamel's `kind` that raises TooManyValues rather than compose without end."""
    yaml = YAML(typ=kind, pure=True)
    yaml.Composer = _BoundedComposer
    return yaml


class _Plain:
    """Makes plain values of ruamel's, each alias a copy, and notes where they stand; not more than MOST_VALUES."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._made = 0

    def of(self, node: Any, at: KeyPath = ()) -> Any:
        self._made += 1
        if self._made > MOST_VALUES:
            raise TooManyValues
        if isinstance(node, CommentedMap):
            out: dict[str, Any] = {}
            for key, value in node.items():
                here = (*at, str(key))
                self.lines[here] = node.lc.key(key)[0] + 1
                out[str(key)] = self.of(value, here)
            return out
        if isinstance(node, CommentedSeq):
            items = []
            for index, value in enumerate(node):
                self.lines[(*at, index)] = node.lc.item(index)[0] + 1
                items.append(self.of(value, (*at, index)))
            return items
        return _scalar(node)


def _scalar(node: Any) -> Any:
    if node is None or isinstance(node, bool):
        return node
    # ruamel's scalar classes remember their spelling; a plan needs the plain value
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return str(node)


def value_of(text: str) -> Any:
    """A value of the command line as YAML would read it; the text itself where it is no YAML. Raises TooManyValues."""
    try:
        return _Plain().of(reader("rt").load(text))
    except TooManyValues:
        raise
    except (YAMLError, ValueError):
        return text


def load(path: Path) -> Document:
    """Reads one mapping from `path`.

    Raises GridError when the file cannot be read, is too large, is not YAML, repeats a key, or is not a mapping.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise GridError(path, None, "", f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > MOST_BYTES:
        raise GridError(path, None, "", f"is larger than {MOST_BYTES:,} bytes; a grid file that large is a mistake")
    yaml = reader("rt")
    plain = _Plain()
    yaml.allow_duplicate_keys = False
    try:
        node = yaml.load(text)
        data = plain.of(node)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        key = str(error.problem).split('"')[1] if '"' in str(error.problem) else ""
        raise GridError(path, line, key, "key given twice; keep one of them") from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise GridError(path, line, "", f"not valid YAML: {error.problem or error.context}") from error
    except TooManyValues as error:
        raise GridError(path, None, "", str(error)) from error
    except (YAMLError, ValueError) as error:
        # a ValueError is of Python's own readers: a number of 5,000 digits, a date with a 13th month
        raise GridError(path, None, "", f"not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(node, CommentedMap):
        raise GridError(path, 1, "", "must hold a mapping of keys such as name, extends and axes")
    return Document(path, text, data, plain.lines)
