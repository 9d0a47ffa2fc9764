"""A clock that is behind what the database has seen."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import Connection, String, func, select, type_coerce

from ..store.schema import Base, UtcNow, UtcTime
from .finding import Finding

CLOCK_SLACK = timedelta(seconds=5)
TIME_LIKE = "____-__-__T__:__:__.___Z"


def clock(connection: Connection) -> list[Finding]:
    """The newest time in any table against the database's clock."""
    now = connection.scalar(select(UtcNow()))
    newest: tuple[datetime, str] | None = None
    for name, table in Base.metadata.tables.items():
        for column in table.columns:
            if isinstance(column.type, UtcTime) and column.name != "lease_until":
                latest = connection.scalar(select(func.max(column)).where(type_coerce(column, String).like(TIME_LIKE)))
                if latest is not None and (newest is None or latest > newest[0]):
                    newest = latest, f"{name}.{column.name}"
    assert now is not None
    if newest is None or newest[0] <= now + CLOCK_SLACK:
        return []
    return [
        Finding(
            severity="warning",
            what=f"the clock says {now:%Y-%m-%d %H:%M:%S} UTC, and {newest[1]} {newest[0]:%Y-%m-%d %H:%M:%S}",
            remedy="set the clock (timedatectl), or wait until it has caught up: leases and ages go by it",
        )
    ]
