"""Studies: proposals of a sampler, trial by trial, and the state of the sampler."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables `study` and `trial` and an index; no row of another table changes."""
    op.create_table(
        "study",
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("memory", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("sweep_id", "part", name="pk_study"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name="fk_study_sweep_id", ondelete="CASCADE"),
    )
    op.create_table(
        "trial",
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.String(12)),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("standing", sa.String(8), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("objectives", sa.JSON()),
        sa.Column("curve", sa.JSON()),
        sa.Column("attrs", sa.JSON(), nullable=False),
        sa.Column("asked_at", sa.String(24), nullable=False),
        sa.Column("ended_at", sa.String(24)),
        sa.PrimaryKeyConstraint("sweep_id", "part", "number", name="pk_trial"),
        sa.ForeignKeyConstraint(
            ["sweep_id", "part"], ["study.sweep_id", "study.part"], name="fk_trial_study", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name="fk_trial_cell_id"),
        sa.CheckConstraint(
            "standing IN ('asked', 'done', 'pruned', 'diverged', 'failed')", name=op.f("ck_trial_standing")
        ),
    )
    op.create_index("ix_trial_cell_id", "trial", ["cell_id"])


def downgrade() -> None:
    """Return to the release before: drop both tables with their rows."""
    op.drop_table("trial")
    op.drop_table("study")
