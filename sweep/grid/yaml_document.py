"""YAML 1.2 with line numbers: plain values, and the line of each key.

Merge keys (`<<`) follow YAML 1.1: own keys win over merged ones, earlier mappings of a list over later ones. Only plain
tags (`!!str`, `!!int`, `!!seq` ...) are accepted, so a file cannot construct Python objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ...model.bounds import MAX_INT64
from ...results.names import is_utf8, quoted_short
from ..errors import GridError

KeyPath = tuple[str | int, ...]
MOST_BYTES = 2**20
"""Limit on the size of a file."""
MOST_VALUES = 100_000
"""Limit on the values of a file; keys, lists, mappings and expanded aliases count too."""
MAX_DEPTH = 50
"""Limit on nested lists and mappings, expanded aliases included."""
TOO_DEEP = f"more than {MAX_DEPTH} nested lists and mappings"
CORE = "tag:yaml.org,2002:"
SCALARS = {"str", "int", "float", "bool", "null"}
TEXT_TAGS = {"timestamp", "merge", "value"}
"""Tags that YAML assigns to some plain words, which a grid reads as text."""
Pair = tuple[Node, Node]


@dataclass(frozen=True)
class GridDocument:
    """A grid file: its values as plain dicts and lists, and the line (from 1) of each key or item."""

    path: Path
    text: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]

    def line(self, *keys: str | int) -> int:
        """Return the line (from 1) of a key, else of the nearest enclosing key that has one, else 1."""
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.lines:
                return self.lines[keys[:end]]
        return 1

    def error(
        self, where: KeyPath, problem: str, allowed: Iterable[str] = (), word: str | None = None, *, below: KeyPath = ()
    ) -> GridError:
        """Return (not raise) an error about a key.

        Args:
            where: Key path that the message names.
            problem: Text of the problem.
            allowed: Allowed values.
            word: Word that may be a misspelling of an allowed value.
            below: Keys below `where` whose line is reported instead.
        """
        return GridError(self.path, self.line(*where, *below), format_key_path(where), problem, allowed, word)

    def as_grid_error(self, error: ValidationError | PydanticCustomError, *prefix: str | int) -> GridError:
        """Return a pydantic error as a GridError at its line.

        Args:
            error: A validation error, of which the first problem is used, or an error of `key_error`.
            prefix: Key path at which the validated value stands.
        """
        if isinstance(error, PydanticCustomError):
            where, context = prefix, error.context
        else:
            first = error.errors(include_url=False)[0]
            where, context = (*prefix, *first["loc"]), first.get("ctx")
            if first["type"] in KINDS:
                return self.error(where, f"{KINDS[first['type']]}, got {first['input']!r}")
        assert context is not None
        return self.error((*where, *context["where"]), context["problem"], context["allowed"], context["word"])


KINDS = {
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "string_type": "must be text",
    "bool_type": "must be true or false",
}
"""Types of pydantic errors -> wording; all other errors are created by `key_error`."""


def format_key_path(where: KeyPath) -> str:
    """Return a key path as text, such as contrasts[0].within.memory."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")


def key_error(
    problem: str, *where: str | int, allowed: Iterable[str] = (), word: str | None = None
) -> PydanticCustomError:
    """Return (not raise) the error that a validator raises; `as_grid_error` turns it into a GridError.

    Args:
        problem: Text of the problem.
        where: Keys below the validated value.
        allowed: Allowed values.
        word: Word that may be a misspelling of an allowed value.
    """
    context = {"problem": problem, "where": where, "allowed": list(allowed), "word": word}
    return PydanticCustomError("grid", "{problem}", context)


class ValueLimitExceeded(YAMLError):
    """Raised as soon as a file exceeds 100,000 values (MOST_VALUES)."""

    def __init__(self) -> None:
        super().__init__(f"more than {MOST_VALUES:,} values after expanding aliases; write a smaller grid")


class _UnsupportedYaml(YAMLError):
    """Raised for valid YAML that a grid may not contain; holds its line and key."""

    def __init__(self, problem: str, node: Any, key: str = "") -> None:
        super().__init__(problem)
        self.line, self.key = node.start_mark.line + 1, key


class _BoundedComposer(Composer):
    """YAML composer that stops at 100,000 nodes (MOST_VALUES) and at depth 50 (MAX_DEPTH).

    This bounds the reading time.
    """

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self._nodes = self._inside = 0

    def compose_node(self, parent: Any, index: int) -> Any:
        """Return the next node, as the base class does.

        Raises ValueLimitExceeded beyond 100,000 nodes, and _UnsupportedYaml beyond depth 50.
        """
        self._nodes += 1
        if self._nodes > MOST_VALUES:
            raise ValueLimitExceeded
        if self._inside > MAX_DEPTH:
            raise _UnsupportedYaml(TOO_DEEP, self.parser.peek_event())
        self._inside += 1
        node = super().compose_node(parent, index)
        self._inside -= 1
        return node


class _PlainLoader:
    """Reader of YAML into plain values; each alias becomes a copy, and `lines` receives the line of each key path."""

    def __init__(self) -> None:
        """Start with no lines and no values; a reader reads a single document."""
        self.lines: dict[KeyPath, int] = {}
        self._yaml = YAML(typ="safe", pure=True)
        self._yaml.Composer = _BoundedComposer
        self._value_count = 0
        self._merged: dict[int, list[Pair]] = {}

    def read(self, text: str) -> Any:
        """Return the value of a document, None for an empty one. Raises YAMLError."""
        node = self._yaml.compose(text)
        return None if node is None else self._value(node, ())

    def _value(self, node: Node, at: KeyPath) -> Any:
        """Return the plain value of a node at key path `at`, and record the lines of its keys and items.

        Keys become text. Raises YAMLError for anything that a grid may not contain, and for too many or too deep
        values.
        """
        self._count(1)
        if len(at) > MAX_DEPTH:
            raise _UnsupportedYaml(TOO_DEEP, node)
        if isinstance(node, ScalarNode):
            return self._scalar(node, at)
        if isinstance(node, SequenceNode):
            _check_tag(node, {"seq"})
            items = []
            for index, value in enumerate(node.value):
                self.lines[(*at, index)] = value.start_mark.line + 1
                items.append(self._value(value, (*at, index)))
            return items
        assert isinstance(node, MappingNode)
        _check_tag(node, {"map"})
        out: dict[str, Any] = {}
        for key, value in self._pairs(node):
            key_path = (*at, key.value)
            self.lines[key_path] = key.start_mark.line + 1
            out[key.value] = self._value(value, key_path)
        return out

    def _count(self, values: int) -> None:
        """Add to the number of values. Raises ValueLimitExceeded beyond 100,000 (MOST_VALUES)."""
        self._value_count += values
        if self._value_count > MOST_VALUES:
            raise ValueLimitExceeded

    def _pairs(self, node: MappingNode, inside: tuple[int, ...] = ()) -> list[Pair]:
        """Return the (key, value) nodes of a mapping, with those of `<<` inserted at its position; cached by node.

        Own keys win over merged ones, earlier merged mappings over later ones.

        Args:
            node: The mapping.
            inside: Ids of the mappings that are being merged, to detect cycles.

        Raises:
            _UnsupportedYaml: For a repeated key, a mapping that merges itself, and merges that nest too deeply.
            ValueLimitExceeded: For too many merged keys.
        """
        if id(node) in self._merged:
            return self._merged[id(node)]
        if len(inside) > MAX_DEPTH:
            raise _UnsupportedYaml(TOO_DEEP, node)
        own: set[str] = set()
        for key, _ in node.value:
            name = _key(key)
            if name in own:
                raise _UnsupportedYaml("key given twice; keep one of them", key, name)
            own.add(name)
        merged: list[Pair] = []
        inside = (*inside, id(node))
        for key, value in node.value:
            if not _is_merge(key):
                merged.append((key, value))
                continue
            for source in _sources(value):
                if id(source) in inside:
                    raise _UnsupportedYaml("merges itself; name another mapping", key, "<<")
                pairs = self._pairs(source, inside)
                self._count(len(pairs))
                new = [pair for pair in pairs if pair[0].value not in own]
                own.update(pair[0].value for pair in new)
                merged += new
        self._merged[id(node)] = merged
        return merged

    def _scalar(self, node: ScalarNode, at: KeyPath) -> Any:
        """Return the value of a scalar node at key path `at`: text, int, float, bool or None.

        Dates stay text. Raises _UnsupportedYaml for unknown tags, half surrogate pairs, unreadable numbers, and
        integers beyond 64 bits.
        """
        word = _check_tag(node, SCALARS | TEXT_TAGS)
        key = ".".join(part for part in at if isinstance(part, str))
        _check_characters(node, key)
        if word in TEXT_TAGS:
            return node.value
        try:
            value = self._yaml.constructor.construct_object(node)
        except ValueError as error:
            # raised by Python's parsers, such as for a number of 5,000 digits or !!int of a word
            raise _UnsupportedYaml(f"not valid YAML: {str(error).splitlines()[0]}", node) from error
        if isinstance(value, int) and abs(value) > MAX_INT64:
            raise _UnsupportedYaml(
                f"the whole number {quoted_short(node.value)} is out of range (limit {MAX_INT64}); quote it if it is text",
                node,
                key,
            )
        return value


def _check_tag(node: Node, allowed: set[str]) -> str:
    """Return the node's tag without its prefix, such as "str". Raises _UnsupportedYaml if it is not in `allowed`."""
    tag = str(node.tag)
    word = tag.removeprefix(CORE)
    if word == tag or word not in allowed:
        tag_text = "!!" + word if tag.startswith(CORE) else tag
        raise _UnsupportedYaml(f"the tag {quoted_short(tag_text)} is not supported here; remove it", node)
    return word


def _check_characters(node: ScalarNode, key: str = "") -> None:
    """Raise _UnsupportedYaml for half a surrogate pair.

    YAML can escape it, but no file, database or terminal can hold it.
    """
    if not is_utf8(node.value):
        half = next(letter for letter in node.value if not is_utf8(letter))
        raise _UnsupportedYaml(
            f"\\u{ord(half):04x} is half of a surrogate pair, which is not a character; remove it", node, key
        )


def _is_merge(key: Node) -> bool:
    return str(key.tag) == CORE + "merge"


def _key(node: Node) -> str:
    """Return the text of a mapping's key as written, also for numbers and booleans.

    Raises _UnsupportedYaml for a key that is not a scalar, or has an unknown tag (other than str, int, float, bool,
    null, timestamp, merge and value) or half a surrogate pair.
    """
    if not isinstance(node, ScalarNode):
        raise _UnsupportedYaml("a key must be a word, not a list or a mapping", node)
    _check_characters(node)
    _check_tag(node, SCALARS | TEXT_TAGS)
    return str(node.value)


def _sources(value: Node) -> Iterator[MappingNode]:
    """Yield the mappings that a merge key names. Raises _UnsupportedYaml for anything else."""
    for node in value.value if isinstance(value, SequenceNode) else [value]:
        if not isinstance(node, MappingNode):
            raise _UnsupportedYaml("must be a mapping to merge, or a list of them", node, "<<")
        yield node


def value_of(text: str) -> Any:
    """Return a text as YAML reads it (None if empty), or the text itself if it is not valid YAML for a grid.

    Raises ValueLimitExceeded for a value with too many parts.
    """
    try:
        return _PlainLoader().read(text)
    except ValueLimitExceeded:
        raise
    except YAMLError:
        return text


def load(path: Path) -> GridDocument:
    """Read a grid file in UTF-8, which must hold one mapping.

    Raises:
        GridError: For a file that cannot be read, has more than 2^20 characters, is not valid YAML, repeats a key, or
            is not a mapping.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise GridError(path, None, "", f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > MOST_BYTES:
        raise GridError(path, None, "", f"is larger than {MOST_BYTES:,} bytes, the limit for a grid file")
    plain = _PlainLoader()
    try:
        data = plain.read(text)
    except _UnsupportedYaml as error:
        raise GridError(path, error.line, error.key, str(error)) from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise GridError(path, line, "", f"not valid YAML: {error.problem or error.context}") from error
    except ValueLimitExceeded as error:
        raise GridError(path, None, "", str(error)) from error
    except YAMLError as error:
        raise GridError(path, None, "", f"not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, dict):
        raise GridError(path, 1, "", "must hold a mapping of keys such as name, extends and axes")
    return GridDocument(path, text, data, plain.lines)
