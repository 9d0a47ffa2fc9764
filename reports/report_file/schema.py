"""Schema of a report file (YAML), and its reader, whose errors name file, line and key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ...results.console.text import did_you_mean
from ..sweep_data import ReportError

MAX_BYTES = 2**18
"""Largest size of a report file."""
KINDS = ("table", "figure")
Format = Literal["tex", "md", "csv", "html", "json"]
PictureFormat = Literal["pdf", "svg", "png", "pgf"]


class _Part(BaseModel):
    """Base of every item and of the file itself: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Item(_Part):
    """A table or figure of an appendix."""

    caption: str | None = None
    """Caption in place of the title; None: the title."""
    notes: bool = True
    """Whether the notes stand below the table, or in the caption of the figure."""
    only: list[str] = []
    """Filters of cells, such as memory=on; all must match."""
    lengths: Literal["all"] | list[Annotated[int, Field(gt=0)]] = []
    """Context lengths in tokens to show besides those of the grid."""


class TableItem(_Item):
    """A table: its number or name, and the columns to show."""

    table: str | int
    columns: list[str] | None = Field(default=None, min_length=1)
    """Headings of the number columns in their order; None: all. Label columns always stand in front."""
    seeds: bool = False
    all_rows: bool = False
    compare: str | None = None
    """Sweep to compare with, for the table `compare`."""


class FigureItem(_Item):
    """A figure: its number or name, and the options of `report --figure`."""

    figure: str | int
    width: float | str | None = None
    """Width as --width takes it; None: that of the file."""
    by: str | None = None
    log: bool = False
    against: Literal["tokens", "time"] | None = None
    compare: str | None = None
    highlight: list[str] = []


def _kind(value: Any) -> str | None:
    """Return "table" or "figure", whichever key an item has; None if it has neither or is no mapping."""
    keys = value if isinstance(value, dict) else {}
    return next((kind for kind in KINDS if kind in keys), None)


Item = Annotated[Annotated[TableItem, Tag("table")] | Annotated[FigureItem, Tag("figure")], Discriminator(_kind)]


class ReportFile(_Part):
    """A report file: the sweep, the formats, and tables and figures in the order of the appendix."""

    sweep: str | None = None
    """Name of the sweep; None: that of --sweep, else the one launched last."""
    title: str = "Appendix"
    out: str | None = None
    """Folder to write into, relative to the file; None: that of --out, else one named like the file."""
    formats: list[Format] = ["tex", "csv"]
    """Formats of the tables."""
    pictures: list[PictureFormat] = ["pdf", "png"]
    """Formats of the figures."""
    style: str | None = None
    width: float | str | None = None
    """Width of every figure that has none of its own."""
    items: list[Item] = Field(min_length=1)


def read_report_file(path: Path) -> tuple[ReportFile, list[int]]:
    """Return the checked content of a report file, and the line (from 1) of each item.

    Raises:
        ReportError: It cannot be read, is not YAML, or has an unknown key or a wrong value; one line with file, line
            and key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > MAX_BYTES:
        raise ReportError(f"{path}: is larger than {MAX_BYTES:,} bytes, the limit for a report file")
    try:
        document = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ReportError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(document, CommentedMap):
        raise ReportError(f"{path}:1: must hold a mapping with the key items")
    try:
        report = ReportFile.model_validate(_plain(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ReportError(_message(path, document, first)) from error
    return report, [_line(document, ["items", index]) for index in range(len(report.items))]


def _plain(value: Any) -> Any:
    """Return dicts, lists and scalars in place of the reader's own types."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _message(path: Path, document: Any, error: Any) -> str:
    """Return the line of an error: file, line, key path and problem, with allowed keys for an unknown one.

    Args:
        path: The file.
        document: Its content as the reader gave it, which has the lines.
        error: First error of pydantic, a dict with loc, type, msg and input.
    """
    where = list(_key_path(document, error["loc"]))
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")
    problem = str(error["msg"]).removeprefix("Value error, ")
    problem = problem[:1].lower() + problem[1:]
    if error["type"] == "extra_forbidden":
        models: dict[str | None, type[BaseModel]] = {"table": TableItem, "figure": FigureItem, None: ReportFile}
        model = models[_kind(_plain(_value_at(document, where[:-1])))]
        problem = f"unknown key; allowed: {', '.join(model.model_fields)}" + did_you_mean(
            str(where[-1]), list(model.model_fields)
        )
    elif error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        problem = "must have the key table or figure"
    elif error["type"] == "missing":
        problem = "is missing"
    return " ".join(f"{path}:{_line(document, where)}: {key}: {problem}".split())


def _key_path(document: Any, loc: tuple[str | int, ...]) -> Iterator[str | int]:
    """Yield the parts of pydantic's location that are keys of the document: no names of alternatives, but a missing key.

    Args:
        document: Content of the file.
        loc: Location of the error.
    """
    value = document
    for index, part in enumerate(loc):
        is_last, is_tag = index == len(loc) - 1, part in KINDS and index > 0 and isinstance(loc[index - 1], int)
        if is_tag:
            continue
        if isinstance(value, dict) and (part in value or is_last):
            yield part
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            yield part
            value = value[part]


def _value_at(document: Any, where: list[str | int]) -> Any:
    """Return the value at a key path of the document."""
    for part in where:
        document = document[part]
    return document


def _line(document: Any, where: list[str | int]) -> int:
    """Return the line (from 1) of a key or item, else of the nearest enclosing one."""
    line, value = document.lc.line + 1, document
    for part in where:
        try:
            line = (value.lc.key(part) if isinstance(value, CommentedMap) else value.lc.item(part))[0] + 1
        except (KeyError, IndexError):
            break
        value = value[part]
        if not isinstance(value, CommentedMap | CommentedSeq):
            break
    return int(line)
