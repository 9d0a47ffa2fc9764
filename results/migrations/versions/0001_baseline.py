"""The first release: all tables, the one-live-attempt index and the view `results`."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TYPES: dict[str, sa.types.TypeEngine[Any]] = {
    "time": sa.String(24), "id": sa.String(12), "state": sa.String(11), "word": sa.String(8), "int": sa.Integer(), "big": sa.BigInteger(),
    "real": sa.Double(), "bool": sa.Boolean(), "json": sa.JSON(), "text": sa.Text(),
}  # fmt: skip
"""Types of columns; `time` is ISO-8601 in UTC with milliseconds and Z, `name` a kind or a phase."""


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


def _create(table: str, columns: str, *constraints: sa.Constraint, key: tuple[str, ...] = ("id",)) -> None:
    """Create a table from columns written as `name:type`.

    Args:
        table: name.
        columns: columns, separated by spaces; types are the keys of TYPES. A `?` after the type makes the column
            nullable, and `=` precedes a server default.
        *constraints: constraints besides the primary key.
        key: columns of the primary key.
    """
    columns_ = []
    for column in columns.split():
        name, kind, optional, default = re.fullmatch(r"(\w+):(\w+)(\??)(?:=(\w+))?", column).groups()  # type: ignore[union-attr]
        stands = sa.text(default) if default == "false" else default
        columns_.append(sa.Column(name, TYPES[kind], nullable=bool(optional), server_default=stands))
    op.create_table(table, *columns_, sa.PrimaryKeyConstraint(*key, name=f"pk_{table}"), *constraints)


def _refers(table: str, column: str, parent: str, ondelete: str | None = None) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{parent}.id"], name=f"fk_{table}_{column}", ondelete=ondelete)


def _unique(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=f"uq_{table}_{'_'.join(columns)}")


def _check(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def upgrade() -> None:
    """Create the tables, the index and the view of the first release."""
    _create(
        "sweep",
        "id:int name:text created_at:time launched_at:time owner:text? owner_host:text? owner_pid:int? owner_started:real? "
        "owner_since:time? lease_until:time? fence:int=0 read_only:bool=false",
        _unique("sweep", "name"),
    )
    _create(
        "revision",
        "id:int sweep_id:int number:int grid_text:text grid_file:text options:json git_commit:text? git_dirty:bool? created_at:time",
        _refers("revision", "sweep_id", "sweep", "CASCADE"),
        _unique("revision", "sweep_id", "number"),
    )
    _create(
        "cell",
        "id:id slug:text seed:big attn_type:text reg_mode:text distractor:text memory:text window:text config:json tokens_total:big "
        "created_at:time",
    )
    op.create_index("ix_cell_slug", "cell", ["slug"])
    _create(
        "revision_cell",
        "revision_id:int cell_id:id position:int axes:json",
        _refers("revision_cell", "revision_id", "revision", "CASCADE"),
        _refers("revision_cell", "cell_id", "cell"),
        key=("revision_id", "cell_id"),
    )
    op.create_index("ix_revision_cell_cell_id", "revision_cell", ["cell_id"])
    _create(
        "attempt",
        "id:int cell_id:id number:int kind:word parent_id:int? state:state fence:int owner:text host:text pid:int? pid_started:real? "
        "started_at:time heartbeat_at:time finished_at:time? step:int=0 steps_total:int? loss:real? tokens_per_s:real? phase:word "
        "cause:text? traceback:text? exit_code:int? run_dir:text checkpoint:text? weights:text?",
        _refers("attempt", "cell_id", "cell"),
        _refers("attempt", "parent_id", "attempt"),
        _unique("attempt", "cell_id", "number"),
        _check("attempt", "kind", "kind IN ('train', 'evaluate')"),
        _check("attempt", "state", "state IN ('running', 'done', 'failed', 'diverged', 'interrupted')"),
        _check("attempt", "phase", "phase IN ('starting', 'training', 'probing')"),
    )
    live = sa.text("state = 'running'")
    op.create_index("one_live_attempt", "attempt", ["cell_id"], unique=True, sqlite_where=live, postgresql_where=live)
    _create(
        "measurement",
        "id:int attempt_id:int probe:text metric:text length:int=0 value:real? unit:text n:big? low:real? high:real? reason:text? "
        "seconds:real? peak_memory:big? created_at:time",
        _refers("measurement", "attempt_id", "attempt"),
        _unique("measurement", "attempt_id", "probe", "metric", "length"),
        _check("measurement", "value_or_reason", "value IS NOT NULL OR reason IS NOT NULL"),
    )
    _create(
        "example",
        "attempt_id:int probe:text metric:text length:int=0 item:int position:int=0 value:real? detail:json?",
        _refers("example", "attempt_id", "attempt"),
        key=("attempt_id", "probe", "metric", "length", "item", "position"),
    )
    _create(
        "curve_point",
        "attempt_id:int step:int tokens:big wall_s:real train_loss:real? val_loss:real? tokens_per_s:real? grad_norm:real? lr:real? "
        "mfu_paper:real? mfu:real? peak_memory:big?",
        _refers("curve_point", "attempt_id", "attempt"),
        key=("attempt_id", "step"),
    )
    _create(
        "event",
        "id:int sweep_id:int? attempt_id:int? cell_id:id? at:time kind:text message:text",
        _refers("event", "sweep_id", "sweep", "CASCADE"),
        _refers("event", "attempt_id", "attempt"),
        _refers("event", "cell_id", "cell"),
    )
    _create(
        "provenance",
        "attempt_id:int config:json seed:big git_commit:text? git_dirty:bool? packages:json python:text platform:text host:text "
        "device:text gpu_name:text? gpu_count:int driver:text? dtype:text kernels:json tokenizer:text corpus:text "
        "corpus_fingerprint:text threads:int? extra:json",
        _refers("provenance", "attempt_id", "attempt"),
        key=("attempt_id",),
    )
    op.execute(RESULTS_VIEW)


def downgrade() -> None:
    """Drop the view and all tables, with their rows."""
    op.execute("DROP VIEW results")
    tables = "provenance event curve_point example measurement attempt revision_cell cell revision sweep"
    for table in tables.split():
        op.drop_table(table)
