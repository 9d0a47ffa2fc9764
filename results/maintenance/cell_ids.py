"""Checks of cells whose id, or whose columns, are not those of their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from .. import paper
from ..console.text import counted
from ..derived import Derive, Derived, axis_contradictions, column_contradictions
from ..store.schema import Base
from .finding import Finding, first_names

ComputeCellId = Callable[[Mapping[str, Any], str], str]
"""Function that returns the id of a config, given the id that its cell has."""


def check_cell_ids(connection: Connection, compute_cell_id: ComputeCellId) -> list[Finding]:
    """Return findings about cells whose id is not that of their config, and about configs that cannot be read.

    At most two: an error that counts the wrong ids and names the first cells with the id that they should have, and a
    warning that does so for unreadable configs. Published cells (the paper's) are skipped. Reads the config of every
    cell.

    Args:
        connection: open connection.
        compute_cell_id: returns the id of a config, given the id that the cell has. Its AttributeError, LookupError,
            TypeError or ValueError means an unreadable config; other errors are not caught.
    """
    wrong_ids, unreadable = [], []
    cell = Base.metadata.tables["cell"].c
    for row in connection.execute(select(cell.id, cell.slug, cell.config).order_by(cell.id)):
        # published cells have other ids, since their complete config is unknown
        if paper.is_published_cell(row.id, row.slug):
            continue
        try:
            computed_id = compute_cell_id(row.config, row.id)
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # what pydantic and the registries raise
            unreadable.append(f"{row.id} ({type(error).__name__}: {' '.join(str(error).split())[:100]})")
        else:
            if computed_id != row.id:
                wrong_ids.append(f"{row.id} ({computed_id})")
    findings = []
    if wrong_ids:
        findings.append(
            Finding.error(
                f"the id of {counted(len(wrong_ids), 'cell')} does not match the config: {first_names(wrong_ids)}",
                "their config was changed by hand: restore the newest backup",
            )
        )
    if unreadable:
        findings.append(
            Finding.warning(
                f"the config of {counted(len(unreadable), 'cell')} cannot be read: {first_names(unreadable)}",
                "install the plugins that their grid names, or the release that launched it",
            )
        )
    return findings


def check_labels(connection: Connection, derive: Derive) -> list[Finding]:
    """Return one error about cells whose columns, or whose levels in a revision, contradict their config.

    The error counts the distinct contradictions and names the first ones. Empty if there are none. Published cells and
    unreadable configs are skipped; `check_cell_ids` reports the latter.

    Args:
        connection: open connection.
        derive: returns the columns that follow from a config.
    """
    cell, link = Base.metadata.tables["cell"], Base.metadata.tables["revision_cell"].c
    derived_by_cell: dict[str, tuple[Mapping[str, Any], Derived]] = {}
    lines: list[str] = []
    for row in connection.execute(select(cell).order_by(cell.c.id)).mappings():
        if paper.is_published_cell(row["id"], row["slug"]):
            continue
        try:
            derived = derive(row["config"])
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
        derived_by_cell[row["id"]] = row["config"], derived
        lines += column_contradictions(dict(row), derived)
    for entry in connection.execute(select(link.cell_id, link.axes).order_by(link.revision_id, link.position)):
        if entry.cell_id in derived_by_cell:
            lines += axis_contradictions(entry.cell_id, entry.axes, *derived_by_cell[entry.cell_id])
    distinct = list(dict.fromkeys(lines))
    if not distinct:
        return []
    return [
        Finding.error(
            f"{len(distinct)} labels of cells contradict their configs: {first_names(distinct)}",
            "they were changed by hand and appear in tables: restore the newest backup",
        )
    ]
