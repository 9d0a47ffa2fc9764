"""Validation schema for the rows of an untrusted bundle: type, range, length and structure of every column.

All rows of a bundle are validated before the first of them is written. Rows are validated in batches, column by column,
since a sweep has millions of curve points. Only a batch with an invalid value is searched value by value, so that the
message can name the row and the field.
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
from ..store.records import AttemptKind, AttemptState, Phase
from ..store.schema import Base, UtcTime

RowDict = dict[str, Any]
FieldKind = Literal["whole", "real", "flag", "time", "text", "json", "tree"]

TABLES = Base.metadata.tables
SWEEP_COLUMNS = ("name", "created_at", "launched_at", "read_only")
"""Columns of `sweep` in a bundle. The others describe the lease on the exporting machine."""
EXCLUDED_COLUMNS = {
    "cell": ("note",), "revision": ("id", "sweep_id"), "revision_cell": ("revision_id",),
    "attempt": ("imported", "pid_space"), "measurement": ("id",), "event": ("id", "sweep_id"),
}  # fmt: skip
ATTEMPT_TABLES = ("provenance", "measurement", "example", "curve_point")
BUNDLE_TABLES = ("sweep", "revision", "cell", "revision_cell", "attempt", *ATTEMPT_TABLES, "event")

KIB, MIB = 2**10, 2**20
MAX_INTEGER, MAX_BIG_INTEGER = 2**31 - 1, 2**63 - 1
"""Largest values of the column types Integer and BigInteger."""
MAX_FLOAT = 1.7976931348623157e308
MAX_NODES, MAX_DEPTH = 20_000, 24
"""Limits of the number of values in a JSON column and of its nesting depth."""
CELL_ID = r"[0-9a-f]{12}"
TIME = re.compile(r"(?:19[7-9]\d|20\d\d|21\d\d)-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
"""Times from 1970 to 2199: arithmetic with them stays in the range of a datetime."""


def is_storable_text(value: Any, max_chars: int | None) -> bool:
    """Return True for text that every database can store, of at most `max_chars` characters (None: any).

    Text with NUL or a lone surrogate is not storable. False for values that are not str.
    """
    if not isinstance(value, str) or (max_chars is not None and len(value) > max_chars):
        return False
    # no database stores a lone surrogate, and PostgreSQL no NUL
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


# --- fields -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FieldRule:
    """Rule for the values of one column.

    `kind` decides the type: whole (int), real (finite int or float), flag (bool), time (text in the format of TIME),
    text, json (object), tree (list or object). `low` and `high` are inclusive; `null` permits None.
    """

    kind: FieldKind
    null: bool = False
    low: float | None = None
    high: float | None = None
    longest: int = 0
    """Maximum number of characters of a text."""
    pattern: re.Pattern[str] | None = None
    lines: bool = False
    """True if a text may have line breaks and other unprintable characters."""
    choices: tuple[str, ...] = ()
    shape: Callable[[Mapping[str, Any]], str | None] | None = None
    """Function that returns the problem of a JSON object; None for a valid one."""
    default: Any = None
    """Value for rows of an older release, which lack the column."""

    def problem(self, value: Any) -> str | None:
        """Return the unmet requirement, a clause such as "must be true or false"; None for a valid value.

        Reports the first requirement that is not met.
        """
        if value is None:
            return None if self.null else "must not be empty"
        return _CHECKS[self.kind](self, value)

    def first_invalid(self, values: Sequence[Any]) -> int | None:
        """Return the index of the first invalid value; None if all are valid."""
        if self._all_valid(values):
            return None
        return next((at for at, value in enumerate(values) if self.problem(value) is not None), None)

    def _all_valid(self, values: Sequence[Any]) -> bool:
        """Return True if a fast check shows that all values are valid. False also means that it could not tell.

        True for no values. Always False for JSON columns with a value.
        """
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
            low, high = -MAX_FLOAT if self.low is None else self.low, MAX_FLOAT if self.high is None else self.high
            return bool(low <= min(values) and max(values) <= high)
        if self.kind == "flag":
            return kinds == {bool}
        if self.kind in ("text", "time") and kinds == {str}:
            # few different values, so that each is checked once
            return all(self.problem(value) is None for value in set(values))
        return False


def _integer_problem(field: FieldRule, value: Any) -> str | None:
    if type(value) is not int or not field.low <= value <= field.high:  # type: ignore[operator]
        return f"must be a whole number from {field.low} to {field.high}"
    return None


def _number_problem(field: FieldRule, value: Any) -> str | None:
    """Return the unmet requirement of a finite number in the field's range (inclusive); None for a valid one.

    An int is valid, a bool is not. A missing bound of the field is that of a 64-bit float.
    """
    low, high = -MAX_FLOAT if field.low is None else field.low, MAX_FLOAT if field.high is None else field.high
    # compares exact numbers: an int of 400 digits has no float
    if type(value) not in (int, float) or not low <= value <= high:
        return "must be a finite number" + (f" of {low:g} or more" if field.low is not None else "")
    return None


def _boolean_problem(field: FieldRule, value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _time_problem(field: FieldRule, value: Any) -> str | None:
    """Return the unmet requirement of a time such as "2026-01-02T03:04:05.678Z"; None for a valid one.

    Valid is text YYYY-MM-DDTHH:MM:SS.mmmZ with exactly three decimals and a year from 1970 to 2199. A time that is not
    in the calendar, such as 30 February, is invalid. The field's own rules are not used.
    """
    good = isinstance(value, str) and TIME.fullmatch(value) is not None
    if good:
        try:
            datetime.fromisoformat(value)
        except ValueError:
            good = False
    return None if good else "must be a time from 1970 to 2199, such as 2026-01-02T03:04:05.678Z"


def _text_problem(field: FieldRule, value: Any) -> str | None:
    """Return the unmet requirement of a text; None for a valid one.

    With choices, only these count. Otherwise it must be storable, at most `longest` characters long, printable on one
    line unless `lines`, and match the pattern as a whole.
    """
    if field.choices:
        return None if value in field.choices else f"must be one of {', '.join(field.choices)}"
    if not is_storable_text(value, field.longest):
        return f"must be text of at most {field.longest} characters, without NUL or lone surrogates"
    if not field.lines and not value.isprintable():
        return "must be text of one line, without control characters"
    if field.pattern is not None and not field.pattern.fullmatch(value):
        return f"must match {field.pattern.pattern}"
    return None


def _object_problem(field: FieldRule, value: Any) -> str | None:
    if not isinstance(value, dict):
        return "must be a JSON object"
    return _nested_value_problem(value) or (field.shape(value) if field.shape is not None else None)


def _list_or_object_problem(field: FieldRule, value: Any) -> str | None:
    return _nested_value_problem(value) if isinstance(value, list | dict) else "must be a JSON list or object"


_CHECKS: dict[FieldKind, Callable[[FieldRule, Any], str | None]] = {
    "whole": _integer_problem, "real": _number_problem, "flag": _boolean_problem, "time": _time_problem, "text": _text_problem, "json": _object_problem,
    "tree": _list_or_object_problem,
}  # fmt: skip


def _nested_value_problem(value: Any) -> str | None:
    """Return the problem of a JSON value at any depth; None for a valid one.

    Valid are at most 20,000 values, 24 levels deep, with storable texts, keys of at most 1000 characters, integers of
    at most 64 bits, and finite floats. No recursion, since the sender chose the depth.
    """
    pending, n_items = [(value, 1)], 0
    while pending:
        item, depth = pending.pop()
        n_items += 1
        if n_items + len(pending) > MAX_NODES or depth > MAX_DEPTH:
            return f"must hold at most {MAX_NODES} values, at most {MAX_DEPTH} deep"
        if isinstance(item, str) and not is_storable_text(item, None):
            return "contains text with NUL or a lone surrogate"
        if isinstance(item, int) and not -MAX_BIG_INTEGER <= item <= MAX_BIG_INTEGER:
            return "contains a number of more than 64 bits"
        if isinstance(item, float) and not math.isfinite(item):
            return "contains a number that is not finite"
        if isinstance(item, dict):
            if not all(is_storable_text(name, 1000) for name in item):
                return "contains a name of over 1,000 characters, or with NUL or a lone surrogate"
            pending += [(item, depth + 1) for item in item.values()]
        elif isinstance(item, list):
            pending += [(item, depth + 1) for item in item]
    return None


# --- shapes of JSON columns -------------------------------------------------------------------------------------------


def _text_map_problem(value: Mapping[str, Any]) -> str | None:
    """Return the problem of an object that must hold texts only; None for a valid one.

    A text may have at most 10,000 characters.
    """
    good = all(isinstance(text, str) and len(text) <= 10_000 for text in value.values())
    return None if good else "must contain only texts"


def _options_problem(value: Mapping[str, Any]) -> str | None:
    """Return the problem of a revision's options; None for valid ones.

    `requested` holds pairs of probe and length, `set` an object; both may be missing. Other keys are not checked.
    """
    requested = value.get("requested", [])
    if not isinstance(requested, list) or any(_is_invalid_request(pair) for pair in requested):
        return "must have a list of pairs of probe and context length under `requested`"
    return None if isinstance(value.get("set", {}), dict) else "must have an object under `set`"


def _is_invalid_request(pair: Any) -> bool:
    """Return True unless the value is a list of a valid probe name and a valid context length."""
    if not isinstance(pair, list) or len(pair) != 2:
        return True
    return PROBE.problem(pair[0]) is not None or LENGTH.problem(pair[1]) is not None


def _config_problem(value: Mapping[str, Any]) -> str | None:
    """Return the problem of a config; None for a valid one.

    `plugins` may be missing, or holds objects with exactly a `path` and a `sha256` (64 hex digits). Other keys are not
    checked.
    """
    plugins = value.get("plugins", [])
    listed: list[Any] = plugins if isinstance(plugins, list) else [None]
    for plugin in listed:
        texts = isinstance(plugin, dict) and set(plugin) == {"path", "sha256"}
        if not texts or not all(isinstance(text, str) for text in plugin.values()):
            return "must have a list of objects with a path and a sha256 under `plugins`"
        if not re.fullmatch("[0-9a-f]{64}", plugin["sha256"]):
            return "must have valid SHA-256 hashes under `plugins`"
    return None


# --- the schema: what a column's type says, and the rules beyond it ------------------------------------------------------


def rule_of_type(column: Column[Any]) -> FieldRule:
    """Return the rule that follows from a column's type alone.

    Its default, for rows without the column, is False for booleans, 0 for integers and None for others. Integers may be
    negative; text without a declared length may have 64 KiB characters and line breaks.
    """
    kind, null = column.type, bool(column.nullable)
    if isinstance(kind, Boolean):
        return FieldRule(kind="flag", null=null, default=False)
    if isinstance(kind, UtcTime):
        return FieldRule(kind="time", null=null)
    if isinstance(kind, JSON):
        return FieldRule(kind="json", null=null)
    if isinstance(kind, Integer):
        top = MAX_BIG_INTEGER if isinstance(kind, BigInteger) else MAX_INTEGER
        return FieldRule(kind="whole", low=-top, high=top, null=null, default=0)
    if isinstance(kind, Double):
        return FieldRule(kind="real", null=null)
    return FieldRule(kind="text", longest=getattr(kind, "length", None) or 64 * KIB, lines=True, null=null)


def _line_rule(longest: int, pattern: str | None = None) -> dict[str, Any]:
    """Return the FieldRule arguments of a text of one line.

    `longest` is the maximum number of characters; `pattern` a regular expression that must match all of it, None for
    none.
    """
    return {"longest": longest, "pattern": re.compile(pattern) if pattern else None, "lines": False}


def _multiline_rule(longest: int) -> dict[str, Any]:
    """Return the FieldRule arguments of a text of at most `longest` characters that may have line breaks."""
    return {"longest": longest}


def _choice_rule(*choices: str) -> dict[str, Any]:
    """Return the FieldRule arguments of a text that is one of these choices."""
    return {"choices": choices, "longest": 0, "lines": False}


RULES: Mapping[str, Mapping[str, Any]] = {
    "name": _line_rule(200, r".*\S.*"), "grid_text": _multiline_rule(MIB), "grid_file": _multiline_rule(4 * KIB), "options": {"shape": _options_problem},
    "git_commit": _line_rule(100), "slug": _line_rule(400, r"[A-Za-z0-9_].*"), "config": {"shape": _config_problem}, "axes": {"shape": _text_map_problem},
    **dict.fromkeys(("attn_type", "reg_mode", "distractor", "memory", "window"), _line_rule(200)),
    "cell.id": _line_rule(12, CELL_ID), "cell_id": _line_rule(12, CELL_ID), "number": {"low": 1}, "attempt.id": {"low": 1},
    "attempt_id": {"low": 1}, "parent_id": {"low": 1}, "attempt.kind": _choice_rule(*get_args(AttemptKind)), "state": _choice_rule(*get_args(AttemptState)),
    "owner": _line_rule(400), "host": _line_rule(400), "attempt.tokens_per_s": {"low": 0.0}, "phase": _choice_rule(*get_args(Phase)),
    "cause": _multiline_rule(256 * KIB), "traceback": _multiline_rule(MIB // 2), "exit_code": {"low": -MAX_INTEGER},
    # a number, with a suffix if an import found the folder in use
    "run_dir": _line_rule(100, CELL_ID + r"/[1-9]\d{0,8}(?:-[1-9]\d{0,8}){0,4}"), "checkpoint": _multiline_rule(4 * KIB),
    "weights": _multiline_rule(4 * KIB), "failure": _choice_rule(*FAILURES), "probe": _line_rule(100, r".*\S.*"), "metric": _line_rule(200, r".*\S.*"),
    "unit": _line_rule(100), "reason": _multiline_rule(64 * KIB), "seconds": {"low": 0.0}, "source": _line_rule(64, r"[0-9a-f]{64}"),
    "event.kind": _line_rule(100, r"[A-Za-z][A-Za-z0-9_ .-]*"), "message": _multiline_rule(256 * KIB), "packages": {"shape": _text_map_problem},
    "python": _line_rule(200), "platform": _line_rule(1000), "device": _line_rule(200), "gpu_name": _line_rule(400), "driver": _line_rule(200),
    "dtype": _line_rule(200), "kernels": {"shape": _text_map_problem}, "tokenizer": _line_rule(1000), "corpus": _line_rule(4000),
    "corpus_fingerprint": _line_rule(200), "gpu_uuid": _line_rule(200),
}  # fmt: skip
"""Requirements of values beyond the type of their column, by column or by `table.column`, which has precedence.

Columns without an entry have the rule of their type; integers are 0 or more.
"""


def _bundle_rule(table: str, column: Column[Any]) -> FieldRule:
    """Return the rule of a bundle's column: its type, overridden by its entry in RULES.

    Integers are 0 or more unless the entry says otherwise. The default for rows without the column is 0 for integers
    with a server default, False for booleans that may not be NULL, and None for others.
    """
    field, default = rule_of_type(column), None
    if field.kind == "whole":
        field, default = replace(field, low=0), None if column.server_default is None else 0
    elif field.kind == "flag" and not field.null:
        default = False
    rule = RULES.get(f"{table}.{column.name}", RULES.get(column.name, {}))
    return replace(field, default=default, **rule)


def bundle_columns(name: str) -> list[Column[Any]]:
    """Return the columns of a table that a bundle holds."""
    if name == "sweep":
        return [TABLES[name].c[column] for column in SWEEP_COLUMNS]
    return [column for column in TABLES[name].columns if column.name not in EXCLUDED_COLUMNS.get(name, ())]


FIELD_RULES: dict[str, dict[str, FieldRule]] = {
    name: {
        **({"sweep": FieldRule(kind="flag")} if name == "event" else {}),
        **({"revision": FieldRule(kind="whole", low=1, high=MAX_INTEGER)} if name == "revision_cell" else {}),
        **{column.name: _bundle_rule(name, column) for column in bundle_columns(name)},
    }
    for name in BUNDLE_TABLES
}
"""Rules by table and by column, in the order of the columns."""
PROBE, LENGTH = FIELD_RULES["measurement"]["probe"], FIELD_RULES["measurement"]["length"]

SORTED_BY: dict[str, tuple[str, ...]] = {
    "provenance": ("attempt_id",),
    "measurement": ("attempt_id", "probe", "metric", "length"),
    "example": ("attempt_id", "probe", "metric", "length", "item", "position"),
    "curve_point": ("attempt_id", "step"),
}
"""Columns by which the rows of a table must be strictly increasing, so that duplicates are impossible."""

MAX_LINE_BYTES: Mapping[str, int] = {
    "sweep": 16 * KIB, "revision": 8 * MIB, "cell": MIB, "revision_cell": 256 * KIB, "attempt": 4 * MIB,
    "provenance": 4 * MIB, "measurement": 512 * KIB, "example": 512 * KIB, "curve_point": 4 * KIB, "event": 2 * MIB,
}  # fmt: skip
"""Maximum bytes of a line, by table."""


# --- tables -----------------------------------------------------------------------------------------------------------


class InvalidRow(ValueError):
    """Error for a row that does not pass validation; `row_index` is its index in the validated batch."""

    def __init__(self, row_index: int, reason: str) -> None:
        super().__init__(reason)
        self.row_index = row_index


class RowValidator:
    """Validates the rows of one table, batch by batch."""

    def __init__(self, name: str, *, complete: bool) -> None:
        """Choose the rules of a table.

        Args:
            name: "sweep", "revision", "cell", "revision_cell", "attempt", "provenance", "measurement", "example",
                "curve_point" or "event".
            complete: True if the bundle is of this release, so that no column may be missing. False permits the absence
                of columns that may be NULL or have a server default.
        """
        self.name, self.fields = name, FIELD_RULES[name]
        self.names = self.fields.keys()
        columns = {column.name: column for column in bundle_columns(name)}
        later = {word for word, column in columns.items() if column.nullable or column.server_default is not None}
        self.required_names = self.names if complete else self.names - later
        self._last: tuple[Any, ...] | None = None

    def validated_columns(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """Return the rows as a dictionary from column name to list of values, one per row.

        Columns that older releases lack are filled with defaults. Integers in columns of floats become floats. Batches
        must come in the order of the bundle, since the order of rows is checked across them.

        Args:
            rows: parsed JSON values, of any type.

        Raises:
            InvalidRow: a row is no object, has other columns than the table, or an invalid value, or is out of order.
        """
        for at, row in enumerate(rows):
            if not isinstance(row, dict):
                raise InvalidRow(at, "it is not a JSON object")
            if row.keys() != self.names and not self.required_names <= row.keys() <= self.names:
                unexpected = sorted(row.keys() ^ self.names)
                raise InvalidRow(
                    at, f"its fields differ from those of {self.name}: {', '.join(map(repr, unexpected))[:200]}"
                )
        columns = {}
        for name, field in self.fields.items():
            values = [row.get(name, field.default) for row in rows] if self.required_names != self.names else None
            columns[name] = values if values is not None else [row[name] for row in rows]
            invalid_row = field.first_invalid(columns[name])
            if invalid_row is not None:
                value = columns[name][invalid_row]
                raise InvalidRow(invalid_row, f"{name} is {quoted_value(value)}; it {field.problem(value)}")
            if field.kind == "real" and int in set(map(type, columns[name])):
                columns[name] = [None if value is None else float(value) for value in columns[name]]
        self._check_relations(columns)
        return columns

    def _check_relations(self, columns: Mapping[str, list[Any]]) -> None:
        """Check fields that depend on each other, and the order of the rows, also across batches.

        Remembers the last key for the next batch.

        Args:
            columns: values by column, already validated one by one.

        Raises:
            InvalidRow: a measurement has neither value nor reason, the message of an event of kind `code` is not a
                fingerprint (12 hex digits), or rows are not strictly increasing by the columns of SORTED_BY (of
                measurements and examples their keys).
        """
        if self.name == "measurement":
            for at, (value, reason) in enumerate(zip(columns["value"], columns["reason"], strict=True)):
                if value is None and not reason:
                    raise InvalidRow(at, "value and reason are both empty; one of them is required")
        if self.name == "event":
            for at, (kind, message) in enumerate(zip(columns["kind"], columns["message"], strict=True)):
                if kind == "code" and not re.fullmatch(CELL_ID, message):
                    raise InvalidRow(at, f"message is {quoted_value(message)}; it must be a fingerprint of code")
        if self.name in SORTED_BY:
            keys: Iterable[tuple[Any, ...]] = list(zip(*(columns[word] for word in SORTED_BY[self.name]), strict=True))
            before = [self._last] if self._last is not None else []
            sequence = [*before, *keys]
            for at, (previous, current) in enumerate(pairwise(sequence)):
                if not previous < current:
                    raise InvalidRow(at + 1 - len(before), f"rows are not sorted by {', '.join(SORTED_BY[self.name])}")
            self._last = sequence[-1] if sequence else self._last


def quoted_value(value: Any) -> str:
    """Return an untrusted value for a message: short, on one line, without control characters.

    Text is cut to 60 characters without an ellipsis, then quoted with characters outside ASCII escaped (`ascii`).
    Numbers, True, False and None are shown as Python's str(), cut to 60 characters. A dict becomes "an object", a list
    "a list".
    """
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return ascii(value[:60]) if isinstance(value, str) else str(value)[:60]
