"""Entry point of one attempt: build, train, probe, record. Also runs without Ray.

Usage: python -m atma_sweep.sweep.job --help.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.errors import LeaseLost, UserError
from ...results.failure_classes import Failure
from ...results.store.journal import JOURNAL, JournalRecorder
from ...results.store.recorder import AttemptWriter, DatabaseRecorder
from ...results.store.records import AttemptState, CurvePoint
from ...results.store.store import open_store
from ..config import Resources
from ..errors import SweepError
from ..host import guard, processes
from ..ranks import launcher
from ..ranks.launcher import FirstFault, RankProcesses
from ..ranks.null_writer import NullWriter
from . import spare
from .failures import EXIT_LOST, EXIT_MACHINE, EXIT_STOPPED, classify_exception, classify_exit, log_tail, user_frame
from .job import Job
from .process import StopFlag, ignore_output_errors, log_line

if TYPE_CHECKING:
    import torch

    from ..ranks.group import Ranks
    from .base_runner import AttemptRunner


def main(argv: Sequence[str] | None = None) -> int:
    """Run the attempt whose job.json lies in the given folder; return an exit code.

    Its results go to the database that ATMA_DB names, or with --journal into a file of that folder. Installs signal
    handlers and a guard for this process, replaces stdout and stderr, and makes it end with the process `--parent`.
    Blocks until the attempt ends; with --spare first until a folder arrives.

    Args:
        argv: arguments without the program's name; None: those of the process. `--runs FOLDER` and `--parent PID` are
            required, and exactly one of `--folder NAME` (relative to --runs) and `--spare` (read the folder's name from
            stdin). `--journal` is optional. There are no positional arguments. `--rank`, `--ranks` and `--rendezvous`
            are for the processes that an attempt of several ranks starts; these record nothing.

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
    parser.add_argument("--rank", type=int, default=0, help="number of this process within its attempt")
    parser.add_argument("--ranks", type=int, default=1, help="number of the attempt's processes, for ranks from 1 on")
    parser.add_argument("--rendezvous", help="HOST:PORT at which the ranks meet, for ranks from 1 on")
    options = parser.parse_args(argv)
    ignore_output_errors()
    if options.rank:
        return _follow(options)
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
        with _group_of(job, runs, stop, finish) as ranks:
            runner: AttemptRunner
            if job.kind == "external":
                runner = OpenWeightRunner(job, runs, writer, stop)
            else:
                runner = CellRunner(job, runs, writer, stop, ranks)
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
    except FirstFault as error:
        return _fault_ended(finish, error, stop, runs / job.folder)
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
    failure, code = _class_and_code(error)
    finish("failed", cause=message, traceback=trace, exit_code=code, failure=failure)
    return code


def _class_and_code(error: BaseException) -> tuple[Failure, int]:
    """Return the failure class of an exception that ends an attempt, and the exit code for it."""
    failure: Failure = "infrastructure" if isinstance(error, UserError) and error.passing else classify_exception(error)
    return failure, error.exit_code if isinstance(
        error, SweepError
    ) else EXIT_MACHINE if failure == "infrastructure" else 1


# --- several ranks ----------------------------------------------------------------------------------------------------


def _n_ranks(job: Job) -> int:
    """Return the number of processes that work on the job; 1 for an open-weight model, whatever GPUs it reserves."""
    return 1 if job.kind == "external" else Resources.model_validate(job.config.get("resources", {})).n_ranks


@contextlib.contextmanager
def _group_of(job: Job, runs: Path, stop: StopFlag, finish: Callable[..., None]) -> Iterator[Ranks]:
    """Yield the group of the job's ranks for a `with` block, in which this process is rank 0; it may be a single one.

    The other ranks are started before and are gone afterwards, however the block ends.

    Args:
        job: job of the attempt.
        runs: folder that addresses are relative to.
        stop: stop flag of this process.
        finish: function that records the end, if this process is blocked when another rank fails.

    Raises:
        FirstFault: another rank failed first, or the connection to one was lost.
        Exception: the error of the block, if this rank failed first, stopped, diverged or lost its lease.
    """
    from ..ranks.group import SINGLE, join, open_store
    from ..training.loop import Diverged, Stopped

    size = _n_ranks(job)
    if size == 1:
        yield SINGLE
        return
    folder = runs / job.folder
    children = RankProcesses(size, folder)
    store, address = open_store(size)
    try:
        children.start(
            launcher.rank_command(runs, job.folder, size, address), launcher.rank_environment(size),
            lambda fault: os._exit(_abandon(finish, fault, stop, folder)),
        )  # fmt: skip
        ranks = join(0, size, address, _rank_device(job, 0), store)
        children.has_joined = True
        yield ranks
        ranks.close()
    except (Stopped, Diverged, LeaseLost):
        children.end()
        raise
    except BaseException as error:
        own = _fault_of(0, error)
        first = children.first_fault(own)
        if first is own and not own.is_consequence:
            raise
        raise FirstFault(first, size) from error
    children.end()


def _follow(options: argparse.Namespace) -> int:
    """Run a job as a rank after the first: compute with the others, record nothing; return an exit code.

    A failure is written to rank-R.error.json for rank 0, and the process ends at once, so that the others notice it.
    """
    launcher.follow_first(options.parent)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    folder = options.runs / options.folder
    code = 0
    try:
        from ..ranks.group import join
        from ..training.loop import Stopped
        from .cell_runner import CellRunner

        began = time.monotonic()
        job = Job.read(folder)
        ranks = join(options.rank, options.ranks, options.rendezvous, _rank_device(job, options.rank))
        try:
            writer = NullWriter()  # type: ignore[abstract]  # the empty methods of the protocol are its own
            CellRunner(job, options.runs, writer, StopFlag(handles_signals=False), ranks).run(began)
            ranks.close()
        except Stopped:
            code = EXIT_STOPPED
    except BaseException as error:  # noqa: BLE001, every end must reach rank 0
        fault = _fault_of(options.rank, error)
        launcher.write_fault(folder, fault)
        print(fault.traceback or fault.cause, file=sys.stderr, flush=True)
        code = fault.exit_code
    os._exit(code)  # a broken group could block the interpreter's end


def _rank_device(job: Job, rank: int) -> torch.device:
    """Return the device of a rank: the CPU, or the GPU of that index among the visible ones, which becomes current."""
    from .device import choose_device

    return choose_device(Resources.model_validate(job.config.get("resources", {})).gpus, rank)


def _fault_of(rank: int, error: BaseException) -> launcher.RankFault:
    """Return the fault of a rank that an exception, being handled now, ends; Diverged has its own class."""
    from ..training.loop import Diverged

    failure, code = ("diverged", 1) if isinstance(error, Diverged) else _class_and_code(error)
    is_expected = isinstance(error, SweepError | Diverged)
    cause = str(error) if is_expected else _with_location(error)
    trace = None if is_expected else traceback.format_exc()
    return launcher.fault_of(rank, error, cause=cause, failure=failure, trace=trace, code=code)


def _fault_ended(finish: Callable[..., None], error: FirstFault, stop: StopFlag, folder: Path) -> int:
    """Record an attempt that the fault of another rank ended, and return its exit code.

    A rank that a signal killed is not recorded: this process ends by the same signal, with a last line in the log, so
    that the supervisor classifies it as any killed attempt. After a stop request the attempt counts as interrupted.

    Args:
        finish: function that records the end: state, then fields by keyword.
        error: the first fault.
        stop: stop flag of this process.
        folder: folder of the attempt, with the ranks' logs.
    """
    fault, cause = error.fault, str(error)
    tail = log_tail(launcher.log_path(folder, fault.rank))
    if stop.set or stop.wait_until_set():
        finish(
            "interrupted", cause=f"stopped on request; this happened while stopping: {cause}", exit_code=EXIT_STOPPED
        )
        return EXIT_STOPPED
    if fault.exit_code < 0 and fault.failure is None:
        if tail:
            print(tail, file=sys.stderr)
        log_line(cause)
        signal_number = -fault.exit_code
        with contextlib.suppress(OSError, ValueError):
            signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
    trace, failure = fault.traceback, fault.failure
    if failure is None:
        verdict = classify_exit(fault.exit_code, launcher.log_path(folder, fault.rank))
        cause, failure, trace = f"{cause}: {verdict.cause.partition(': ')[2]}", verdict.failure, None
    if failure == "diverged":
        finish("diverged", cause=fault.cause, exit_code=0, failure=failure)
        return 0
    code = fault.exit_code if fault.exit_code > 0 else EXIT_MACHINE
    finish("failed", cause=cause, traceback=trace or tail, exit_code=code, failure=failure)
    return code


def _abandon(finish: Callable[..., None], error: FirstFault, stop: StopFlag, folder: Path) -> int:
    """Record an attempt whose main thread is blocked after the fault of another rank; return its exit code.

    Runs in the thread that watches the ranks. What cannot be recorded is left to the supervisor, which reads the log.
    """
    try:
        return _fault_ended(finish, error, stop, folder)
    except LeaseLost:
        return EXIT_LOST
    except Exception as raised:  # noqa: BLE001, the process must end
        log_line(f"{error}; this end could not be recorded: {raised}")
        return max(error.fault.exit_code, 1)


if __name__ == "__main__":
    sys.exit(main())
