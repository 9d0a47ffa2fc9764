"""Plugin that made a measurement, and the description of a metric that the package does not define."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def _view(selected: str, chosen: str) -> str:
    """Return the SQL of the view `results`: newest revision per sweep, newest value per key over finished attempts.

    A cell without values has one row.

    Args:
        selected: further columns of the outer query, with a comma before each.
        chosen: the same columns of the inner queries, with `{}` for the name of the table.
    """
    return f"""
CREATE VIEW results AS
SELECT s.name AS sweep, c.id AS cell, c.slug AS slug, c.seed AS seed, c.attn_type AS attn_type,
       c.reg_mode AS reg_mode, c.distractor AS distractor, c.memory AS memory, c."window" AS "window",
       rc.axes AS axes, m.probe AS probe, m.metric AS metric, m.length AS length, m.value AS value,
       m.unit AS unit, m.n AS n, COALESCE(a.state, 'new') AS state{selected}
FROM sweep s
JOIN revision r ON r.sweep_id = s.id
     AND r.number = (SELECT MAX(r2.number) FROM revision r2 WHERE r2.sweep_id = s.id)
JOIN revision_cell rc ON rc.revision_id = r.id
JOIN cell c ON c.id = rc.cell_id
LEFT JOIN attempt a ON a.id = (SELECT MAX(a2.id) FROM attempt a2 WHERE a2.cell_id = c.id)
LEFT JOIN (
    SELECT ranked.cell_id, ranked.probe, ranked.metric, ranked.length, ranked.value, ranked.unit, ranked.n{chosen.format("ranked")}
    FROM (
        SELECT t.cell_id, x.probe, x.metric, x.length, x.value, x.unit, x.n{chosen.format("x")},
               ROW_NUMBER() OVER (
                   PARTITION BY t.cell_id, x.probe, x.metric, x.length ORDER BY x.attempt_id DESC
               ) AS age
        FROM measurement x
        JOIN attempt t ON t.id = x.attempt_id
        WHERE t.state = 'done'
    ) AS ranked
    WHERE ranked.age = 1
) AS m ON m.cell_id = c.id
"""


def upgrade() -> None:
    """Add the nullable columns measurement.source and measurement.description, and the first one to the view.

    No table is rebuilt and no row changes.
    """
    op.execute("DROP VIEW results")
    op.add_column("measurement", sa.Column("source", sa.String(64)))
    op.add_column("measurement", sa.Column("description", sa.JSON()))
    op.execute(_view(", m.source AS source", ", {}.source"))


def downgrade() -> None:
    """Return to the release before: drop these columns with their contents, and restore the view."""
    op.execute("DROP VIEW results")
    op.drop_column("measurement", "description")
    op.drop_column("measurement", "source")
    op.execute(_view("", ""))
