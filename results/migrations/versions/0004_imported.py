"""Which attempts came with a bundle: nothing that they say of places is ever followed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """A column with a constant default, so no table is made anew and no row is touched."""
    op.add_column("attempt", sa.Column("imported", sa.Boolean(), nullable=False, server_default=sa.text("false")))


def downgrade() -> None:
    """Back to the release before."""
    op.drop_column("attempt", "imported")
