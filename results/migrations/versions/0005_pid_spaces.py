"""Boot and PID namespace in which the pid of a supervisor or an attempt is valid."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add nullable columns; no table is rebuilt and no row changes."""
    op.add_column("sweep", sa.Column("owner_space", sa.Text()))
    op.add_column("attempt", sa.Column("pid_space", sa.Text()))


def downgrade() -> None:
    """Return to the release before."""
    op.drop_column("attempt", "pid_space")
    op.drop_column("sweep", "owner_space")
