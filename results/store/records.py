"""Plain records that go into and come out of the database, and the status of a cell.

The records are frozen dataclasses with keyword-only fields and are independent of SQLAlchemy. Functions at the end look
up the process of an owner.

Times are aware UTC datetimes, durations seconds, sizes bytes, losses nats per token, accuracies and MFU fractions.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..console.text import storable_text
from ..metrics import SAMPLES
from ..weights import recorded_hash

if TYPE_CHECKING:
    import psutil

AXES = ("attn_type", "reg_mode", "distractor", "memory", "window")
"""The five factors that are columns of `cell` and of the view `results`.

Further axes are stored in the JSON column `axes`.
"""
AttemptKind = Literal["train", "evaluate", "external"]
"""Kinds of attempts; `external` is an evaluation of a model that was trained outside this program."""
Phase = Literal["starting", "training", "probing"]
AttemptState = Literal["running", "done", "failed", "diverged", "interrupted"]
CellStateName = Literal["new", "running", "done", "failed", "diverged", "interrupted", "pruned"]
TrialStanding = Literal["asked", "done", "pruned", "diverged", "failed"]
SAMPLE_METRIC = "text"
"""Metric under which a generated sample is stored, as an example without a value."""
MeasurementKey = tuple[str, str, int]
"""Key of a measurement: (probe, metric, context length in tokens; 0 for a measurement without a context length)."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Process that owns a sweep or an attempt.

    `started` is the creation time of the process (seconds since the epoch, from psutil); it distinguishes the process
    from a later one with the same pid. The field space identifies the boot and the PID namespace in which `pid` is
    valid; None for unknown.
    """

    name: str
    host: str
    pid: int
    started: float
    space: str | None = None

    def is_same_process(self, owner: Owner) -> bool:
        """Return True if both records describe one process, whatever their `name` fields are.

        Host and pid must be equal and the creation times less than one second apart; an unknown PID namespace matches
        any other.
        """
        in_other_space = None not in (self.space, owner.space) and self.space != owner.space
        same = (self.host, self.pid) == (owner.host, owner.pid) and abs(self.started - owner.started) < 1.0
        return same and not in_other_space


@dataclass(frozen=True, kw_only=True)
class CellRecord:
    """A cell as a revision lists it.

    `levels` holds the level of each of the five axes attn_type, reg_mode, distractor, memory and window as text. `axes`
    maps each axis that the grid itself varied to its level as text, in the grid's order. `config` is the complete
    frozen config, `tokens` the number of training tokens that it requests.
    """

    id: str
    slug: str
    seed: int
    levels: Mapping[str, str]
    config: Mapping[str, Any]
    axes: Mapping[str, str] = field(default_factory=dict)
    tokens: int = 0
    note: str | None = None
    """Note of a user about the cell."""

    def __post_init__(self) -> None:
        if set(self.levels) != set(AXES):
            raise ValueError(f"levels of cell {self.id} must be exactly {', '.join(AXES)}, not {sorted(self.levels)}")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An execution of a cell; the fields are the columns of the table `attempt`.

    `number` counts the attempts of the cell from 1. `parent_id` is the attempt whose weights or checkpoint this one
    uses. `fence` is the fencing token under which it may write. `run_dir` is relative to the runs folder; `checkpoint`
    and `weights` are too, or full addresses. `step` of `steps_total` is the progress; `cause` says in words why it
    ended.
    """

    id: int
    cell_id: str
    number: int
    kind: AttemptKind
    parent_id: int | None
    state: AttemptState
    fence: int
    owner: str
    host: str
    pid: int | None
    pid_started: float | None
    started_at: datetime
    heartbeat_at: datetime
    finished_at: datetime | None
    step: int
    steps_total: int | None
    loss: float | None
    tokens_per_s: float | None
    phase: Phase
    cause: str | None
    traceback: str | None
    exit_code: int | None
    run_dir: str
    checkpoint: str | None
    weights: str | None
    failure: str | None = None
    """Failure class (see failure_classes.py); `pruned` for a cell that a study ended early."""
    deviation: Mapping[str, Any] | None = None
    """Settings in which this attempt differs from its cell's config, by dotted path; None for no difference."""
    pid_space: str | None = None
    """Boot and PID namespace in which `pid` is valid, as in Owner."""
    imported: bool = False
    """True for an attempt that came with a bundle; its paths are not valid on this machine."""

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of the attempt to its end, or to its last heartbeat while it has no end."""
        return ((self.finished_at or self.heartbeat_at) - self.started_at).total_seconds()


@dataclass(frozen=True, kw_only=True)
class CellState:
    """A cell of a sweep and its progress.

    `state` is the state of the newest attempt, `new` without attempts, or `pruned` for a cell that a study ended early.
    `attempt_*`, `step`, `loss`, `cause` and the other run-time fields belong to the newest attempt.
    `trained_attempt_id` and `weights` belong to the newest finished training, `checkpoint` to the newest training that
    has one. `measured` holds every (probe, metric, length) with a value or a reason in a finished attempt.
    """

    cell_id: str
    slug: str
    position: int
    seed: int
    levels: Mapping[str, str]
    axes: Mapping[str, str]
    tokens_total: int
    state: CellStateName
    attempt_id: int | None
    attempt_number: int | None
    kind: AttemptKind | None
    phase: Phase | None
    trained_attempt_id: int | None
    weights: str | None
    checkpoint: str | None
    step: int | None
    steps_total: int | None
    loss: float | None
    tokens_per_s: float | None
    started_at: datetime | None
    heartbeat_at: datetime | None
    finished_at: datetime | None
    cause: str | None
    host: str | None
    pid: int | None
    pid_started: float | None
    measured: frozenset[MeasurementKey]


def extra_axes(cells: Iterable[CellState]) -> list[str]:
    """Return the axes beyond the five AXES (and `seed`) whose level differs between the cells.

    They come in the order in which the cells first name them, which is the grid's. A cell without the axis counts as
    one more level. Empty for fewer than two cells.
    """
    listed = list(cells)
    names = dict.fromkeys(name for cell in listed for name in cell.axes if name not in (*AXES, "seed"))
    return [name for name in names if len({cell.axes.get(name) for cell in listed}) > 1]


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """A sweep, its newest revision, and that revision's cells counted by state: a line of `status` without a sweep.

    `cells` is the number of cells of the revision. `counts` maps a state (as in CellStateName) to its number of cells;
    states without cells are absent.
    """

    name: str
    created_at: datetime
    launched_at: datetime
    revision: int
    cells: int
    counts: Mapping[str, int]
    owner: Owner | None
    owner_since: datetime | None
    lease_until: datetime | None
    fence: int
    read_only: bool
    request: Mapping[str, Any] = field(default_factory=dict)
    """Pending requests of users to the process that runs the sweep: pause, finish, cancel, retry."""
    tags: tuple[str, ...] = ()
    note: str | None = None
    """Note of a user about the sweep."""


@dataclass(frozen=True, kw_only=True)
class RevisionRecord:
    """A recorded launch: the grid's text, the options of the launch, and the code version."""

    id: int
    sweep: str
    number: int
    grid_text: str
    grid_file: str
    options: Mapping[str, Any]
    git_commit: str | None
    git_dirty: bool | None
    created_at: datetime

    @property
    def printed_in(self) -> str | None:
        """Source and version, as one word, that print the numbers of a published sweep; None for a launched sweep."""
        options = self.options
        return f"{options['source']}{options['version']}" if "source" in options and "version" in options else None


@dataclass(frozen=True, kw_only=True)
class NewRevision:
    """Input for recording a launch: the grid's text, the options, the code version, and the cells."""

    grid_text: str
    grid_file: str
    options: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    cells: Sequence[CellRecord]
    companion_of: str | None = None
    """Name of the sweep that this one accompanies.

    The new sweep is then dated just before it, so that the default sweep stays.
    """


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured value, or the reason for its absence.

    `reason` starts with a short code before a colon ("n/a: no peak FLOPs known for cpu", "oom: ..."); tables print the
    code. `n` is the sample count, `low` and `high` are the ends of an interval, `seconds` and `peak_memory` (bytes) the
    cost. `source` is the SHA-256 of the plugin file whose probe measured the value, None for a probe of the package.
    `description` describes the metric in the format of results/metrics.py; it is set only for metrics that the package
    does not define.

    Raises:
        ValueError: both the value and the reason are missing.
    """

    probe: str
    metric: str
    length: int = 0
    value: float | None = None
    unit: str = ""
    n: int | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    seconds: float | None = None
    peak_memory: int | None = None
    source: str | None = None
    description: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ValueError(f"measurement {self.probe}/{self.metric} at {self.length} needs a value or a reason")


@dataclass(frozen=True, kw_only=True)
class MeasuredValue(Measurement):
    """A measurement read from the database, with the cell and the attempt that it belongs to."""

    cell_id: str
    attempt_id: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """Result of one item of a probe (a document or a trial), stored so that cells can be compared item by item.

    `item` numbers the documents or trials and means the same one in every cell. `position` is a position inside the
    item, such as that of the needle; 0 without one. `detail` is a dict that the probe defines.
    """

    probe: str
    metric: str
    length: int = 0
    item: int
    position: int = 0
    value: float | None
    detail: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Point of a training curve.

    `tokens` counts the training tokens since step 0, `wall_s` the training seconds so far (without validation), `lr` is
    the learning-rate factor, `peak_memory` is in bytes.
    """

    step: int
    tokens: int
    wall_s: float
    train_loss: float | None
    val_loss: float | None = None
    tokens_per_s: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    mfu_paper: float | None = None
    mfu: float | None = None
    peak_memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that the network generated after `step` training steps for one prompt.

    `item` numbers the prompts of a step.
    """

    step: int
    item: int
    prompt: str
    text: str

    def as_example(self) -> Example:
        """Return the sample as the Example that the database stores (no value; prompt and text in `detail`)."""
        detail = {"prompt": storable_text(self.prompt), "text": storable_text(self.text)}
        return Example(probe=SAMPLES, metric=SAMPLE_METRIC, length=self.step, item=self.item, value=None, detail=detail)


@dataclass(frozen=True, kw_only=True)
class TrainingTiming:
    """Timings of one finished training, for cost predictions.

    Times are seconds; `wall_s` of a curve point excludes validation.
    """

    attempt_id: int
    config: Mapping[str, Any]
    """Config of the attempt, from its provenance."""
    gpu_name: str | None
    host: str
    start_s: float | None
    """Seconds from the start of the process until the network was built; None for unknown."""
    elapsed_s: float
    is_first_attempt: bool
    """True for the first attempt of the cell, whose `elapsed_s` covers the complete training."""
    points: int
    """Number of curve points with a validation."""
    curve_start: tuple[int, float]
    """(tokens, wall_s) at the first of these points."""
    curve_end: tuple[int, float]
    """(tokens, wall_s) at the last of these points."""
    tokens_per_s: float | None
    """Training speed over the last interval of the curve."""
    probes: Mapping[tuple[str, int], float]
    """Seconds of each probe, by (probe, context length)."""
    gpu_neighbours: int = 0
    """Number of other attempts that used the same GPU while this one ran."""
    step_mode: str = ""
    """Text that says if the steps ran as CUDA graphs or were queued one by one, and why.

    Empty for attempts of older releases.
    """


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Origin of the numbers of an attempt; the fields are the columns of the table `provenance`."""

    config: Mapping[str, Any]
    seed: int
    git_commit: str | None = None
    git_dirty: bool | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    platform: str = ""
    host: str = ""
    device: str = ""
    gpu_name: str | None = None
    gpu_count: int = 0
    driver: str | None = None
    dtype: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    corpus: str = ""
    corpus_fingerprint: str = ""
    threads: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    gpu_uuid: str | None = None
    co_tenants: int | None = None
    """Number of other attempts on the same GPU during this one, as counted so far; None without a GPU."""

    @property
    def ranks(self) -> int:
        """Processes of the attempt, each with a GPU of its own if it uses GPUs; 1 if not recorded."""
        ranks = self.extra.get("ranks", 1)
        return ranks if isinstance(ranks, int) and ranks > 0 else 1

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 (hex) of the saved weights.

        None without saved weights or for attempts of releases that did not record it.
        """
        return recorded_hash(self.extra)


@dataclass(frozen=True, kw_only=True)
class CodeAndGpu:
    """Git commit, dirty flag and GPU name of an attempt, as a report shows them with the origin of a number.

    `dirty` is True if the working tree had uncommitted changes. None means not recorded.
    """

    commit: str | None = None
    dirty: bool | None = None
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Log entry about a sweep, a cell or an attempt, for people to read."""

    id: int
    at: datetime
    kind: str
    message: str
    sweep_id: int | None
    cell_id: str | None
    attempt_id: int | None


CellStanding = Literal[
    "new", "running", "done", "failed", "diverged", "interrupted", "pruned", "needs-eval", "weights gone"
]
ProbeRequest = tuple[str, int]
"""Requested measurement: (probe, context length in tokens; 0 for a probe without a context length)."""


def missing_requests(state: CellState, requested: Iterable[ProbeRequest]) -> list[ProbeRequest]:
    """Return the requested (probe, length) pairs that are not in `state.measured`, in the order of `requested`.

    A measurement of any metric of the probe at that length counts, with a value or with a recorded reason.
    """
    have = {(probe, length) for probe, _, length in state.measured}
    return [request for request in requested if request not in have]


def standing(state: CellState, requested: Iterable[ProbeRequest]) -> CellStanding:
    """Return the status of a cell with respect to the requested measurements.

    Args:
        state: cell with its progress.
        requested: (probe, context length) pairs that the launch asked for.

    Returns:
        The state of the newest attempt while the cell runs or has no finished training. Else `done` if every requested
        (probe, length) has a value or a reason, `needs-eval` if a measurement is missing, or `weights gone` if a
        measurement is missing and so are the saved weights. A failed evaluation of a trained cell does not show. Cells
        whose newest attempt is of an external model never have the status `weights gone`.
    """
    if state.state == "running" or state.trained_attempt_id is None:
        return state.state
    if not missing_requests(state, requested):
        return "done"
    return "needs-eval" if state.weights or state.kind == "external" else "weights gone"


def requests_from_options(options: object) -> list[ProbeRequest]:
    """Return the requested (probe, length) pairs in the options of a stored revision, in their order.

    Empty for options without the key `requested`, and for options that are no dict.
    """
    pairs = options.get("requested", []) if isinstance(options, dict) else []
    return [(str(probe), int(length)) for probe, length in pairs]


BOOT = Path("/proc/sys/kernel/random/boot_id")
DEAD_AFTER_S = 300.0
"""Seconds without a heartbeat after which an attempt on another host counts as dead."""


def current_pid_space() -> str | None:
    """Return the boot id and the PID namespace (separated by a space) in which the pid of this process is valid.

    None on systems without /proc.

    A host name alone is not enough: containers may share it, and a restarted machine keeps it.
    """
    try:
        return f"{BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def is_local_pid(host: str | None, pid_space: str | None) -> bool:
    """Return True if a pid recorded with `host` and `pid_space` can be looked up by this process.

    The host must be this one, and the PID space that of this process. If either PID space is unknown (as in records of
    older releases), the host name alone decides.
    """
    current = current_pid_space()
    return host == socket.gethostname() and (pid_space is None or current is None or pid_space == current)


def find_process(pid: int | None, started: float | None) -> psutil.Process | None:
    """Return the live process with this pid and creation time (seconds since the epoch).

    Returns:
        None if an argument is None, or if the process is gone, a zombie, or another process with the same pid. A
        process that may not be inspected (access denied) is returned without a comparison of its creation time.
    """
    if pid is None or started is None:
        return None
    import psutil  # only where a process is looked up

    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return process
    return process if same else None
