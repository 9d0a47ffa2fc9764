"""Boot and PID namespace in which the pid of a supervisor or an attempt is valid."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the nullable columns sweep.owner_space and attempt.pid_space.

    No table is rebuilt and no row changes.
    """
    op.add_column("sweep", sa.Column("owner_space", sa.Text()))
    op.add_column("attempt", sa.Column("pid_space", sa.Text()))


def downgrade() -> None:
    """Return to the release before: drop these columns with their contents."""
    op.drop_column("attempt", "pid_space")
    op.drop_column("sweep", "owner_space")
