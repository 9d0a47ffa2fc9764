"""What may come in from a stranger's file: of every table every column, with its type, range, length and shape.

A bundle's rows are checked by this schema as a whole before the first of them is written. Rows are checked many at a
time, column by column, since a sweep has millions of points of curves; only where something is wrong is it looked for
value by value, so that the message can name the row and the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, get_args

from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, Integer

from ..failure_classes import FAILURES
from ..store.records import AttemptState, Phase
from ..store.records import Kind as AttemptKind
from ..store.schema import Base, UtcTime

RowDict = dict[str, Any]
Kind = Literal["whole", "real", "flag", "time", "text", "json", "tree"]

T = Base.metadata.tables
SWEEP_COLUMNS = ("name", "created_at", "launched_at", "read_only")
"""The rest says who runs it, which is nobody's business elsewhere."""
EXCLUDED_COLUMNS = {
    "cell": ("note",), "revision": ("id", "sweep_id"), "revision_cell": ("revision_id",),
    "attempt": ("imported", "pid_space"), "measurement": ("id",), "event": ("id", "sweep_id"),
}  # fmt: skip
ATTEMPT_TABLES = ("provenance", "measurement", "example", "curve_point")
BUNDLE_TABLES = ("sweep", "revision", "cell", "revision_cell", "attempt", *ATTEMPT_TABLES, "event")

KIB, MIB = 2**10, 2**20
INT, BIG = 2**31 - 1, 2**63 - 1
"""The largest numbers of the columns Integer and BigInteger."""
REAL = 1.7976931348623157e308
NODES, DEPTH = 20_000, 24
"""How many values a JSON column may hold, and how deep."""
CELL_ID = r"[0-9a-f]{12}"
TIME = re.compile(r"(?:19[7-9]\d|20\d\d|21\d\d)-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
"""1970 to 2199: arithmetic with such a time never leaves what a datetime can hold."""


def is_storable_text(value: Any, longest: int | None) -> bool:
    """Whether it is text that every database takes, of at most that many letters (None: any)."""
    if not isinstance(value, str) or (longest is not None and len(value) > longest):
        return False
    # no database takes a lone surrogate, and PostgreSQL no NUL
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


# --- fields -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FieldRule:
    """One column: what its values have to be, and how a message says so."""

    kind: Kind
    null: bool = False
    low: float | None = None
    high: float | None = None
    longest: int = 0
    """Letters of a text."""
    pattern: re.Pattern[str] | None = None
    lines: bool = False
    """Whether a text may have line breaks and other letters that are not printed."""
    choices: tuple[str, ...] = ()
    shape: Callable[[Mapping[str, Any]], str | None] | None = None
    """Of a JSON object: what is wrong with it, None when nothing is."""
    default: Any = None
    """What rows of an older release, which lack the column, have there."""

    def problem(self, value: Any) -> str | None:
        """What the value must be and is not; None when it is in order."""
        if value is None:
            return None if self.null else "must not be empty"
        return _CHECKS[self.kind](self, value)

    def wrong_at(self, values: Sequence[Any]) -> int | None:
        """The place of the first value that is not in order; None when all are."""
        if self._surely(values):
            return None
        return next((at for at, value in enumerate(values) if self.problem(value) is not None), None)

    def _surely(self, values: Sequence[Any]) -> bool:
        """Whether all are in order, as far as that can be told at once."""
        kinds = set(map(type, values))
        if type(None) in kinds:
            if not self.null:
                return False
            kinds.discard(type(None))
            values = [value for value in values if value is not None]
        if not kinds:
            return True
        if self.kind == "whole" and kinds == {int}:
            return bool(self.low <= min(values) and max(values) <= self.high)
        if self.kind == "real" and kinds <= {int, float}:
            low, high = -REAL if self.low is None else self.low, REAL if self.high is None else self.high
            return bool(low <= min(values) and max(values) <= high)
        if self.kind == "flag":
            return kinds == {bool}
        if self.kind in ("text", "time") and kinds == {str}:
            # few of them differ
            return all(self.problem(value) is None for value in set(values))
        return False


def _whole(field: FieldRule, value: Any) -> str | None:
    if type(value) is not int or not field.low <= value <= field.high:  # type: ignore[operator]
        return f"must be a whole number from {field.low} to {field.high}"
    return None


def _real(field: FieldRule, value: Any) -> str | None:
    low, high = -REAL if field.low is None else field.low, REAL if field.high is None else field.high
    # a comparison of exact numbers: an int of 400 digits is no float
    if type(value) not in (int, float) or not low <= value <= high:
        return "must be a finite number" + (f" of {low:g} or more" if field.low is not None else "")
    return None


def _flag(field: FieldRule, value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _time(field: FieldRule, value: Any) -> str | None:
    good = isinstance(value, str) and TIME.fullmatch(value) is not None
    if good:
        try:
            datetime.fromisoformat(value)
        except ValueError:
            good = False
    return None if good else "must be a time from 1970 to 2199, such as 2026-01-02T03:04:05.678Z"


def _text(field: FieldRule, value: Any) -> str | None:
    if field.choices:
        return None if value in field.choices else f"must be one of {', '.join(field.choices)}"
    if not is_storable_text(value, field.longest):
        return f"must be text of at most {field.longest} letters that every database takes"
    if not field.lines and not value.isprintable():
        return "must be text of one line, without control characters"
    if field.pattern is not None and not field.pattern.fullmatch(value):
        return f"must match {field.pattern.pattern}"
    return None


def _json(field: FieldRule, value: Any) -> str | None:
    if not isinstance(value, dict):
        return "must be a JSON object"
    return _tree(value) or (field.shape(value) if field.shape is not None else None)


def _list_or_object(field: FieldRule, value: Any) -> str | None:
    return _tree(value) if isinstance(value, list | dict) else "must be a JSON list or object"


_CHECKS: dict[Kind, Callable[[FieldRule, Any], str | None]] = {
    "whole": _whole, "real": _real, "flag": _flag, "time": _time, "text": _text, "json": _json,
    "tree": _list_or_object,
}  # fmt: skip


def _tree(value: Any) -> str | None:
    """What is wrong inside a JSON value, wherever it is; no recursion, since a stranger chose the depth."""
    left, seen = [(value, 1)], 0
    while left:
        one, depth = left.pop()
        seen += 1
        if seen + len(left) > NODES or depth > DEPTH:
            return f"must hold at most {NODES} values, at most {DEPTH} deep"
        if isinstance(one, str) and not is_storable_text(one, None):
            return "holds text that no database takes"
        if isinstance(one, int) and not -BIG <= one <= BIG:
            return "holds a number of more than 64 bits"
        if isinstance(one, float) and not math.isfinite(one):
            return "holds a number that is not finite"
        if isinstance(one, dict):
            if not all(is_storable_text(name, 1000) for name in one):
                return "holds a name that no database takes"
            left += [(item, depth + 1) for item in one.values()]
        elif isinstance(one, list):
            left += [(item, depth + 1) for item in one]
    return None


# --- shapes of JSON columns -------------------------------------------------------------------------------------------


def _words(value: Mapping[str, Any]) -> str | None:
    """Names and texts, nothing else."""
    good = all(isinstance(text, str) and len(text) <= 10_000 for text in value.values())
    return None if good else "must hold texts alone"


def _options(value: Mapping[str, Any]) -> str | None:
    asked = value.get("requested", [])
    if not isinstance(asked, list) or any(_pair(pair) for pair in asked):
        return "must have under `requested` pairs of a probe and a context length"
    return None if isinstance(value.get("set", {}), dict) else "must have under `set` an object"


def _pair(pair: Any) -> bool:
    """Whether it is no pair of probe and length."""
    if not isinstance(pair, list) or len(pair) != 2:
        return True
    return PROBE.problem(pair[0]) is not None or LENGTH.problem(pair[1]) is not None


def _config(value: Mapping[str, Any]) -> str | None:
    plugins = value.get("plugins", [])
    listed: list[Any] = plugins if isinstance(plugins, list) else [None]
    for plugin in listed:
        texts = isinstance(plugin, dict) and set(plugin) == {"path", "sha256"}
        if not texts or not all(isinstance(text, str) for text in plugin.values()):
            return "must have under `plugins` objects with a path and a sha256"
        if not re.fullmatch("[0-9a-f]{64}", plugin["sha256"]):
            return "must have SHA-256 hashes of plugins"
    return None


# --- the schema: what a column's type says, and the rules beyond it ------------------------------------------------------


def by_type(column: Column[Any]) -> FieldRule:
    """Return the rule that follows from a column's type alone."""
    kind, null = column.type, bool(column.nullable)
    if isinstance(kind, Boolean):
        return FieldRule(kind="flag", null=null, default=False)
    if isinstance(kind, UtcTime):
        return FieldRule(kind="time", null=null)
    if isinstance(kind, JSON):
        return FieldRule(kind="json", null=null)
    if isinstance(kind, Integer):
        top = BIG if isinstance(kind, BigInteger) else INT
        return FieldRule(kind="whole", low=-top, high=top, null=null, default=0)
    if isinstance(kind, Double):
        return FieldRule(kind="real", null=null)
    return FieldRule(kind="text", longest=getattr(kind, "length", None) or 64 * KIB, lines=True, null=null)


def _line(longest: int, pattern: str | None = None) -> dict[str, Any]:
    """The rule of a text of one line."""
    return {"longest": longest, "pattern": re.compile(pattern) if pattern else None, "lines": False}


def _prose(longest: int) -> dict[str, Any]:
    """The rule of a text that may have line breaks."""
    return {"longest": longest}


def _choice(*choices: str) -> dict[str, Any]:
    """The rule of a text that is one of these words."""
    return {"choices": choices, "longest": 0, "lines": False}


RULES: Mapping[str, Mapping[str, Any]] = {
    "name": _line(200, r".*\S.*"), "grid_text": _prose(MIB), "grid_file": _prose(4 * KIB), "options": {"shape": _options},
    "git_commit": _line(100), "slug": _line(400, r"[A-Za-z0-9_].*"), "config": {"shape": _config}, "axes": {"shape": _words},
    **dict.fromkeys(("attn_type", "reg_mode", "distractor", "memory", "window"), _line(200)),
    "cell.id": _line(12, CELL_ID), "cell_id": _line(12, CELL_ID), "number": {"low": 1}, "attempt.id": {"low": 1},
    "attempt_id": {"low": 1}, "parent_id": {"low": 1}, "attempt.kind": _choice(*get_args(AttemptKind)), "state": _choice(*get_args(AttemptState)),
    "owner": _line(400), "host": _line(400), "attempt.tokens_per_s": {"low": 0.0}, "phase": _choice(*get_args(Phase)),
    "cause": _prose(256 * KIB), "traceback": _prose(MIB // 2), "exit_code": {"low": -INT},
    # a number, and another behind it where folders were in the way of an import
    "run_dir": _line(100, CELL_ID + r"/[1-9]\d{0,8}(?:-[1-9]\d{0,8}){0,4}"), "checkpoint": _prose(4 * KIB),
    "weights": _prose(4 * KIB), "failure": _choice(*FAILURES), "probe": _line(100, r".*\S.*"), "metric": _line(200, r".*\S.*"),
    "unit": _line(100), "reason": _prose(64 * KIB), "seconds": {"low": 0.0}, "source": _line(64, r"[0-9a-f]{64}"),
    "event.kind": _line(100, r"[A-Za-z][A-Za-z0-9_ .-]*"), "message": _prose(256 * KIB), "packages": {"shape": _words},
    "python": _line(200), "platform": _line(1000), "device": _line(200), "gpu_name": _line(400), "driver": _line(200),
    "dtype": _line(200), "kernels": {"shape": _words}, "tokenizer": _line(1000), "corpus": _line(4000),
    "corpus_fingerprint": _line(200), "gpu_uuid": _line(200),
}  # fmt: skip
"""By column, or by table and column: what its values have to be beyond its type. A column without a rule has that of its type;
whole numbers are 0 or more."""


def _field(table: str, column: Column[Any]) -> FieldRule:
    """Return the rule of a bundle's column: its type, and what RULES adds."""
    field, default = by_type(column), None
    if field.kind == "whole":
        field, default = replace(field, low=0), None if column.server_default is None else 0
    elif field.kind == "flag" and not field.null:
        default = False
    rule = RULES.get(f"{table}.{column.name}", RULES.get(column.name, {}))
    return replace(field, default=default, **rule)


def bundle_columns(name: str) -> list[Column[Any]]:
    """The columns of a table that a bundle holds."""
    if name == "sweep":
        return [T[name].c[column] for column in SWEEP_COLUMNS]
    return [column for column in T[name].columns if column.name not in EXCLUDED_COLUMNS.get(name, ())]


FIELD_RULES: dict[str, dict[str, FieldRule]] = {
    name: {
        **({"sweep": FieldRule(kind="flag")} if name == "event" else {}),
        **({"revision": FieldRule(kind="whole", low=1, high=INT)} if name == "revision_cell" else {}),
        **{column.name: _field(name, column) for column in bundle_columns(name)},
    }
    for name in BUNDLE_TABLES
}
"""By member: the rules of its rows in the order of its columns."""
PROBE, LENGTH = FIELD_RULES["measurement"]["probe"], FIELD_RULES["measurement"]["length"]

SORTED_BY: dict[str, tuple[str, ...]] = {
    "provenance": ("attempt_id",),
    "measurement": ("attempt_id", "probe", "metric", "length"),
    "example": ("attempt_id", "probe", "metric", "length", "item", "position"),
    "curve_point": ("attempt_id", "step"),
}
"""Tables whose rows rise by these columns, as they are written, so that none can be there twice."""

MAX_LINE_BYTES: Mapping[str, int] = {
    "sweep": 16 * KIB, "revision": 8 * MIB, "cell": MIB, "revision_cell": 256 * KIB, "attempt": 4 * MIB,
    "provenance": 4 * MIB, "measurement": 512 * KIB, "example": 512 * KIB, "curve_point": 4 * KIB, "event": 2 * MIB,
}  # fmt: skip
"""Bytes of the longest line of each member."""


# --- tables -----------------------------------------------------------------------------------------------------------


class InvalidRow(ValueError):
    """A row that cannot come in. `at` is its place among those that were checked."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(why)
        self.at = at


class RowValidator:
    """The rows of one member, checked."""

    def __init__(self, name: str, *, complete: bool) -> None:
        """`complete`: the bundle is of this release, so that no column may be missing."""
        self.name, self.fields = name, FIELD_RULES[name]
        self.names = self.fields.keys()
        columns = {column.name: column for column in bundle_columns(name)}
        later = {word for word, column in columns.items() if column.nullable or column.server_default is not None}
        self.needed = self.names if complete else self.names - later
        self._last: tuple[Any, ...] | None = None

    def checked(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """The columns of these rows, those of an older release completed. Raises Misfit."""
        for at, row in enumerate(rows):
            if not isinstance(row, dict):
                raise InvalidRow(at, "it is no JSON object")
            if row.keys() != self.names and not self.needed <= row.keys() <= self.names:
                odd = sorted(row.keys() ^ self.names)
                raise InvalidRow(at, f"its fields are not those of {self.name}: {', '.join(map(repr, odd))[:200]}")
        columns = {}
        for word, field in self.fields.items():
            values = [row.get(word, field.default) for row in rows] if self.needed != self.names else None
            columns[word] = values if values is not None else [row[word] for row in rows]
            odd_one = field.wrong_at(columns[word])
            if odd_one is not None:
                value = columns[word][odd_one]
                raise InvalidRow(odd_one, f"{word} is {quoted_value(value)}; it {field.problem(value)}")
            if field.kind == "real" and int in set(map(type, columns[word])):
                columns[word] = [None if value is None else float(value) for value in columns[word]]
        self._related(columns)
        return columns

    def _related(self, columns: Mapping[str, list[Any]]) -> None:
        """What the fields of one row say of each other, and a row of the one before it."""
        if self.name == "measurement":
            for at, (value, reason) in enumerate(zip(columns["value"], columns["reason"], strict=True)):
                if value is None and not reason:
                    raise InvalidRow(at, "reason is empty, and so is value; one of them must be there")
        if self.name == "event":
            for at, (kind, message) in enumerate(zip(columns["kind"], columns["message"], strict=True)):
                if kind == "code" and not re.fullmatch(CELL_ID, message):
                    raise InvalidRow(at, f"message is {quoted_value(message)}; it must be a fingerprint of code")
        if self.name in SORTED_BY:
            keys: Iterable[tuple[Any, ...]] = list(zip(*(columns[word] for word in SORTED_BY[self.name]), strict=True))
            before = [self._last] if self._last is not None else []
            risen = [*before, *keys]
            for at, (one, other) in enumerate(pairwise(risen)):
                if not one < other:
                    raise InvalidRow(at + 1 - len(before), f"its {', '.join(SORTED_BY[self.name])} do not rise")
            self._last = risen[-1] if risen else self._last


def quoted_value(value: Any) -> str:
    """A value of a stranger in a message: short, on one line, with nothing that a terminal would obey."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return ascii(value[:60]) if isinstance(value, str) else str(value)[:60]
