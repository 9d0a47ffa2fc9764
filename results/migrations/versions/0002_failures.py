"""Failure class and deviation of an attempt, and requests to a running sweep."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the nullable columns attempt.failure, attempt.deviation and sweep.request.

    No table is rebuilt and no row changes.
    """
    op.add_column("attempt", sa.Column("failure", sa.String(14)))
    op.add_column("attempt", sa.Column("deviation", sa.JSON()))
    op.add_column("sweep", sa.Column("request", sa.JSON()))


def downgrade() -> None:
    """Return to the first release: drop these columns with their contents."""
    op.drop_column("sweep", "request")
    op.drop_column("attempt", "deviation")
    op.drop_column("attempt", "failure")
