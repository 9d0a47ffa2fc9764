"""A third kind of attempts: evaluations of external models."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
BEFORE, AFTER = "kind IN ('train', 'evaluate')", "kind IN ('train', 'evaluate', 'external')"


def upgrade() -> None:
    """Allow the kind "external" of an attempt; no row changes."""
    _allow(BEFORE, AFTER)


def downgrade() -> None:
    """Return to the release before: attempts of the kind "external" become "evaluate"."""
    op.execute("UPDATE attempt SET kind = 'evaluate' WHERE kind = 'external'")
    _allow(AFTER, BEFORE)


def _allow(old: str, new: str) -> None:
    """Replace the CHECK condition of the column `kind`, `old`, by `new` (SQL texts).

    On SQLite only the text of the table in sqlite_master changes.
    """
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint(op.f("ck_attempt_kind"), "attempt", type_="check")
        op.create_check_constraint(op.f("ck_attempt_kind"), "attempt", new)
        return
    # SQLite alters no constraint in place, and to copy the table would break the view on it; its own documentation
    # has this way for a change that touches nothing on the disk but the text of the table
    old_sql, new_sql = (text.replace("'", "''") for text in (old, new))
    op.execute("PRAGMA writable_schema = ON")
    op.execute(
        f"UPDATE sqlite_master SET sql = replace(sql, '{old_sql}', '{new_sql}') WHERE type = 'table' AND name = 'attempt'"
    )
    op.execute("PRAGMA writable_schema = RESET")
