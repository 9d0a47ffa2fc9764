"""GPU of an attempt, and the number of other attempts on it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add nullable columns; no table is rebuilt and no row changes."""
    op.add_column("provenance", sa.Column("gpu_uuid", sa.Text()))
    op.add_column("provenance", sa.Column("co_tenants", sa.Integer()))


def downgrade() -> None:
    """Return to the release before."""
    op.drop_column("provenance", "co_tenants")
    op.drop_column("provenance", "gpu_uuid")
