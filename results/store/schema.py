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
    id: Mapped[int] = mapped_column(primary_key=True, doc="Number of the sweep.")
    name: Mapped[str] = mapped_column(Text, doc="Name of the sweep.")
    created_at: Mapped[datetime] = mapped_column(UtcTime, doc="Time of the first launch.")
    launched_at: Mapped[datetime] = mapped_column(UtcTime, doc="Time of the last launch.")
    owner: Mapped[str | None] = mapped_column(Text, doc="Process that runs the sweep; NULL while none does.")
    owner_host: Mapped[str | None] = mapped_column(Text, doc="Host of the owner.")
    owner_pid: Mapped[int | None] = mapped_column(doc="Process id of the owner.")
    owner_started: Mapped[float | None] = mapped_column(
        doc="Creation time of the owner's process, in seconds since the epoch."
    )
    owner_since: Mapped[datetime | None] = mapped_column(UtcTime, doc="Time at which the owner took the sweep.")
    lease_until: Mapped[datetime | None] = mapped_column(
        UtcTime, doc="Time at which the owner's lease ends unless it renews it."
    )
    fence: Mapped[int] = mapped_column(
        default=0,
        server_default="0",
        doc="Fencing token: grows with every owner, and writes under an older one are refused.",
    )
    read_only: Mapped[bool] = mapped_column(
        default=False, server_default=text("false"), doc="True if the sweep cannot be launched."
    )
    request: Mapped[dict[str, Any] | None] = mapped_column(
        Json, doc="Pending requests to the owner: pause, finish, cancel, retry."
    )
    owner_space: Mapped[str | None] = mapped_column(Text, doc="Boot and PID namespace in which owner_pid is valid.")
    tags: Mapped[list[str] | None] = mapped_column(Json, doc="Tags of the sweep.")
    note: Mapped[str | None] = mapped_column(Text, doc="Note of a user about the sweep.")


class RevisionRow(Base):
    """A launch of a sweep whose grid or options differed from the launch before."""

    __tablename__ = "revision"
    __table_args__ = (UniqueConstraint("sweep_id", "number"),)
    id: Mapped[int] = mapped_column(primary_key=True, doc="Number of the row.")
    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), doc="Sweep.")
    number: Mapped[int] = mapped_column(doc="Number of the revision within its sweep, from 1.")
    grid_text: Mapped[str] = mapped_column(Text, doc="Text of the grid file.")
    grid_file: Mapped[str] = mapped_column(Text, doc="Path of the grid file.")
    options: Mapped[dict[str, Any]] = mapped_column(Json, doc="Options of the launch.")
    git_commit: Mapped[str | None] = mapped_column(Text, doc="Commit of the code.")
    git_dirty: Mapped[bool | None] = mapped_column(doc="True if the code had changes that were not committed.")
    created_at: Mapped[datetime] = mapped_column(UtcTime, doc="Time of the launch.")


class CellRow(Base):
    """A complete config. Cells are global: two sweeps that share one train it once."""

    __tablename__ = "cell"
    __table_args__ = (Index(None, "slug"),)
    id: Mapped[str] = mapped_column(String(12), primary_key=True, doc="First 12 characters of the hash of the config.")
    slug: Mapped[str] = mapped_column(Text, doc="Readable name, made of the levels and the seed.")
    seed: Mapped[int] = mapped_column(BigInteger, doc="Seed.")
    attn_type: Mapped[str] = mapped_column(Text, doc="Level of the axis attn_type.")
    reg_mode: Mapped[str] = mapped_column(Text, doc="Level of the axis reg_mode.")
    distractor: Mapped[str] = mapped_column(Text, doc="Level of the axis distractor.")
    memory: Mapped[str] = mapped_column(Text, doc="Level of the axis memory.")
    window: Mapped[str] = mapped_column(Text, doc="Level of the axis window.")
    config: Mapped[dict[str, Any]] = mapped_column(Json, doc="Complete config.")
    tokens_total: Mapped[int] = mapped_column(BigInteger, doc="Training tokens that the config requests.")
    created_at: Mapped[datetime] = mapped_column(UtcTime, doc="Time at which a launch first listed the cell.")
    note: Mapped[str | None] = mapped_column(Text, doc="Note of a user about the cell.")


class RevisionCellRow(Base):
    """Link between a revision and a cell that it lists, in the grid's order.

    Deleting a sweep deletes these links, never the cells.
    """

    __tablename__ = "revision_cell"
    __table_args__ = (Index(None, "cell_id"),)
    revision_id: Mapped[int] = mapped_column(
        ForeignKey("revision.id", ondelete="CASCADE"), primary_key=True, doc="Revision."
    )
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"), primary_key=True, doc="Cell.")
    position: Mapped[int] = mapped_column(doc="Position of the cell in the grid, from 0.")
    axes: Mapped[dict[str, str]] = mapped_column(Json, doc="Level of each axis that the grid varies.")


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
    id: Mapped[int] = mapped_column(primary_key=True, doc="Number of the row.")
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"), doc="Cell.")
    number: Mapped[int] = mapped_column(doc="Number of the attempt within its cell, from 1.")
    kind: Mapped[str] = mapped_column(String(8), doc="Training, evaluation, or evaluation of an external model.")
    parent_id: Mapped[int | None] = mapped_column(
        ForeignKey("attempt.id"), doc="Attempt whose weights or checkpoint this one uses."
    )
    state: Mapped[str] = mapped_column(String(11), doc="State of the attempt.")
    fence: Mapped[int] = mapped_column(doc="Fencing token under which the attempt may write.")
    owner: Mapped[str] = mapped_column(Text, doc="Process that started the attempt.")
    host: Mapped[str] = mapped_column(Text, doc="Host on which it runs.")
    pid: Mapped[int | None] = mapped_column(doc="Process id.")
    pid_started: Mapped[float | None] = mapped_column(doc="Creation time of the process, in seconds since the epoch.")
    started_at: Mapped[datetime] = mapped_column(UtcTime, doc="Start of the attempt.")
    heartbeat_at: Mapped[datetime] = mapped_column(UtcTime, doc="Last sign of life.")
    finished_at: Mapped[datetime | None] = mapped_column(UtcTime, doc="End of the attempt.")
    step: Mapped[int] = mapped_column(default=0, server_default="0", doc="Optimizer steps so far.")
    steps_total: Mapped[int | None] = mapped_column(doc="Optimizer steps of the complete training.")
    loss: Mapped[float | None] = mapped_column(doc="Last training loss.")
    tokens_per_s: Mapped[float | None] = mapped_column(doc="Last training speed, in tokens per second.")
    phase: Mapped[str] = mapped_column(String(8), doc="Phase of the attempt.")
    cause: Mapped[str | None] = mapped_column(Text, doc="Reason for its end, in words.")
    traceback: Mapped[str | None] = mapped_column(Text, doc="Traceback of the error that ended it.")
    exit_code: Mapped[int | None] = mapped_column(doc="Exit code of the process.")
    run_dir: Mapped[str] = mapped_column(Text, doc="Folder of its files, relative to the runs folder.")
    checkpoint: Mapped[str | None] = mapped_column(
        Text, doc="Newest checkpoint: a path relative to the runs folder, or an address."
    )
    weights: Mapped[str | None] = mapped_column(
        Text, doc="Final weights: a path relative to the runs folder, or an address."
    )
    failure: Mapped[str | None] = mapped_column(String(14), doc="Failure class.")
    deviation: Mapped[dict[str, Any] | None] = mapped_column(
        Json, doc="Settings in which the attempt differs from the config of its cell, by dotted path."
    )
    pid_space: Mapped[str | None] = mapped_column(Text, doc="Boot and PID namespace in which pid is valid.")
    imported: Mapped[bool] = mapped_column(
        default=False,
        server_default=text("false"),
        doc="True if the attempt came with a bundle; its paths are not valid on this machine.",
    )


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
    id: Mapped[int] = mapped_column(primary_key=True, doc="Number of the row.")
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"), doc="Attempt.")
    probe: Mapped[str] = mapped_column(Text, doc="Probe.")
    metric: Mapped[str] = mapped_column(Text, doc="Metric of the probe.")
    length: Mapped[int] = mapped_column(
        default=0, server_default="0", doc="Context length in tokens; 0 for a metric without one."
    )
    value: Mapped[float | None] = mapped_column(doc="Value in unit; NULL if there is none.")
    unit: Mapped[str] = mapped_column(Text, doc="Unit of the value.")
    n: Mapped[int | None] = mapped_column(BigInteger, doc="Number of samples.")
    low: Mapped[float | None] = mapped_column(doc="Lower end of the confidence interval.")
    high: Mapped[float | None] = mapped_column(doc="Upper end of the confidence interval.")
    reason: Mapped[str | None] = mapped_column(
        Text, doc="Reason for a missing value; a short code, a colon, and details."
    )
    seconds: Mapped[float | None] = mapped_column(doc="Duration of the measurement.")
    peak_memory: Mapped[int | None] = mapped_column(BigInteger, doc="Peak memory of the measurement, in bytes.")
    created_at: Mapped[datetime] = mapped_column(UtcTime, doc="Time of the measurement.")
    source: Mapped[str | None] = mapped_column(
        String(64), doc="SHA-256 of the plugin file that defines the probe; NULL for probes of the package."
    )
    description: Mapped[dict[str, Any] | None] = mapped_column(
        Json, doc="Declaration of a metric that the package does not define."
    )


class ExampleRow(Base):
    """Result of one item of a probe."""

    __tablename__ = "example"
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"), primary_key=True, doc="Attempt.")
    probe: Mapped[str] = mapped_column(Text, primary_key=True, doc="Probe.")
    metric: Mapped[str] = mapped_column(Text, primary_key=True, doc="Metric of the probe.")
    length: Mapped[int] = mapped_column(
        primary_key=True,
        default=0,
        server_default="0",
        doc="Context length in tokens; 0 for a metric without one. For a generated sample, the training step.",
    )
    item: Mapped[int] = mapped_column(
        primary_key=True, doc="Number of the document or trial, which is the same one in every cell."
    )
    position: Mapped[int] = mapped_column(
        primary_key=True,
        default=0,
        server_default="0",
        doc="Position inside the item, such as that of the needle; 0 without one.",
    )
    value: Mapped[float | None] = mapped_column(doc="Value of the item, in the unit of the metric.")
    detail: Mapped[dict[str, Any] | None] = mapped_column(Json, doc="Further facts, which the probe defines.")


class CurvePointRow(Base):
    """Training curve: a row per validation, and between them at steps 1, 2, 4, 8, ... and about a hundred more."""

    __tablename__ = "curve_point"
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"), primary_key=True, doc="Attempt.")
    step: Mapped[int] = mapped_column(primary_key=True, doc="Optimizer step.")
    tokens: Mapped[int] = mapped_column(BigInteger, doc="Training tokens since step 0.")
    wall_s: Mapped[float] = mapped_column(doc="Training seconds so far, without validation.")
    train_loss: Mapped[float | None] = mapped_column(doc="Training loss, in nats per token.")
    val_loss: Mapped[float | None] = mapped_column(
        doc="Validation loss, in nats per token; NULL where no validation ran."
    )
    tokens_per_s: Mapped[float | None] = mapped_column(doc="Training speed since the last point, in tokens per second.")
    grad_norm: Mapped[float | None] = mapped_column(doc="Norm of the gradient.")
    lr: Mapped[float | None] = mapped_column(doc="Factor of the learning-rate schedule.")
    mfu_paper: Mapped[float | None] = mapped_column(doc="Model FLOP/s utilization by the paper's count, as a fraction.")
    mfu: Mapped[float | None] = mapped_column(doc="Model FLOP/s utilization by the exact count, as a fraction.")
    peak_memory: Mapped[int | None] = mapped_column(BigInteger, doc="Peak memory so far, in bytes.")


class EventRow(Base):
    """Log entry for people. Deleted with its sweep."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "sweep_id"), Index(None, "attempt_id"), Index(None, "cell_id"))
    id: Mapped[int] = mapped_column(primary_key=True, doc="Number of the row.")
    sweep_id: Mapped[int | None] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), doc="Sweep.")
    attempt_id: Mapped[int | None] = mapped_column(ForeignKey("attempt.id"), doc="Attempt.")
    cell_id: Mapped[str | None] = mapped_column(ForeignKey("cell.id"), doc="Cell.")
    at: Mapped[datetime] = mapped_column(UtcTime, doc="Time of the event.")
    kind: Mapped[str] = mapped_column(Text, doc="Kind of the event.")
    message: Mapped[str] = mapped_column(Text, doc="The event in words.")


class StudyRow(Base):
    """State of the sampler of a study.

    `part` distinguishes the studies of a sweep; it is empty if there is only one.
    """

    __tablename__ = "study"
    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), primary_key=True, doc="Sweep.")
    part: Mapped[str] = mapped_column(
        Text, primary_key=True, doc="Name of the study within its sweep; empty if there is only one."
    )
    memory: Mapped[dict[str, Any]] = mapped_column(Json, doc="State of the sampler.")


class TrialRow(Base):
    """Proposal of a study, and the result of its cell."""

    __tablename__ = "trial"
    __table_args__ = (
        CheckConstraint(f"standing IN {get_args(TrialStanding)}", name="standing"),
        ForeignKeyConstraint(
            ["sweep_id", "part"], ["study.sweep_id", "study.part"], name="fk_trial_study", ondelete="CASCADE"
        ),
        Index(None, "cell_id"),
    )
    sweep_id: Mapped[int] = mapped_column(primary_key=True, doc="Sweep.")
    part: Mapped[str] = mapped_column(Text, primary_key=True, doc="Study of the sweep.")
    number: Mapped[int] = mapped_column(primary_key=True, doc="Number of the trial, from 0.")
    cell_id: Mapped[str | None] = mapped_column(
        ForeignKey("cell.id"), doc="Cell of the trial; NULL if the proposed settings give no valid cell."
    )
    params: Mapped[dict[str, Any]] = mapped_column(Json, doc="Proposed levels, by dotted path.")
    standing: Mapped[str] = mapped_column(String(8), doc="State of the trial; asked while it has no result.")
    reason: Mapped[str | None] = mapped_column(Text, doc="Reason of a failure or of pruning.")
    objectives: Mapped[list[float] | None] = mapped_column(
        Json, doc="Values of the objectives, in the order of the search."
    )
    curve: Mapped[list[list[float]] | None] = mapped_column(
        Json, doc="Pairs of a rung and the value of the first objective there; a pruner decides at rungs."
    )
    attrs: Mapped[dict[str, Any]] = mapped_column(Json, doc="State that the sampler stores for the trial.")
    asked_at: Mapped[datetime] = mapped_column(UtcTime, doc="Time of the proposal.")
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime, doc="Time of the result.")


class ProvenanceRow(Base):
    """Origin of the numbers of an attempt: config, code, packages, machine and data."""

    __tablename__ = "provenance"
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempt.id"), primary_key=True, doc="Attempt.")
    config: Mapped[dict[str, Any]] = mapped_column(Json, doc="Config that the attempt ran.")
    seed: Mapped[int] = mapped_column(BigInteger, doc="Seed.")
    git_commit: Mapped[str | None] = mapped_column(Text, doc="Commit of the code.")
    git_dirty: Mapped[bool | None] = mapped_column(doc="True if the code had changes that were not committed.")
    packages: Mapped[dict[str, Any]] = mapped_column(Json, doc="Version of each package that can change a result.")
    python: Mapped[str] = mapped_column(Text, doc="Version of Python.")
    platform: Mapped[str] = mapped_column(Text, doc="Operating system and processor.")
    host: Mapped[str] = mapped_column(Text, doc="Host.")
    device: Mapped[str] = mapped_column(Text, doc="Device of PyTorch.")
    gpu_name: Mapped[str | None] = mapped_column(Text, doc="Name of the GPU.")
    gpu_count: Mapped[int] = mapped_column(doc="Number of GPUs that the attempt used.")
    driver: Mapped[str | None] = mapped_column(Text, doc="Version of the NVIDIA driver.")
    dtype: Mapped[str] = mapped_column(Text, doc="Number types, in words.")
    kernels: Mapped[dict[str, Any]] = mapped_column(Json, doc="Implementation of each operation.")
    tokenizer: Mapped[str] = mapped_column(Text, doc="Tokenizer.")
    corpus: Mapped[str] = mapped_column(Text, doc="Corpus.")
    corpus_fingerprint: Mapped[str] = mapped_column(Text, doc="SHA-256 of the tokenized corpus.")
    threads: Mapped[int | None] = mapped_column(doc="Threads of PyTorch.")
    extra: Mapped[dict[str, Any]] = mapped_column(Json, doc="Further facts.")
    gpu_uuid: Mapped[str | None] = mapped_column(Text, doc="Identifier of the GPU.")
    co_tenants: Mapped[int | None] = mapped_column(doc="Other attempts on the same GPU.")
