"""Cells whose id is not that of their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from .. import paper
from ..counts import counted
from ..store.schema import Base
from .finding import Finding, some

Identify = Callable[[Mapping[str, Any], str], str]


def identities(connection: Connection, identify: Identify) -> list[Finding]:
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
            Finding(
                severity="error",
                what=f"the id of {counted(len(wrong), 'cell')} is not that of the config: {some(wrong)}",
                remedy="their config was changed by hand: restore the newest backup",
            )
        )
    if unread:
        findings.append(
            Finding(
                severity="warning",
                what=f"the config of {counted(len(unread), 'cell')} cannot be read: {some(unread)}",
                remedy="install the plugins that their grid names, or the release that launched it",
            )
        )
    return findings
