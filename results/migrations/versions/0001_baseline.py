"""The first release: all tables, the one-live-attempt index and the view `results`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.String(24)  # ISO-8601, UTC, milliseconds, Z

# Newest revision of each sweep; newest value per key over done attempts; a cell without values appears once.
RESULTS_VIEW = """
CREATE VIEW results AS
SELECT s.name AS sweep, c.id AS cell, c.slug AS slug, c.seed AS seed, c.attn_type AS attn_type,
       c.reg_mode AS reg_mode, c.distractor AS distractor, c.memory AS memory, c."window" AS "window",
       rc.axes AS axes, m.probe AS probe, m.metric AS metric, m.length AS length, m.value AS value,
       m.unit AS unit, m.n AS n, COALESCE(a.state, 'new') AS state
FROM sweep s
JOIN revision r ON r.sweep_id = s.id
     AND r.number = (SELECT MAX(r2.number) FROM revision r2 WHERE r2.sweep_id = s.id)
JOIN revision_cell rc ON rc.revision_id = r.id
JOIN cell c ON c.id = rc.cell_id
LEFT JOIN attempt a ON a.id = (SELECT MAX(a2.id) FROM attempt a2 WHERE a2.cell_id = c.id)
LEFT JOIN (
    SELECT ranked.cell_id, ranked.probe, ranked.metric, ranked.length, ranked.value, ranked.unit, ranked.n
    FROM (
        SELECT t.cell_id, x.probe, x.metric, x.length, x.value, x.unit, x.n,
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


def _sweeps() -> None:
    op.create_table(
        "sweep",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("launched_at", TIME, nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("owner_host", sa.Text()),
        sa.Column("owner_pid", sa.Integer()),
        sa.Column("owner_started", sa.Double()),
        sa.Column("owner_since", TIME),
        sa.Column("lease_until", TIME),
        sa.Column("fence", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("read_only", sa.Boolean(), nullable=False, server_default=sa.text("false")),
        sa.PrimaryKeyConstraint("id", name="pk_sweep"),
        sa.UniqueConstraint("name", name="uq_sweep_name"),
    )
    op.create_table(
        "revision",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("grid_text", sa.Text(), nullable=False),
        sa.Column("grid_file", sa.Text(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("git_commit", sa.Text()),
        sa.Column("git_dirty", sa.Boolean()),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_revision"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name="fk_revision_sweep_id", ondelete="CASCADE"),
        sa.UniqueConstraint("sweep_id", "number", name="uq_revision_sweep_id_number"),
    )


def _cells() -> None:
    op.create_table(
        "cell",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("attn_type", sa.Text(), nullable=False),
        sa.Column("reg_mode", sa.Text(), nullable=False),
        sa.Column("distractor", sa.Text(), nullable=False),
        sa.Column("memory", sa.Text(), nullable=False),
        sa.Column("window", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("tokens_total", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cell"),
    )
    op.create_index("ix_cell_slug", "cell", ["slug"])
    op.create_table(
        "revision_cell",
        sa.Column("revision_id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.String(12), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("axes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("revision_id", "cell_id", name="pk_revision_cell"),
        sa.ForeignKeyConstraint(
            ["revision_id"], ["revision.id"], name="fk_revision_cell_revision_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name="fk_revision_cell_cell_id"),
    )
    op.create_index("ix_revision_cell_cell_id", "revision_cell", ["cell_id"])


def _attempts() -> None:
    op.create_table(
        "attempt",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.String(12), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("parent_id", sa.Integer()),
        sa.Column("state", sa.String(11), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer()),
        sa.Column("pid_started", sa.Double()),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("heartbeat_at", TIME, nullable=False),
        sa.Column("finished_at", TIME),
        sa.Column("step", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("steps_total", sa.Integer()),
        sa.Column("loss", sa.Double()),
        sa.Column("tokens_per_s", sa.Double()),
        sa.Column("phase", sa.String(8), nullable=False),
        sa.Column("cause", sa.Text()),
        sa.Column("traceback", sa.Text()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("run_dir", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Text()),
        sa.Column("weights", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_attempt"),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name="fk_attempt_cell_id"),
        sa.ForeignKeyConstraint(["parent_id"], ["attempt.id"], name="fk_attempt_parent_id"),
        sa.UniqueConstraint("cell_id", "number", name="uq_attempt_cell_id_number"),
        sa.CheckConstraint("kind IN ('train', 'evaluate')", name=op.f("ck_attempt_kind")),
        sa.CheckConstraint(
            "state IN ('running', 'done', 'failed', 'diverged', 'interrupted')", name=op.f("ck_attempt_state")
        ),
        sa.CheckConstraint("phase IN ('starting', 'training', 'probing')", name=op.f("ck_attempt_phase")),
    )
    op.create_index(
        "one_live_attempt",
        "attempt",
        ["cell_id"],
        unique=True,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )


def _numbers() -> None:
    op.create_table(
        "measurement",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("probe", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("value", sa.Double()),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("n", sa.BigInteger()),
        sa.Column("low", sa.Double()),
        sa.Column("high", sa.Double()),
        sa.Column("reason", sa.Text()),
        sa.Column("seconds", sa.Double()),
        sa.Column("peak_memory", sa.BigInteger()),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_measurement"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_measurement_attempt_id"),
        sa.UniqueConstraint(
            "attempt_id", "probe", "metric", "length", name="uq_measurement_attempt_id_probe_metric_length"
        ),
        sa.CheckConstraint("value IS NOT NULL OR reason IS NOT NULL", name=op.f("ck_measurement_value_or_reason")),
    )
    op.create_table(
        "example",
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("probe", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("item", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("value", sa.Double()),
        sa.Column("detail", sa.JSON()),
        sa.PrimaryKeyConstraint("attempt_id", "probe", "metric", "length", "item", "position", name="pk_example"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_example_attempt_id"),
    )
    op.create_table(
        "curve_point",
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("train_loss", sa.Double()),
        sa.Column("val_loss", sa.Double()),
        sa.Column("tokens_per_s", sa.Double()),
        sa.Column("grad_norm", sa.Double()),
        sa.Column("lr", sa.Double()),
        sa.Column("mfu_paper", sa.Double()),
        sa.Column("mfu", sa.Double()),
        sa.Column("peak_memory", sa.BigInteger()),
        sa.PrimaryKeyConstraint("attempt_id", "step", name="pk_curve_point"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_curve_point_attempt_id"),
    )


def _origins() -> None:
    op.create_table(
        "event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sweep_id", sa.Integer()),
        sa.Column("attempt_id", sa.Integer()),
        sa.Column("cell_id", sa.String(12)),
        sa.Column("at", TIME, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_event"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name="fk_event_sweep_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_event_attempt_id"),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name="fk_event_cell_id"),
    )
    op.create_table(
        "provenance",
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("git_commit", sa.Text()),
        sa.Column("git_dirty", sa.Boolean()),
        sa.Column("packages", sa.JSON(), nullable=False),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("platform", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("gpu_name", sa.Text()),
        sa.Column("gpu_count", sa.Integer(), nullable=False),
        sa.Column("driver", sa.Text()),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("kernels", sa.JSON(), nullable=False),
        sa.Column("tokenizer", sa.Text(), nullable=False),
        sa.Column("corpus", sa.Text(), nullable=False),
        sa.Column("corpus_fingerprint", sa.Text(), nullable=False),
        sa.Column("threads", sa.Integer()),
        sa.Column("extra", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_provenance"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_provenance_attempt_id"),
    )


def upgrade() -> None:
    """From nothing to the first release."""
    _sweeps()
    _cells()
    _attempts()
    _numbers()
    _origins()
    op.execute(RESULTS_VIEW)


def downgrade() -> None:
    """Back to nothing."""
    op.execute("DROP VIEW results")
    for table in (
        "provenance",
        "event",
        "curve_point",
        "example",
        "measurement",
        "attempt",
        "revision_cell",
        "cell",
        "revision",
        "sweep",
    ):
        op.drop_table(table)
