"""Cells whose id, or whose columns, are not those of their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from .. import paper
from ..console.text import counted
from ..derived import Derive, Derived, axis_contradictions, column_contradictions
from ..store.schema import Base
from .finding import Finding, some

Identify = Callable[[Mapping[str, Any], str], str]


def check_cell_ids(connection: Connection, identify: Identify) -> list[Finding]:
    """Every cell against what `identify` says of its config."""
    wrong, unread = [], []
    cell = Base.metadata.tables["cell"].c
    for row in connection.execute(select(cell.id, cell.slug, cell.config).order_by(cell.id)):
        # published numbers have ids of their own, since nobody knows their whole config
        if paper.is_published_cell(row.id, row.slug):
            continue
        try:
            found = identify(row.config, row.id)
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # what pydantic and the registries raise
            unread.append(f"{row.id} ({type(error).__name__}: {' '.join(str(error).split())[:100]})")
        else:
            if found != row.id:
                wrong.append(f"{row.id} ({found})")
    findings = []
    if wrong:
        findings.append(
            Finding.error(
                f"the id of {counted(len(wrong), 'cell')} is not that of the config: {some(wrong)}",
                "their config was changed by hand: restore the newest backup",
            )
        )
    if unread:
        findings.append(
            Finding.warning(
                f"the config of {counted(len(unread), 'cell')} cannot be read: {some(unread)}",
                "install the plugins that their grid names, or the release that launched it",
            )
        )
    return findings


def false_labels(connection: Connection, derive: Derive) -> list[Finding]:
    """Compare every cell's columns, and its levels in each revision, with what its config gives.

    Configs that cannot be read are found by `check_cell_ids`.
    """
    cell, link = Base.metadata.tables["cell"], Base.metadata.tables["revision_cell"].c
    known: dict[str, tuple[Mapping[str, Any], Derived]] = {}
    lines: list[str] = []
    for row in connection.execute(select(cell).order_by(cell.c.id)).mappings():
        if paper.is_published_cell(row["id"], row["slug"]):
            continue
        try:
            derived = derive(row["config"])
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
        known[row["id"]] = row["config"], derived
        lines += column_contradictions(dict(row), derived)
    for entry in connection.execute(select(link.cell_id, link.axes).order_by(link.revision_id, link.position)):
        if entry.cell_id in known:
            lines += axis_contradictions(entry.cell_id, entry.axes, *known[entry.cell_id])
    distinct = list(dict.fromkeys(lines))
    if not distinct:
        return []
    return [
        Finding.error(
            f"{len(distinct)} labels of cells contradict their configs: {some(distinct)}",
            "they were changed by hand, and tables show them: restore the newest backup",
        )
    ]
