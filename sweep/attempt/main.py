"""Entry point of one attempt: build, train, probe, record. Also runs without Ray.

Usage: python -m atma_sweep.sweep.job --help.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...results.errors import LeaseLost, UserError
from ...results.failure_classes import Failure
from ...results.store.journal import JOURNAL, JournalRecorder
from ...results.store.recorder import AttemptWriter, DatabaseRecorder
from ...results.store.records import AttemptState, CurvePoint
from ...results.store.store import open_store
from ..errors import SweepError
from ..host import guard, processes
from . import spare
from .failures import EXIT_LOST, EXIT_MACHINE, EXIT_STOPPED, classify_exception, user_frame
from .job import Job
from .process import StopFlag, ignore_output_errors, log_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the attempt whose job.json lies in the given folder; return an exit code.

    Its results go to the database that ATMA_DB names, or with --journal into a file of that folder. Installs signal
    handlers and a guard for this process, replaces stdout and stderr, and makes it end with the process `--parent`.
    Blocks until the attempt ends; with --spare first until a folder arrives.

    Args:
        argv: arguments without the program's name; None: those of the process. `--runs FOLDER` and `--parent PID` are
            required, and exactly one of `--folder NAME` (relative to --runs) and `--spare` (read the folder's name from
            stdin). `--journal` is optional. There are no positional arguments.

    Returns:
        0: done, diverged, or a spare process without work. EXIT_STOPPED (143): stopped on request. EXIT_LOST (75):
        lease lost, nothing more was written. EXIT_MACHINE (3): fault of the machine. Otherwise the code of the failure
        (`SweepError.exit_code` or 1).

    Raises:
        SystemExit: invalid arguments.
        Exception: an unexpected error, after the attempt has recorded it if it had begun.
    """
    parser = argparse.ArgumentParser(description="Run one attempt, as the supervisor starts it.")
    parser.add_argument("--runs", type=Path, required=True, help="folder that artifact paths are relative to")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--folder", help="the attempt's folder, relative to --runs")
    which.add_argument(
        "--spare", action="store_true", help="import slow packages first, then read the folder as a line from stdin"
    )
    parser.add_argument("--parent", type=int, required=True, help="process whose death ends this one")
    parser.add_argument("--journal", action="store_true", help="write to a file, for another process to apply")
    options = parser.parse_args(argv)
    ignore_output_errors()
    folder = options.folder
    if options.spare:
        processes.exit_with_parent(options.parent)
        try:
            folder = spare.wait_for_folder(options.runs)
        except OSError:
            return EXIT_MACHINE
        if folder is None:
            return 0
    stop = StopFlag()
    processes.exit_with_parent(options.parent)
    guard.start(options.parent, processes.GRACE_S)
    # before it kills a hung process, the supervisor has it write every thread's stack to the log
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    try:
        job = Job.read(options.runs / folder)
        writer = _writer(job, options.runs / job.folder / JOURNAL if options.journal else None)
        me = processes.this_process("job")
        writer.set_process(me.pid, me.started, host=me.host, space=me.space)
        return _attempt(job, options.runs, writer, stop)
    except LeaseLost as error:
        print(error, file=sys.stderr)
        return EXIT_LOST
    except Exception as error:
        if classify_exception(error) != "infrastructure":
            raise
        # log and database may be on the same full disk, so only the exit code tells that the machine is at fault
        traceback.print_exc()
        return EXIT_MACHINE


def _writer(job: Job, journal: Path | None) -> AttemptWriter:
    """Return the writer of the attempt's results: to the database, or to the journal file if one is given.

    The database is the one that ATMA_DB names, and is opened here.
    """
    if journal is None:
        return DatabaseRecorder(open_store(), job.attempt, job.fence)
    return JournalRecorder(journal, {int(attempt): CurvePoint(**point) for attempt, point in job.ends.items()})


def _attempt(job: Job, runs: Path, writer: AttemptWriter, stop: StopFlag) -> int:
    """Run the job, record how it ended, delete superseded checkpoints, and return the exit code.

    Ends as done or diverged give 0; a stop, and any error after a stop request, gives EXIT_STOPPED (143). An expected
    error (`SweepError`) or SystemExit is recorded as failed and gives its code. Checkpoints are deleted only after done
    and diverged.

    Args:
        job: job of the attempt.
        runs: folder that addresses are relative to.
        writer: writer of the attempt's results.
        stop: stop flag of this process.

    Raises:
        LeaseLost: another process owns the attempt; no end was recorded.
        Exception: an unexpected error, after it has been recorded as failed.
    """
    began = time.monotonic()
    finish = partial(_finish, writer, began)
    # imports torch only now, so that the attempt is registered, and can be stopped, before the slow import
    from ..training.loop import Diverged, Stopped
    from .cell_runner import CellRunner
    from .openweight_runner import OpenWeightRunner

    try:
        runner = (OpenWeightRunner if job.kind == "external" else CellRunner)(job, runs, writer, stop)
        runner.run(began)
        finish("done", exit_code=0, weights=runner.weights)
    except Stopped:
        finish("interrupted", cause="stopped on request", exit_code=EXIT_STOPPED)
        return EXIT_STOPPED
    except Diverged as error:
        writer.neighbours()
        finish("diverged", cause=str(error), exit_code=0, failure="diverged")
        runner.clean()
    except LeaseLost:
        raise
    except (SweepError, SystemExit) as error:
        return _failed(finish, error, stop)
    except Exception as error:
        if _failed(finish, error, stop) != EXIT_STOPPED:
            raise
        return EXIT_STOPPED
    else:
        runner.clean()
    return 0


def _finish(writer: AttemptWriter, began: float, state: AttemptState, **values: Any) -> None:
    """Record the attempt's end with the given fields, then log it with the seconds since its start.

    Args:
        writer: writer of the attempt's results.
        began: start of the attempt in monotonic seconds.
        state: state that the attempt ends in.
        **values: further fields of `AttemptWriter.finish`; `cause` is logged too.
    """
    writer.finish(state, **values)
    cause = values.get("cause")
    log_line(f"{state} after {time.monotonic() - began:.1f} s" + (f": {cause}" if cause else ""))


def _with_location(error: BaseException) -> str:
    """Return the exception in one line, followed by the line of the user's code that it came from, if any.

    "Class: message" with white space collapsed, cut to 500 characters, then " (file.py:12)".
    """
    location = user_frame(error)
    message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return message if location is None else f"{message} ({location})"


def _failed(finish: Callable[..., None], error: BaseException, stop: StopFlag) -> int:
    """Record how the attempt failed and return its exit code; an error after a stop request counts as interrupted.

    The traceback is recorded for unexpected errors (those that are no SweepError), and printed to stderr where the
    caller will not raise the error.

    Args:
        finish: function that records the end: state, then fields by keyword.
        error: exception that ended the attempt; call it while it is being handled.
        stop: stop flag; unexpected errors wait a second for it, as a batch system may signal children first.

    Returns:
        143 (EXIT_STOPPED) for interrupted; otherwise the error's `exit_code`, 3 (EXIT_MACHINE) for a fault of the
        machine, or 1.
    """
    is_expected = isinstance(error, SweepError)
    message = str(error) if is_expected else _with_location(error)
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{last.filename}:{last.lineno} ended the process with exit code {error.code}"
    trace = None if is_expected else traceback.format_exc()
    stop_requested = stop.set or (not is_expected and stop.wait_until_set())
    if trace is not None and (stop_requested or isinstance(error, SystemExit)):
        print(trace, file=sys.stderr)  # uncaught errors are printed by the interpreter
    if stop_requested:
        cause = f"stopped on request; this error was raised while stopping: {message}"
        finish("interrupted", cause=cause, exit_code=EXIT_STOPPED)
        return EXIT_STOPPED
    failure: Failure = "infrastructure" if isinstance(error, UserError) and error.passing else classify_exception(error)
    code = error.exit_code if isinstance(error, SweepError) else EXIT_MACHINE if failure == "infrastructure" else 1
    finish("failed", cause=message, traceback=trace, exit_code=code, failure=failure)
    return code


if __name__ == "__main__":
    sys.exit(main())
