"""Plain values that go into and come out of the database, and what follows from them: a cell's standing, whether an owner lives.

Frozen, keyword-only, free of SQLAlchemy.

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
"""The five factors that are columns of `cell` and of the view `results`; further ones live in the JSON `axes`."""
Kind = Literal["train", "evaluate", "external"]
"""external: an evaluation of a model from elsewhere, which nobody here has trained."""
Phase = Literal["starting", "training", "probing"]
AttemptState = Literal["running", "done", "failed", "diverged", "interrupted"]
CellStateName = Literal["new", "running", "done", "failed", "diverged", "interrupted", "pruned"]
TrialStanding = Literal["asked", "done", "pruned", "diverged", "failed"]
SAMPLE_METRIC = "text"
"""The metric under which a written sample is kept, as an item without a number."""
Key = tuple[str, str, int]
"""What a measurement is about: (probe, metric, context length; 0 when it is not about a length)."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that owns a sweep or an attempt. `started` is its creation time (seconds since the epoch, from psutil),
    which tells it from a later process with the same pid. `space` is the boot and the PID namespace in which `pid` means
    something (see `space` below); None where that is not known."""

    name: str
    host: str
    pid: int
    started: float
    space: str | None = None

    def same_process(self, other: Owner) -> bool:
        """Whether both are one process, whatever they call themselves."""
        apart = None not in (self.space, other.space) and self.space != other.space
        same = (self.host, self.pid) == (other.host, other.pid) and abs(self.started - other.started) < 1.0
        return same and not apart


@dataclass(frozen=True, kw_only=True)
class CellRecord:
    """One cell as a revision lists it.

    `levels` holds the five AXES as text; `axes` holds what the grid itself varied (axis -> level as text, in the
    grid's order); `config` is the complete frozen config; `tokens` the training tokens it asks for.
    """

    id: str
    slug: str
    seed: int
    levels: Mapping[str, str]
    config: Mapping[str, Any]
    axes: Mapping[str, str] = field(default_factory=dict)
    tokens: int = 0
    note: str | None = None
    """What somebody wrote about it."""

    def __post_init__(self) -> None:
        if set(self.levels) != set(AXES):
            raise ValueError(f"levels of cell {self.id} must be exactly {', '.join(AXES)}, not {sorted(self.levels)}")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One execution of a cell; the fields are the columns of the table `attempt`."""

    id: int
    cell_id: str
    number: int
    kind: Kind
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
    """Class of a failure, as failure_classes.py names it; pruned for none."""
    deviation: Mapping[str, Any] | None = None
    """Settings that this attempt ran with other than its cell's, by dotted path; None for none."""
    pid_space: str | None = None
    """Where `pid` means something, as `space` of an Owner."""
    imported: bool = False
    """It came with a bundle: what it says of places leads nowhere here."""

    @property
    def elapsed_s(self) -> float:
        """Seconds from its start to its end, or until it was last heard of."""
        return ((self.finished_at or self.heartbeat_at) - self.started_at).total_seconds()


@dataclass(frozen=True, kw_only=True)
class CellState:
    """A cell of a sweep and how far it is.

    `state` is that of the newest attempt, or `new`; `pruned` where a study has ended that early. `attempt_*`, `step`, `loss`, `cause` and the rest of the run-time
    fields are those of the newest attempt. `trained_attempt_id` and `weights` belong to the newest training that is
    done; `checkpoint` to the newest training that left one. `measured` holds every (probe, metric, length) that has a
    value or a reason in a done attempt.
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
    kind: Kind | None
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
    measured: frozenset[Key]


def extra_axes(cells: Iterable[CellState]) -> list[str]:
    """The axes beyond the five AXES (and the seed) whose level differs between the cells, in the grid's order."""
    listed = list(cells)
    names = dict.fromkeys(name for cell in listed for name in cell.axes if name not in (*AXES, "seed"))
    return [name for name in names if len({cell.axes.get(name) for cell in listed}) > 1]


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """One line of `status` without a sweep: the newest revision of a sweep and its cells by state."""

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
    """What people ask of whoever runs it: pause, cancel, retry."""
    tags: tuple[str, ...] = ()
    note: str | None = None
    """What somebody wrote about it."""


@dataclass(frozen=True, kw_only=True)
class RevisionRecord:
    """What was launched: the grid's text and the options of that launch."""

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
        """Where the numbers of a published sweep are printed; None for one that was launched."""
        told = self.options
        return f"{told['source']}{told['version']}" if "source" in told and "version" in told else None


@dataclass(frozen=True, kw_only=True)
class NewRevision:
    """What a launch wants to have recorded: the grid's text, the options, where the code comes from, and the cells."""

    grid_text: str
    grid_file: str
    options: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    cells: Sequence[CellRecord]
    beside: str | None = None
    """The sweep that this one stands beside, so that it is not taken for the one that was launched last."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number, or the reason why there is none.

    `reason` starts with a short code before a colon ("n/a: no peak FLOPs known for cpu", "oom: ..."); tables print the
    code. `n` is the sample count, `low` and `high` an interval, `seconds` and `peak_memory` what it cost. `source` is the
    SHA-256 of the plugin file whose probe measured it, None for one of the package; `description` what its metric means, as
    results/metrics.py reads it, where the package does not know that.
    Raises ValueError when neither a value nor a reason is given.
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
    """A measurement as read back: with the cell and the attempt it came from."""

    cell_id: str
    attempt_id: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """The outcome of one item of a probe (a document, a trial), kept so that cells can be compared item by item."""

    probe: str
    metric: str
    length: int = 0
    item: int
    position: int = 0
    value: float | None
    detail: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The training curve at one step. `lr` is the learning-rate factor, `tokens` the count since step 0, `wall_s` the
    training seconds so far."""

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
    """What the network wrote behind one prompt after `step` steps; `item` numbers the prompts of a step."""

    step: int
    item: int
    prompt: str
    text: str

    def as_example(self) -> Example:
        """The same as the database holds it."""
        detail = {"prompt": storable_text(self.prompt), "text": storable_text(self.text)}
        return Example(probe=SAMPLES, metric=SAMPLE_METRIC, length=self.step, item=self.item, value=None, detail=detail)


@dataclass(frozen=True, kw_only=True)
class TrainingTiming:
    """One finished training. Times in seconds; `wall_s` of a curve point is training alone, without validation."""

    attempt_id: int
    config: Mapping[str, Any]
    """What it ran with, as its provenance keeps it."""
    gpu_name: str | None
    host: str
    start_s: float | None
    """From the start of the process to the built network."""
    elapsed_s: float
    whole: bool
    """It is the cell's first attempt, so that all of its training lies in `elapsed_s`."""
    points: int
    """Of the curve; each had a validation."""
    first: tuple[int, float]
    """Tokens and wall_s at the first point."""
    last: tuple[int, float]
    tokens_per_s: float | None
    """Over the last interval of the curve."""
    probes: Mapping[tuple[str, int], float]
    """By probe and context length."""
    neighbours: int = 0
    """Other attempts that were on its GPU at the same time, at most."""
    steps: str = ""
    """Whether they were replayed as CUDA graphs or queued as they came, and why; "" of one from before there were both."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where the numbers of an attempt come from; the fields are the columns of the table `provenance`."""

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
    """Other attempts that ran on the same GPU while this one did, as far as it has counted; None without a GPU."""

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights that the attempt kept, hex; None where it kept none, or an earlier version kept them."""
        return recorded_hash(self.extra)


@dataclass(frozen=True, kw_only=True)
class CodeAndGpu:
    """The code and the chip that an attempt's numbers come from: the few columns of its provenance that a trace tells."""

    commit: str | None = None
    dirty: bool | None = None
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something worth telling a person later."""

    id: int
    at: datetime
    kind: str
    message: str
    sweep_id: int | None
    cell_id: str | None
    attempt_id: int | None


Standing = Literal[
    "new", "running", "done", "failed", "diverged", "interrupted", "pruned", "needs-eval", "weights gone"
]
Request = tuple[str, int]
"""(probe, context length; 0 when the probe is not about a length)."""


def missing(state: CellState, requested: Iterable[Request]) -> list[Request]:
    """Requested (probe, length) pairs that have neither a value nor a recorded reason, in the order asked."""
    have = {(probe, length) for probe, _, length in state.measured}
    return [request for request in requested if request not in have]


def standing(state: CellState, requested: Iterable[Request]) -> Standing:
    """Done means trained, with a value or a recorded reason at every requested (probe, length).

    A trained cell that lacks a measurement needs an evaluation; without kept weights it is `weights gone`. Those of a model
    from elsewhere are kept by others.
    """
    if state.state == "running" or state.trained_attempt_id is None:
        return state.state
    if not missing(state, requested):
        return "done"
    return "needs-eval" if state.weights or state.kind == "external" else "weights gone"


def requests_from_options(options: object) -> list[Request]:
    """The requested pairs that a launch stored with its revision."""
    found = options.get("requested", []) if isinstance(options, dict) else []
    return [(str(probe), int(length)) for probe, length in found]


BOOT = Path("/proc/sys/kernel/random/boot_id")
DEAD_AFTER_S = 300.0
"""An attempt on another host, where we cannot look, counts as dead after this long without a word."""


def space() -> str | None:
    """The boot and the PID namespace of this process, in which its pid means something; None where there is no /proc.

    Containers may share their host's name, and a restarted machine has the one that it had before.
    """
    try:
        return f"{BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def here(host: str | None, told: str | None) -> bool:
    """Whether a pid that was told with that host and space can be looked up from here.

    Where a space is not known, as from an older release, the name of the host decides.
    """
    ours = space()
    return host == socket.gethostname() and (told is None or ours is None or told == ours)


def find(pid: int | None, started: float | None) -> psutil.Process | None:
    """The live process with that pid and creation time; None when it is gone or the pid belongs to another by now.

    One that we may not look at is taken for the one that is meant.
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
