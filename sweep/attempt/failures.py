"""Classification of failed attempts by exception, exit code and log, and the user's line that failed.

What a launch does next is defined in results/failure_classes.py.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...results.errors import StoreBusy, StoreReplaced, StoreUnreachable
from ...results.failure_classes import PREEMPTED, Failure
from ...results.store.records import AttemptState
from ..host.hardware import control_groups

EXIT_STOPPED = 143
"""Exit code of an attempt that was stopped on request."""
EXIT_MACHINE = 3
"""Exit code for a fault of the machine, such as a full disk or an unreachable database; the log may then be empty."""
EXIT_LOST = 75
"""Exit code of a process that lost its lease on the attempt and left without writing."""
NODE_LOST = -1001
"""Pseudo exit code: the process was lost together with its node."""
OOM_KILLED = -1002
"""Pseudo exit code: SIGKILL by the system, because the memory of the machine ran out."""

MAX_SAME_FAILURES = 3
"""Cells that fail in the same way, through an error in code or config, before the sweep stops."""
MAX_KILLS_WITHOUT_PROGRESS = 3
"""Consecutive deaths of a cell without progress by a step before a kill counts as the cell's own fault."""

_INFRASTRUCTURE = re.compile(
    r"uncorrectable ECC|ECC error|NCCL (error|failure|WARN)|ncclSystemError|ncclInternalError|hardware error|"
    r"CUDA driver error|device is (lost|unavailable)|unspecified launch failure|Xid|GPU has fallen off|"
    r"CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)|cuDNN.*NOT_INITIALIZED|no CUDA-capable device|"
    r"Input/output error|No space left on device|File too large|Disk quota exceeded|Stale file handle|Read-only file system|"
    r"Connection (reset|refused|timed out)|Temporary failure in name resolution|database is away",
    re.IGNORECASE,
)
_HOST_OOM = re.compile(r"DefaultCPUAllocator|Cannot allocate memory|std::bad_alloc|MemoryError", re.IGNORECASE)
_CUDA_OOM = re.compile(r"CUDA out of memory|CUDA error: out of memory|torch\.OutOfMemoryError", re.IGNORECASE)
_KILLED_RANK = re.compile(r"(rank \d+ of \d+): killed by SIG\w+$")
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}


@dataclass(frozen=True)
class ExitVerdict:
    """Verdict on a process that ended without recording the end of its attempt."""

    state: AttemptState
    cause: str
    """Cause in one line."""
    failure: Failure | None
    """Failure class; None if the process was stopped on request."""


def classify_exception(error: BaseException) -> Failure:
    """Return the failure class of an exception that ended an attempt; "code" unless it is the machine's fault.

    "infrastructure" for disk errors (by errno) and a database that cannot be used, "host_oom" for MemoryError.
    Otherwise the text decides, as in `classify_message`.
    """
    message = f"{type(error).__module__}.{type(error).__name__}: {error}"
    if (isinstance(error, OSError) and error.errno in _DISK) or isinstance(
        error, StoreUnreachable | StoreBusy | StoreReplaced
    ):
        return "infrastructure"
    return "host_oom" if isinstance(error, MemoryError) else classify_message(message)


def classify_message(message: str) -> Failure:
    """Return the failure class of an error message: "cuda_oom", "host_oom", "infrastructure" or "code".

    Known phrases decide, in this order; "code" if there is none.
    """
    if _CUDA_OOM.search(message):
        return "cuda_oom"
    if _HOST_OOM.search(message):
        return "host_oom"
    return "infrastructure" if _INFRASTRUCTURE.search(message) else "code"


def classify_exit(exit_code: int, log: Path, *, hung: bool = False, stop_requested: bool = False) -> ExitVerdict:
    """Classify the end of a process whose attempt is still recorded as running.

    The first that applies:

    - exit code 143 (EXIT_STOPPED) or SIGTERM: interrupted, no failure class;
    - NODE_LOST (-1001): interrupted, "node_lost";
    - `stop_requested`: interrupted, no failure class, whatever the exit code;
    - `hung`: interrupted, "hang";
    - OOM_KILLED (-1002): interrupted, "host_oom";
    - a crash (SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT): interrupted, "infrastructure";
    - another signal: interrupted, "preempted";
    - any other exit code, 0 included: failed; "infrastructure" for 3 (EXIT_MACHINE), else by the last line of the log.

    - `exit_code`: negative for a signal; may be NODE_LOST or OOM_KILLED.
    - `log`: log file of the attempt; its last line enters the cause, and it may be missing.
    - `hung`: the supervisor killed the process because it made no progress.
    - `stop_requested`: the process was asked to stop before it ended.
    """
    if exit_code == EXIT_STOPPED or exit_code == -signal.SIGTERM:
        return ExitVerdict("interrupted", "stopped before training began", None)
    if exit_code == NODE_LOST:
        return ExitVerdict("interrupted", "its node was lost", "node_lost")
    if stop_requested:
        code = -signal.SIGKILL if exit_code == OOM_KILLED else exit_code
        return ExitVerdict("interrupted", f"ended with exit code {code} after a stop request: {last_line(log)}", None)
    if hung:
        return ExitVerdict(
            "interrupted", "killed: it made no progress; its log ends with the stack of every thread", "hang"
        )
    if exit_code == OOM_KILLED:
        return ExitVerdict("interrupted", "killed by the system: the machine ran out of memory", "host_oom")
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        if name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
            return ExitVerdict("interrupted", f"process crashed with {name}: {last_line(log)}", "infrastructure")
        hint = " (out of memory, or killed by a user)" if name == "SIGKILL" else ""
        # rank 0 ends by the signal that killed another rank, after a last line about it
        rank = _KILLED_RANK.search(last_line(log))
        return ExitVerdict("interrupted", f"{rank[1] if rank else 'process'} killed by {name}{hint}", PREEMPTED)
    message = last_line(log)
    failure = "infrastructure" if exit_code == EXIT_MACHINE else classify_message(message)
    return ExitVerdict("failed", f"process ended with exit code {exit_code}: {message}", failure)


def record_start_failure(log: Path, error: BaseException) -> int:
    """Append to the log, if possible, that the process could not be started; return the exit code for it.

    EXIT_MACHINE (3) for an OSError, else 1. An error of writing the log is ignored.
    """
    with contextlib.suppress(OSError), log.open("a") as file:
        file.write(f"could not be started: {error}\n")
    return EXIT_MACHINE if isinstance(error, OSError) else 1


def cause_pattern(cause: str) -> str:
    """Return a cause with numbers, hashes and paths, which differ between cells, replaced by "#" each.

    A path is any word with a slash, a hash at least 6 hex digits. Equal results mean the same kind of failure.
    """
    return re.sub(r"[\w.-]*/[\w./-]+|\b[0-9a-f]{6,}\b|\d+", "#", cause)


def oom_kills(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of processes killed by the system for lack of memory; 0 if it is not reported.

    The largest count of this process's control groups, those around them and the whole machine, each since it exists.
    Only its growth between two calls says something.
    """
    kills = 0
    for file in (*(folder / "memory.events" for folder in control_groups(cgroup_root)), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            lines = file.read_text().splitlines()
            kills = max([kills, *(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))])
    return kills


class OomWatch:
    """Tells a kill for lack of memory from other kills, by the growth of the system's count (see oom_kills)."""

    def __init__(self) -> None:
        self._kills = oom_kills()

    def mark(self, codes: Mapping[int, int]) -> dict[int, int]:
        """Return exit codes by attempt, in their order, with OOM_KILLED for SIGKILL if the count has grown.

        The codes are those of all attempts that ended since the last call, since a growth may be the end of several.
        It counts until a call with a SIGKILL.
        """
        if -signal.SIGKILL not in codes.values():
            return dict(codes)
        kills = oom_kills()
        has_grown, self._kills = kills > self._kills, kills
        return {
            attempt: OOM_KILLED if has_grown and code == -signal.SIGKILL else code for attempt, code in codes.items()
        }


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log, stripped, or a sentence that there is none.

    "no log was written" if the file cannot be read, "the log is empty" if every line is blank.
    """
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "no log was written"
    return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")


def log_tail(log: Path, n_lines: int = 40) -> str | None:
    """Return the last lines of a log as one text; None if there is none or it cannot be read."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return "\n".join(lines[-n_lines:]).strip() or None


PACKAGE = Path(__file__).resolve().parents[2]
"""Folder of this package; its own frames are not the user's."""
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_QUOTED = re.compile(r'File "([^"\n]+)", line (\d+)')
_FROZEN = re.compile(r"^[0-9a-f]{12}_(?=.)")
"""Prefix of a plugin copy's file name, before the name of the original file."""


def user_frame(error: BaseException) -> str | None:
    """Return "file.py:12" of the innermost frame outside this package, Python's library and installed packages.

    Frames of the exception come first, then those of the exceptions it was raised from. Frames quoted in their messages
    come last, as torch's compiler quotes them for traced code. A plugin runs from a copy; the result names the original
    file, whose lines are the same. None if there is no such frame.
    """
    chain = list(_chain(error))
    for raised in chain:
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(raised.__traceback__)]
        if (location := _innermost(frames)) is not None:
            return location
    for raised in chain:
        frames = [(file, int(line)) for file, line in _QUOTED.findall(str(raised))]
        if (location := _innermost(frames)) is not None:
            return location
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and those that it was raised from or during, newest first, each once.

    Follows `__cause__`, else `__context__` unless it was suppressed by `from None`.
    """
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _innermost(frames: list[tuple[str, int]]) -> str | None:
    """Return "file.py:12" (name without folder) of the last frame whose file is the user's; None if there is none.

    Args:
        frames: (file, line) pairs, outermost first. A hash before the name of a plugin's copy is cut off.
    """
    for file, line in reversed(frames):
        if _is_users(file):
            return f"{_FROZEN.sub('', Path(file).name)}:{line}"
    return None


def _is_users(file: str) -> bool:
    """Return True if a source file is the user's: it exists outside this package, Python and installed packages.

    A plugin's copy (in a folder "plugins", name with a hash) is always the user's. A relative path never is.
    """
    path = Path(file)
    if _FROZEN.match(path.name) and path.parent.name == "plugins":
        return True  # a plugin's copy, even if the runs folder lies inside this package
    if not path.is_absolute() or _INSTALLED.search(file):
        return False
    libraries = [PACKAGE, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))]
    return path.is_file() and not any(path.resolve().is_relative_to(library) for library in libraries)
