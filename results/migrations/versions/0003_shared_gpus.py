"""GPU of an attempt, and the number of other attempts on it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the nullable columns provenance.gpu_uuid and provenance.co_tenants.

    No table is rebuilt and no row changes.
    """
    op.add_column("provenance", sa.Column("gpu_uuid", sa.Text()))
    op.add_column("provenance", sa.Column("co_tenants", sa.Integer()))


def downgrade() -> None:
    """Return to the release before: drop these columns with their contents."""
    op.drop_column("provenance", "co_tenants")
    op.drop_column("provenance", "gpu_uuid")
