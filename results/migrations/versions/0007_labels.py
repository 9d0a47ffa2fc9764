"""Notes and tags of sweeps and cells, and indexes without which a deletion reads all events for each attempt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INDEXED = (("attempt", "parent_id"), ("event", "sweep_id"), ("event", "attempt_id"), ("event", "cell_id"))


def upgrade() -> None:
    """Add the nullable columns sweep.tags, sweep.note and cell.note, and the indexes of INDEXED.

    No table is rebuilt and no row changes.
    """
    op.add_column("sweep", sa.Column("tags", sa.JSON()))
    op.add_column("sweep", sa.Column("note", sa.Text()))
    op.add_column("cell", sa.Column("note", sa.Text()))
    for table, column in INDEXED:
        op.create_index(f"ix_{table}_{column}", table, [column])


def downgrade() -> None:
    """Return to the release before: drop the indexes and columns that `upgrade` adds, with their contents."""
    for table, column in INDEXED:
        op.drop_index(f"ix_{table}_{column}", table)
    op.drop_column("cell", "note")
    op.drop_column("sweep", "note")
    op.drop_column("sweep", "tags")
