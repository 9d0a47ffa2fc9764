"""One attempt: build, train, probe, record. Runs the same with no Ray at all: python -m atma_sweep.sweep.job --help."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ...results.errors import LostLease
from ...results.store.journal import JOURNAL, JournalStore
from ...results.store.records import AttemptState, CurvePoint
from ...results.store.store import Store, open_store
from ..errors import SweepError
from ..machine import guard, processes
from ..machine.signals import STOPS
from .failures import EXIT_LOST, EXIT_MACHINE, EXIT_STOPPED, Failure, classify
from .log import never_fail, say

JOB_FILE = "job.json"
TOLD_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an attempt is asked to do; a frozen copy lies in its folder as job.json.

    Addresses are full ones or relative to the runs folder (see training/storage.py).
    """

    attempt: int
    fence: int
    cell: str
    slug: str
    kind: str
    folder: str
    config: dict[str, Any]
    missing: list[tuple[str, int]]
    """(probe, length) still to be measured."""
    resume: list[tuple[int, str]]
    """Earlier attempts whose checkpoints may be continued, newest first: (attempt id, address of their place)."""
    weights: str | None = None
    """Address of the kept weights, for kind `evaluate`."""
    commit: str | None = None
    dirty: bool | None = None
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of earlier attempts that were trained to the end, by id: the last point of the curve."""

    def write(self, runs: Path) -> Path:
        """Writes job.json into the attempt's folder, whole or not at all, and returns the folder. Raises OSError."""
        folder = runs / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        told = asdict(self)
        if not self.ends:
            del told["ends"]  # older code, which `--code kept` runs, need not know of it
        aside = folder / f"{JOB_FILE}.part"
        aside.write_text(json.dumps(told, indent=1))
        aside.replace(folder / JOB_FILE)
        return folder

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Reads job.json of an attempt's folder."""
        data = json.loads((folder / JOB_FILE).read_text())
        data["missing"] = [(name, length) for name, length in data["missing"]]
        data["resume"] = [(attempt, path) for attempt, path in data["resume"]]
        return cls(**data)


class StopFlag:
    """Set by the first SIGTERM; the second ends the process on the spot.

    Ctrl-C and the terminal's end are the supervisor's business; whatever is started here, a compiler, ignores them, too.
    """

    def __init__(self) -> None:
        self.set = False
        self._since = 0.0
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Ray's processes have them blocked, and children inherit that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def comes(self) -> bool:
        """Whether it is set, or will be in a moment: who ends many processes one by one may tell a compiler before us."""
        deadline = time.monotonic() + TOLD_S
        while not self.set and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.set

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.set:
            self.set, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > processes.ECHO_S:
            os._exit(EXIT_STOPPED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the attempt whose job.json lies in the given folder; returns an exit code.

    Its numbers go to the database that ATMA_DB names, or with --journal into a file of that folder.
    """
    parser = argparse.ArgumentParser(description="Run one attempt, as the supervisor starts it.")
    parser.add_argument("--runs", type=Path, required=True, help="folder that artifact paths are relative to")
    parser.add_argument("--folder", required=True, help="the attempt's folder, relative to --runs")
    parser.add_argument("--parent", type=int, required=True, help="process whose death ends this one")
    parser.add_argument("--journal", action="store_true", help="write to a file, for another process to apply")
    options = parser.parse_args(argv)
    stop = StopFlag()
    never_fail()
    processes.die_with(options.parent)
    guard.start(options.parent, processes.GRACE_S)
    # what a supervisor asks for before it kills a process that hangs; the log gets it
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    try:
        job = Job.read(options.runs / options.folder)
        store = _journal(job, options.runs) if options.journal else open_store()
        me = processes.this_process("job")
        store.set_process(job.attempt, job.fence, me.pid, me.started, space=me.space)
        return _attempt(job, options.runs, store, stop)
    except LostLease as error:
        print(error, file=sys.stderr)
        return EXIT_LOST
    except Exception as error:
        if classify(error) != "infrastructure":
            raise
        # the log may be on the same full disk and the database, too, so the exit code alone tells whose fault it was
        traceback.print_exc()
        return EXIT_MACHINE


def _journal(job: Job, runs: Path) -> JournalStore:
    ends = {int(attempt): CurvePoint(**point) for attempt, point in job.ends.items()}
    return JournalStore(runs / job.folder / JOURNAL, ends)


def _attempt(job: Job, runs: Path, store: Store | JournalStore, stop: StopFlag) -> int:
    began = time.monotonic()
    finish = partial(_finish, job, store, began)
    # torch only now: the attempt is registered before its long import, and can be stopped during it
    from ..training.loop import Diverged, Stopped
    from .runner import Work

    try:
        work = Work(job, runs, store, stop)
        work.run(began)
        finish("done", exit_code=0, weights=work.weights)
    except Stopped:
        finish("interrupted", cause="stopped on request", exit_code=EXIT_STOPPED)
        return EXIT_STOPPED
    except Diverged as error:
        work.recorder.neighbours()
        finish("diverged", cause=str(error), exit_code=0, failure="diverged")
        work.clean()
    except LostLease:
        raise
    except (SweepError, SystemExit) as error:
        return _failed(finish, error, stop)
    except Exception as error:
        if _failed(finish, error, stop) != EXIT_STOPPED:
            raise
        return EXIT_STOPPED
    else:
        work.clean()
    return 0


def _finish(job: Job, store: Store | JournalStore, began: float, state: AttemptState, **values: Any) -> None:
    """Ends the attempt in the database, then says so in the log."""
    store.finish_attempt(job.attempt, job.fence, state, **values)
    cause = values.get("cause")
    say(f"{state} after {time.monotonic() - began:.1f} s" + (f": {cause}" if cause else ""))


def _failed(finish: Callable[..., None], error: BaseException, stop: StopFlag) -> int:
    """Records how the attempt failed, and returns its exit code. What it raises once it is asked to stop is no failure."""
    foreseen = isinstance(error, SweepError)
    said = str(error) if foreseen else " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{last.filename}:{last.lineno} ended the process with exit code {error.code}"
    where = None if foreseen else traceback.format_exc()
    asked = stop.set or (not foreseen and stop.comes())
    if where is not None and (asked or isinstance(error, SystemExit)):
        print(where, file=sys.stderr)  # anything else the interpreter prints
    if asked:
        cause = f"stopped on request, in the midst of what then failed: {said}"
        finish("interrupted", cause=cause, exit_code=EXIT_STOPPED)
        return EXIT_STOPPED
    failure: Failure = "infrastructure" if getattr(error, "passing", False) else classify(error)
    code = getattr(error, "exit_code", 1) if foreseen else EXIT_MACHINE if failure == "infrastructure" else 1
    finish("failed", cause=said, traceback=where, exit_code=code, failure=failure)
    return code


if __name__ == "__main__":
    sys.exit(main())
