"""Which GPU an attempt ran on, and how many others did meanwhile."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Columns that may be empty, so no table is made anew and no row is touched."""
    op.add_column("provenance", sa.Column("gpu_uuid", sa.Text()))
    op.add_column("provenance", sa.Column("co_tenants", sa.Integer()))


def downgrade() -> None:
    """Back to the release before."""
    op.drop_column("provenance", "co_tenants")
    op.drop_column("provenance", "gpu_uuid")
