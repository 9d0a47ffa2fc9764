"""The numbered tables of the paper, from the database. `make_table("6", store)` then `render(table, "tex")`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

from ..results.records import AXES, CellState, Value
from ..results.store import Store
from .data import REFERENCES, ReportError, SweepData, Table, gather
from .render import FORMATS, render

__all__ = ["FORMATS", "TABLES", "ReportError", "Table", "length_name", "make_table", "render", "rounded", "table6"]

AXIS_HEADINGS = ("Type", "Reg", "Dist", "Mem", "Win")
CODE_LENGTH = 16


@dataclass(frozen=True)
class Column:
    """A column of numbers: where it comes from and how it is printed. `length` is 0 for a number without one."""

    heading: str
    probe: str
    metric: str
    decimals: int
    percent: bool = False
    length: int = 0


def rounded(value: float, decimals: int, *, percent: bool = False) -> str:
    """The shortest decimal that names the float, rounded half up (0.125 -> 0.13, 2.675 -> 2.68), as people do by hand.

    `percent` multiplies by 100 first, exactly. No sign is left on a zero.
    """
    with localcontext() as context:
        context.prec = 400  # any float in full: nothing is rounded twice
        exact = Decimal(repr(float(value))) * (100 if percent else 1)
        result = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    return str(abs(result) if result == 0 else result)


def length_name(length: int) -> str:
    """128 -> 128, 2048 -> 2K, 65536 -> 64K, 1048576 -> 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def reason_code(reason: str) -> str:
    """The word that stands for a number that was not to be had: the reason's code, before its colon."""
    code = reason.split(":", 1)[0].strip()
    if code.startswith(("n/a", "no peak")):
        return "n/a"
    return code if code and len(code) <= CODE_LENGTH else (code.split() or ["n/a"])[0][:CODE_LENGTH]


def _ends(data: SweepData, lengths: Mapping[str, Sequence[int]], column: Column) -> list[Column]:
    """The column at the shortest and at the longest context length (-1 where no length is known yet)."""
    known = sorted(lengths.get(column.probe, ())) or data.lengths(column.probe, column.metric)
    if not known:
        named = [(-1, "shortest"), (-1, "longest")]
    else:
        named = [(length, length_name(length)) for length in (known[0], known[-1])]
    return [
        Column(f"{column.heading}@{name}", column.probe, column.metric, column.decimals, column.percent, length)
        for length, name in named
    ]


def _printed(standing: str, value: Value | None, column: Column) -> str:
    if value is None:
        return "needs-eval" if standing == "done" else standing
    if value.value is None:
        return reason_code(value.reason or "n/a")
    return rounded(value.value, column.decimals, percent=column.percent)


def _raw(data: SweepData, cell: CellState, columns: Sequence[Column]) -> dict[str, Any]:
    """The row as an object: database column names, unrounded values and what is printed."""
    values = []
    standing = data.standing(cell)
    for column in columns:
        value = data.values.get((cell.cell_id, column.probe, column.metric, column.length))
        row: dict[str, Any] = {"heading": column.heading, "probe": column.probe, "metric": column.metric}
        row["length"] = column.length if column.length >= 0 else None
        for name in ("value", "unit", "n", "low", "high", "reason", "attempt_id"):
            row[name] = getattr(value, name) if value is not None else None
        values.append(row | {"printed": _printed(standing, value, column)})
    about = {"sweep": data.sweep, "revision": data.revision, "cell": cell.cell_id, "slug": cell.slug, "seed": cell.seed}
    state = {"axes": dict(cell.axes), "state": cell.state, "standing": standing, "attempt_id": cell.attempt_id}
    return about | dict(cell.levels) | state | {"values": values}


def _notes(data: SweepData, raw: Sequence[dict[str, Any]]) -> list[str]:
    notes = [
        f"Sweep {data.sweep}, revision {data.revision}: {data.done} of {len(data.cells)} cells done.",
        "Val, Clean and Junk: nats per token. Ndl: needle digits right, in % (a guess: 10). MFU: by the paper's formula, in %. "
        "Clean, Junk and Ndl at the shortest and the longest context length, in tokens.",
    ]
    known = [
        f"{name} {' / '.join(rounded(number, 3) for number in data.references[metric])}"
        for metric, name in REFERENCES.items()
        if metric in data.references
    ]
    if known:
        notes.append(f"For comparison, of the corpus in nats per token: {', '.join(known)}.")
    printed = [value for row in raw for value in row["values"]]
    reasons = Counter(value["reason"] for value in printed if value["value"] is None and value["reason"])
    for reason, count in sorted(reasons.items()):
        code = reason_code(reason)
        notes.append(f"{code} ({count} values): {reason.removeprefix(code).lstrip(': ') or code}.")
    if any(value["value"] is None and not value["reason"] for value in printed):
        notes.append("A word in place of a number is the state of a cell that has none yet.")
    return notes


def table6(
    store: Store,
    sweep: str | None = None,
    *,
    revision: int | None = None,
    orphans: bool = False,
    lengths: Mapping[str, Sequence[int]] | None = None,
) -> Table:
    """Table 6, the complete results: one row a cell, in the grid's order.

    Thirteen columns; a Seed column and one for every further axis that varies join after Win, so that rows stay apart.
    `lengths` gives context lengths by probe (clean, junk, needle), else those that the launch asked for.
    A number that is missing prints as where the cell stands (needs-eval in a trained one), one that could not be had as the
    code of its reason; nothing prints blank. Raises SweepUnknown, StoreError.
    """
    data = gather(store, sweep, revision=revision, orphans=orphans)
    asked = data.requested_lengths() if lengths is None else lengths
    columns = [
        Column("Val", "val", "val_loss", 3),
        *_ends(data, asked, Column("Clean", "clean", "nats", 2)),
        *_ends(data, asked, Column("Junk", "junk", "nats", 2)),
        *_ends(data, asked, Column("Ndl", "needle", "digit_accuracy", 1, percent=True)),
        Column("MFU", "throughput", "mfu_paper", 1, percent=True),
    ]
    seeds = ["Seed"] if len({cell.seed for cell in data.cells}) > 1 else []
    extra = data.extra_axes()
    rows, raw = [], []
    for cell in data.cells:
        found = _raw(data, cell, columns)
        words = [*(cell.levels[axis] for axis in AXES), *(str(cell.seed) for _ in seeds)]
        words += [cell.axes.get(axis, "-") for axis in extra]
        rows.append((*words, *(value["printed"] for value in found["values"])))
        raw.append(found)
    headings = (*AXIS_HEADINGS, *seeds, *extra)
    which = " (cells that the newest revision dropped)" if orphans else ""
    return Table(
        number="6",
        title=f"Table 6. Complete results of sweep {data.sweep}, revision {data.revision}{which}",
        columns=(*headings, *(column.heading for column in columns)),
        text_columns=len(headings),
        rows=tuple(rows),
        raw=tuple(raw),
        notes=tuple(_notes(data, raw)),
    )


TABLES: dict[str, Callable[..., Table]] = {"6": table6}


def make_table(number: str | int, store: Store, sweep: str | None = None, **options: Any) -> Table:
    """The table of that number; options as its function takes them. Raises ReportError for an unknown number."""
    if str(number) not in TABLES:
        raise ReportError(f"there is no table {number}; choose one of: {', '.join(TABLES)}")
    return TABLES[str(number)](store, sweep, **options)
