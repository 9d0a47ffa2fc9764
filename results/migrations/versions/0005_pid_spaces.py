"""In which boot and PID namespace the pid of a supervisor or an attempt means something."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Columns that may be empty, so no table is made anew and no row is touched."""
    op.add_column("sweep", sa.Column("owner_space", sa.Text()))
    op.add_column("attempt", sa.Column("pid_space", sa.Text()))


def downgrade() -> None:
    """Back to the release before."""
    op.drop_column("attempt", "pid_space")
    op.drop_column("sweep", "owner_space")
