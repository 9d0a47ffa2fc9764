"""Tables of the database, as SQLAlchemy models. Imports neither alembic nor pandas, so that `status` starts quickly.

The migrations create the database itself (and the view `results`); a test compares the two. Times are text, ISO-8601 in
UTC with milliseconds and Z: they have a fixed width, so they sort, and are readable in any SQL shell.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, get_args

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Connection,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    event,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from .records import AttemptKind, AttemptState, Phase, TrialStanding

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009")
"""All migrations, oldest first.

A database at an earlier one is outdated; at an unlisted one it is newer than this program.
"""
HEAD = REVISIONS[-1]


class UtcTime(TypeDecorator[datetime]):
    """Aware datetime, stored as `2026-01-02T03:04:05.678Z`. A naive one raises ValueError."""

    impl = String(24)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:
        """Return the time as text in UTC with milliseconds, None for None.

        Raises:
            ValueError: the datetime has no time zone.
        """
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; times in the database are UTC")
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime | None:
        return None if value is None else datetime.fromisoformat(value)


class UtcNow(FunctionElement[datetime]):
    """The database's own clock, in the format of UtcTime; leases and heartbeats use no other clock."""

    type = UtcTime()
    inherit_cache = True


@compiles(UtcNow, "sqlite")
def _sqlite_now(element: UtcNow, compiler: SQLCompiler, **kw: Any) -> str:
    return "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')"


@compiles(UtcNow, "postgresql")
def _postgresql_now(element: UtcNow, compiler: SQLCompiler, **kw: Any) -> str:
    return "to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"')"


Json = JSON(none_as_null=True)


class Base(DeclarativeBase):
    """Base class of the tables. It names every constraint by a pattern; the migrations spell the names out."""

    type_annotation_map: ClassVar = {float: Double}  # explicit, since SQLAlchemy's own choice changed between releases
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )


class SweepRow(Base):
    """A sweep: its name, the lease of the process that runs it, pending requests, tags and note."""

    __tablename__ = "sweep"
    __table_args__ = (UniqueConstraint("name"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    launched_at: Mapped[datetime] = mapped_column(UtcTime)
    owner: Mapped[str | None] = mapped_column(Text)
    owner_host: Mapped[str | None] = mapped_column(Text)
    owner_pid: Mapped[int | None]
    owner_started: Mapped[float | None]
    owner_since: Mapped[datetime | None] = mapped_column(UtcTime)
    lease_until: Mapped[datetime | None] = mapped_column(UtcTime)
    fence: Mapped[int] = mapped_column(default=0, server_default="0")
    read_only: Mapped[bool] = mapped_column(default=False, server_default=text("false"))
    request: Mapped[dict[str, Any] | None] = mapped_column(Json)
    owner_space: Mapped[str | None] = mapped_column(Text)
    tags: Mapped[list[str] | None] = mapped_column(Json)
    note: Mapped[str | None] = mapped_column(Text)


class RevisionRow(Base):
    """A launch of a sweep whose grid or options differed from the launch before."""

    __tablename__ = "revision"
    __table_args__ = (UniqueConstraint("sweep_id", "number"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"))
    number: Mapped[int]
    grid_text: Mapped[str] = mapped_column(Text)
    grid_file: Mapped[str] = mapped_column(Text)
    options: Mapped[dict[str, Any]] = mapped_column(Json)
    git_commit: Mapped[str | None] = mapped_column(Text)
    git_dirty: Mapped[bool | None]
    created_at: Mapped[datetime] = mapped_column(UtcTime)


class CellRow(Base):
    """A complete config. Cells are global: two sweeps that share one train it once."""

    __tablename__ = "cell"
    __table_args__ = (Index(None, "slug"),)
    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    slug: Mapped[str] = mapped_column(Text)
    seed: Mapped[int] = mapped_column(BigInteger)
    attn_type: Mapped[str] = mapped_column(Text)
    reg_mode: Mapped[str] = mapped_column(Text)
    distractor: Mapped[str] = mapped_column(Text)
    memory: Mapped[str] = mapped_column(Text)
    window: Mapped[str] = mapped_column(Text)
    config: Mapped[dict[str, Any]] = mapped_column(Json)
    tokens_total: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    note: Mapped[str | None] = mapped_column(Text)


class RevisionCellRow(Base):
    """Link between a revision and a cell that it lists, in the grid's order.

    Deleting a sweep deletes these links, never the cells.
    """

    __tablename__ = "revision_cell"
    __table_args__ = (Index(None, "cell_id"),)
    revision_id: Mapped[int] = mapped_column(ForeignKey("revision.id", ondelete="CASCADE"), primary_key=True)
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"), primary_key=True)
    position: Mapped[int]
    axes: Mapped[dict[str, str]] = mapped_column(Json)


IS_RUNNING = text("state = 'running'")


class AttemptRow(Base):
    """Execution of a cell. The partial unique index allows one running attempt per cell."""

    __tablename__ = "attempt"
    __table_args__ = (
        UniqueConstraint("cell_id", "number"),
        CheckConstraint(f"kind IN {get_args(AttemptKind)}", name="kind"),
        CheckConstraint(f"state IN {get_args(AttemptState)}", name="state"),
        CheckConstraint(f"phase IN {get_args(Phase)}", name="phase"),
        Index("one_live_attempt", "cell_id", unique=True, sqlite_where=IS_RUNNING),
        Index(None, "parent_id"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"))
    number: Mapped[int]
    kind: Mapped[str] = mapped_column(String(8))
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("attempt.id"))
    state: Mapped[str] = mapped_column(String(11))
    fence: Mapped[int]
    owner: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int | None]
    pid_started: Mapped[float | None]
    started_at: Mapped[datetime] = mapped_column(UtcTime)
    heartbeat_at: Mapped[datetime] = mapped_column(UtcTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcTime)
    step: Mapped[int] = mapped_column(default=0, server_default="0")
    steps_total: Mapped[int | None]
    loss: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    phase: Mapped[str] = mapped_column(String(8))
    cause: Mapped[str | None] = mapped_column(Text)
    traceback: Mapped[str | None] = mapped_column(Text)
    exit_code: Mapped[int | None]
    run_dir: Mapped[str] = mapped_column(Text)
    checkpoint: Mapped[str | None] = mapped_column(Text)
    weights: Mapped[str | None] = mapped_column(Text)
    failure: Mapped[str | None] = mapped_column(String(14))
    deviation: Mapped[dict[str, Any] | None] = mapped_column(Json)
    pid_space: Mapped[str | None] = mapped_column(Text)
    imported: Mapped[bool] = mapped_column(default=False, server_default=text("false"))


@event.listens_for(AttemptRow.__table__, "before_create")
def _set_postgresql_condition(table: Table, connection: Connection, **_: Any) -> None:
    """Set the condition of the partial index for PostgreSQL just before the table is created.

    In the definition of the index, the condition would load the PostgreSQL dialect for every command.
    """
    if connection.dialect.name == "postgresql":
        index = next(index for index in table.indexes if index.name == "one_live_attempt")
        index.dialect_options["postgresql"]["where"] = IS_RUNNING


class MeasurementRow(Base):
    """Number of a probe, or the reason for its absence."""

    __tablename__ = "measurement"
    __table_args__ = (
        UniqueConstraint("attempt_id", "probe", "metric", "length"),
        CheckConstraint("value IS NOT NULL OR reason IS NOT NULL", name="value_or_reason"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"))
    probe: Mapped[str] = mapped_column(Text)
    metric: Mapped[str] = mapped_column(Text)
    length: Mapped[int] = mapped_column(default=0, server_default="0")
    value: Mapped[float | None]
    unit: Mapped[str] = mapped_column(Text)
    n: Mapped[int | None] = mapped_column(BigInteger)
    low: Mapped[float | None]
    high: Mapped[float | None]
    reason: Mapped[str | None] = mapped_column(Text)
    seconds: Mapped[float | None]
    peak_memory: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    source: Mapped[str | None] = mapped_column(String(64))
    description: Mapped[dict[str, Any] | None] = mapped_column(Json)


class ExampleRow(Base):
    """Result of one item of a probe."""

    __tablename__ = "example"
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"), primary_key=True)
    probe: Mapped[str] = mapped_column(Text, primary_key=True)
    metric: Mapped[str] = mapped_column(Text, primary_key=True)
    length: Mapped[int] = mapped_column(primary_key=True, default=0, server_default="0")
    item: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, default=0, server_default="0")
    value: Mapped[float | None]
    detail: Mapped[dict[str, Any] | None] = mapped_column(Json)


class CurvePointRow(Base):
    """Training curve: one row per reported step."""

    __tablename__ = "curve_point"
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    tokens: Mapped[int] = mapped_column(BigInteger)
    wall_s: Mapped[float]
    train_loss: Mapped[float | None]
    val_loss: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    grad_norm: Mapped[float | None]
    lr: Mapped[float | None]
    mfu_paper: Mapped[float | None]
    mfu: Mapped[float | None]
    peak_memory: Mapped[int | None] = mapped_column(BigInteger)


class EventRow(Base):
    """Log entry for people. Deleted with its sweep."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "sweep_id"), Index(None, "attempt_id"), Index(None, "cell_id"))
    id: Mapped[int] = mapped_column(primary_key=True)
    sweep_id: Mapped[int | None] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"))
    attempt_id: Mapped[int | None] = mapped_column(ForeignKey("attempt.id"))
    cell_id: Mapped[str | None] = mapped_column(ForeignKey("cell.id"))
    at: Mapped[datetime] = mapped_column(UtcTime)
    kind: Mapped[str] = mapped_column(Text)
    message: Mapped[str] = mapped_column(Text)


class StudyRow(Base):
    """State of the sampler of a study.

    `part` distinguishes the studies of a sweep; it is empty if there is only one.
    """

    __tablename__ = "study"
    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), primary_key=True)
    part: Mapped[str] = mapped_column(Text, primary_key=True)
    memory: Mapped[dict[str, Any]] = mapped_column(Json)


class TrialRow(Base):
    """Proposal of a study, and the result of its cell; the columns are described at studies.optuna_study.Trial.

    `objectives` are its values; `asked_at` and `ended_at` are times of the database.
    """

    __tablename__ = "trial"
    __table_args__ = (
        CheckConstraint(f"standing IN {get_args(TrialStanding)}", name="standing"),
        ForeignKeyConstraint(
            ["sweep_id", "part"], ["study.sweep_id", "study.part"], name="fk_trial_study", ondelete="CASCADE"
        ),
        Index(None, "cell_id"),
    )
    sweep_id: Mapped[int] = mapped_column(primary_key=True)
    part: Mapped[str] = mapped_column(Text, primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    cell_id: Mapped[str | None] = mapped_column(ForeignKey("cell.id"))
    params: Mapped[dict[str, Any]] = mapped_column(Json)
    standing: Mapped[str] = mapped_column(String(8))
    reason: Mapped[str | None] = mapped_column(Text)
    objectives: Mapped[list[float] | None] = mapped_column(Json)
    curve: Mapped[list[list[float]] | None] = mapped_column(Json)
    attrs: Mapped[dict[str, Any]] = mapped_column(Json)
    asked_at: Mapped[datetime] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)


class ProvenanceRow(Base):
    """Origin of the numbers of an attempt: config, code, packages, machine and data."""

    __tablename__ = "provenance"
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"), primary_key=True)
    config: Mapped[dict[str, Any]] = mapped_column(Json)
    seed: Mapped[int] = mapped_column(BigInteger)
    git_commit: Mapped[str | None] = mapped_column(Text)
    git_dirty: Mapped[bool | None]
    packages: Mapped[dict[str, Any]] = mapped_column(Json)
    python: Mapped[str] = mapped_column(Text)
    platform: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    device: Mapped[str] = mapped_column(Text)
    gpu_name: Mapped[str | None] = mapped_column(Text)
    gpu_count: Mapped[int]
    driver: Mapped[str | None] = mapped_column(Text)
    dtype: Mapped[str] = mapped_column(Text)
    kernels: Mapped[dict[str, Any]] = mapped_column(Json)
    tokenizer: Mapped[str] = mapped_column(Text)
    corpus: Mapped[str] = mapped_column(Text)
    corpus_fingerprint: Mapped[str] = mapped_column(Text)
    threads: Mapped[int | None]
    extra: Mapped[dict[str, Any]] = mapped_column(Json)
    gpu_uuid: Mapped[str | None] = mapped_column(Text)
    co_tenants: Mapped[int | None]
