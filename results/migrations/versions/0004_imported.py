"""Flag of attempts that came with a bundle: the paths and addresses in them are never followed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column attempt.imported with the constant default false.

    No table is rebuilt and no row changes.
    """
    op.add_column("attempt", sa.Column("imported", sa.Boolean(), nullable=False, server_default=sa.text("false")))


def downgrade() -> None:
    """Return to the release before: drop this column with its contents."""
    op.drop_column("attempt", "imported")
