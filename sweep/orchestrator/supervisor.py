"""Supervisor loop: runs the tasks of a claimed sweep, one process each, and stops them cleanly on a signal."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, cast

from ...results.errors import CellAlreadyRunning, LeaseLost
from ...results.failure_classes import PREEMPTED, Failure
from ...results.store import journal
from ...results.store.records import DEAD_AFTER_S, Attempt, CellStanding, CellState, Owner, missing_requests, standing
from ...results.store.store import Store
from ..attempt.failures import EXIT_MACHINE, NODE_LOST, OOM_KILLED, OomWatch, classify_exit
from ..attempt.job import Job
from ..checkpoints.address import checkpoint_address
from ..checkpoints.seal import sha256
from ..config import CellConfig, Resources, without_identity_defaults
from ..errors import MachineError
from ..executors.executor import Executor, HostExecutor, ProcessSpec
from ..executors.source_snapshot import takes_weights_hash
from ..grid.cell import Cell
from ..grid.plugins import is_installed
from ..host import processes
from ..host.allocation import should_yield_gpu
from ..host.signals import Interrupted, StopSignals
from ..planning.planner import Task
from .retries import RetryTracker

CapacityCheck = Callable[[Resources], bool]
"""Function that returns True if an attempt of that size could start now. Always True while nothing runs: an attempt
that does not fit then never will."""


class TaskSource(Protocol):
    """Source of further tasks for one supervisor, which calls it from its own thread. An exception ends the launch."""

    def next_tasks(self, fits: CapacityCheck) -> Sequence[Task]:
        """Return the tasks to start now; empty to wait for a running attempt.

        Called repeatedly while no task waits. An empty result while nothing runs ends the launch. The database must
        already contain the tasks' cells.

        Args:
            fits: Tells if an attempt of a given size could start now.
        """

    def ended(self, task: Task, attempt: Attempt, will_retry: bool) -> None:
        """Handle the end of an attempt of any task, whatever its outcome. The default does nothing.

        Args:
            task: Task of the attempt.
            attempt: Record of the attempt in its final state.
            will_retry: True if the cell is tried once more, so that this end is not final.
        """
        return

    def attempts_to_prune(self, attempts: Sequence[Attempt]) -> Mapping[int, str]:
        """Return the running attempts to stop now, as reasons by attempt id; their cells then count as pruned.

        Called several times a second. The default stops none.

        Args:
            attempts: Current records of the supervisor's attempts, without those that were asked to stop already. Ids
                of other attempts in the result are ignored.
        """
        return {}


LEASE_S = 60.0
"""Seconds for which a claim on a sweep lasts without renewal."""
RENEW_S = 5.0
"""Seconds between two renewals of the lease, and between two checks for dead supervisors."""
POLL_S = 0.2
"""Seconds of one wait for an attempt to end."""
LISTEN_S = 1.0
"""Seconds between two queries for control commands."""


class Listener(Protocol):
    """Receiver of a supervisor's progress events, for a display."""

    def started(self, task: Task, attempt: Attempt) -> None:
        """Handle an attempt whose process is starting."""

    def running(self, attempts: Sequence[Attempt]) -> None:
        """Handle the current records of this supervisor's attempts; called several times a second."""

    def ended(self, task: Task, attempt: Attempt) -> None:
        """Handle the end of an attempt, whatever its outcome."""

    def waiting(self, cell: Cell) -> None:
        """Handle a cell that another sweep trains, and whose result this sweep will use; may be called repeatedly."""


@dataclass
class _Running:
    """Attempt of this supervisor, from its start until its end is recorded."""

    task: Task
    progress: object = None
    """Heartbeat, step and phase as last read from the database."""
    changed_at: float = 0.0
    """Time of the last change of `progress`, on the monotonic clock."""
    is_hung: bool = False
    """True once it was killed for lack of progress."""
    is_stopping: bool = False
    """True once it was asked to save a checkpoint and exit."""
    prune_reason: str | None = None
    """Reason for which the task source pruned it; None otherwise."""


class Supervisor:
    """Loop that runs the tasks of one sweep, which the caller has claimed under the fencing token `fence`."""

    def __init__(
        self, store: Store, sweep: str, fence: int, executor: Executor, listener: Listener, *, runs: Path,
        commit: tuple[str | None, bool | None], source: Path | None = None,
        additional_leases: Sequence[tuple[str, int]] = (),
    ) -> None:  # fmt: skip
        """Prepare the supervisor; nothing starts before `run`.

        Args:
            store: Database.
            sweep: Name of the sweep.
            fence: Fencing token of the claim.
            executor: Open executor that has reserved resources for the tasks; the supervisor does not close it.
            listener: Receiver of progress events, called from the thread of `run`.
            runs: Runs folder.
            commit: Git commit and dirty flag to record with attempts.
            source: Folder of the code snapshot that attempts run; None for the installed package.
            additional_leases: (name, fence) of sweeps whose leases are renewed as well; an entry of `sweep` itself is
                ignored.
        """
        self.store, self.sweep, self.fence = store, sweep, fence
        self._leases = [(sweep, fence), *(pair for pair in additional_leases if pair[0] != sweep)]
        self.source = source
        self.executor, self.listener = executor, listener
        self.runs, self.commit = runs, commit
        self._owner = processes.this_process("launch")
        self._running: dict[int, _Running] = {}
        self._retries = RetryTracker()
        self._failed_tasks: dict[str, Task] = {}
        self._task_source: TaskSource | None = None
        self._signals = StopSignals()
        self._oom_watch = OomWatch()
        self._paused = self._finishing = False
        self._last_renewal = self._last_command_poll = 0.0
        self._last_reap = time.monotonic()

    def run(self, tasks: Sequence[Task], source: TaskSource | None = None) -> None:
        """Run every task to its end, and those that `source` adds whenever no task waits; block meanwhile.

        Failed and interrupted attempts are retried as RetryTracker decides. A cell that is given up does not end the
        loop. On a stop signal, an executor failure or SweepBroken, all attempts are asked to save and exit before the
        exception is raised. LeaseLost is raised at once; attempts then run on until the caller closes the executor.

        A `pause` command stops the attempts and waits for `resume`. After `finish`, running attempts end and no other
        starts.

        Args:
            tasks: Tasks in the order of their start. A task that does not fit yet lets later ones pass.
            source: Source of further tasks; None for none.

        Raises:
            Interrupted: After a clean stop by a signal or a `cancel` command. Also after `finish` if tasks wait or
                there is a source.
            LeaseLost: Another supervisor took the sweep over.
            SweepBroken: Three cells (MAX_SAME_FAILURES) failed with the same error in code or config, and tasks are
                left.
            MachineError: The executor failed.
        """
        queue = deque(tasks)
        self._task_source = source
        with StopSignals() as self._signals:
            while self._has_work(queue):
                self._renew_leases()
                if self._signals.number is not None:
                    self._stop_attempts()
                    raise Interrupted(self._signals.number)
                broken = self.executor.failure()
                if broken is not None:
                    self._stop_attempts()
                    raise MachineError(f"{broken}; launch again to continue")
                self._apply_commands(queue)
                if not self._paused and not self._finishing:
                    self._start_ready_tasks(queue)
                ended = self.executor.wait(POLL_S)
                for attempt, code in self._oom_watch.mark(dict(ended)).items():
                    self._finish_attempt(attempt, code, queue)
                self._report_progress()
                if not self._running and not ended:
                    time.sleep(POLL_S)
        if self._finishing:
            self.store.request_actions(self.sweep, finish=None, pause=None, retry=None)
            if queue or source is not None:
                raise Interrupted(signal.SIGTERM, "running cells were finished as requested; launch again to continue")

    def _has_work(self, queue: deque[Task]) -> bool:
        """Return True if the loop must go on; extends `queue` by tasks of the source when it is empty.

        The source is not queried while the sweep is paused or after a stop signal. While a sweep with a source is
        paused, the result is always True. After `finish` only running attempts count.
        """
        if self._finishing:
            return bool(self._running)
        if self._task_source is not None and not queue and not self._paused and self._signals.number is None:
            queue.extend(self._task_source.next_tasks(self._fits))
        return bool(queue or self._running) or (self._task_source is not None and self._paused)

    def _fits(self, resources: Resources) -> bool:
        return not self._has_exclusive_attempt() and (not self._running or self.executor.fits(resources))

    def _has_exclusive_attempt(self) -> bool:
        """Return True if an attempt runs that needs the machine to itself."""
        return any(entry.task.alone for entry in self._running.values())

    def _apply_commands(self, queue: deque[Task]) -> None:
        """Carry out control commands from the database: cancel, finish, pause, resume, retry.

        Does nothing if the last query is less than 1 s (LISTEN_S) ago. A pause stops all attempts and puts their tasks
        at the front of the queue, in their order. Pausing and resuming are recorded as events. A retry appends the
        tasks of cells that failed in this launch to the queue; ids of other cells are only removed from the request. A
        retry of a running cell stays pending.

        Args:
            queue: Waiting tasks, changed in place.

        Raises:
            Interrupted: After a `cancel`, once all attempts have stopped.
        """
        if time.monotonic() - self._last_command_poll < LISTEN_S:
            return
        self._last_command_poll = time.monotonic()
        requests = self.store.pending_requests(self.sweep)
        if requests.get("cancel"):
            self._stop_attempts()
            self.store.request_actions(self.sweep, cancel=None, finish=None, pause=None, retry=None)
            raise Interrupted(signal.SIGTERM, "cancelled; launch again to continue")
        self._finishing = bool(requests.get("finish"))
        if bool(requests.get("pause")) != self._paused:
            self._paused = not self._paused
            if self._paused:
                stopped_tasks = [entry.task for entry in self._running.values()]
                self._stop_attempts()
                queue.extendleft(reversed(stopped_tasks))
            self.store.add_event("paused" if self._paused else "resumed", f"sweep {self.sweep}", sweep=self.sweep)
        # a cell whose failed attempt is not finished here yet is handled by the next poll
        running = {entry.task.cell.id for entry in self._running.values()}
        retried = [cell for cell in requests.get("retry", ()) if cell not in running]
        for cell in retried:
            task = self._failed_tasks.pop(cell, None)
            if task is not None:
                queue.append(task)
        if retried:
            self.store.clear_retries(self.sweep, retry=retried)

    def _renew_leases(self) -> None:
        if time.monotonic() - self._last_renewal >= RENEW_S:
            for sweep, fence in self._leases:
                self.store.renew_sweep(sweep, fence, LEASE_S)
            self._last_renewal = time.monotonic()

    def _start_ready_tasks(self, queue: deque[Task]) -> None:
        """Start every queued task that may run now and fits; the others stay in the queue in their order.

        A task waits for one of these:

        - its backoff
        - an attempt that runs alone on the machine, or, if it must run alone itself, the end of all others
        - free resources
        - a blocked task that needs a full GPU, if it needs a fraction of one
        - another sweep that trains its cell

        Tasks whose cell another sweep has finished meanwhile are dropped. A training of which only measurements are
        missing now becomes an evaluation.
        """
        blocked_sizes: set[Resources] = set()
        for _ in range(len(queue)):
            task = queue.popleft()
            resources = task.cell.config.resources
            must_wait = time.monotonic() < task.not_before or self._has_exclusive_attempt()
            if must_wait or (task.alone and self._running) or should_yield_gpu(resources, blocked_sizes):
                queue.append(task)
                continue
            if not self.executor.fits(resources):
                blocked_sizes.add(resources)
                queue.append(task)
                continue
            state = self.store.states({task.cell.id}).get(task.cell.id)
            current = standing(state, task.missing) if state is not None else task.standing
            if current == "running":
                self._await_running_cell(task.cell)
                queue.append(task)
                continue
            revised = self._revalidated(task, state, current)
            if revised is not None and not self._start(revised, queue):
                queue.append(revised)

    def _revalidated(self, task: Task, state: CellState | None, current: CellStanding) -> Task | None:
        """Return the task in its current form, since another sweep may have trained the cell after the plan was made.

        - Unchanged if the standing is the planned one, or if the cell still has to be trained (also when its training
          failed).
        - An evaluation of the missing probes if the cell was trained meanwhile and its weights are there.
        - None if nothing is left to do: the cell is done, has diverged, or its weights are gone now.

        A repeated measurement (`should_remeasure`) follows `_revalidated_repeat` instead.

        Args:
            task: Task as planned.
            state: Current state of the cell; None for a cell without attempts.
            current: Current standing of the cell for the task's probes.
        """
        if task.should_remeasure:
            return self._revalidated_repeat(task, state)
        if current == task.standing or current in ("new", "interrupted", "pruned", "failed"):
            return task
        if task.standing == "weights gone" and current == "needs-eval":
            # the plan retrains weights that this machine lacks, although the database names them
            return task
        if current == "needs-eval" and state is not None:
            missing_pairs = missing_requests(state, task.missing)
            return replace(
                task, kind="evaluate", missing=missing_pairs, weights=state.weights, parent_id=state.trained_attempt_id
            )
        return None

    def _revalidated_repeat(self, task: Task, state: CellState | None) -> Task | None:
        """Return a repeated measurement, moved to the cell's newest training; None if that training's weights are gone.

        A task whose training is still the newest, or that has no training (`parent_id` None, such as an open-weight
        model), is returned unchanged. So is a task of a cell without a state.
        """
        if state is None or task.parent_id in (None, state.trained_attempt_id):
            return task
        return replace(task, weights=state.weights, parent_id=state.trained_attempt_id) if state.weights else None

    def _start(self, task: Task, queue: deque[Task]) -> bool:
        """Start an attempt of the task; return False if another sweep trains the cell at this moment.

        Records the attempt in the database, writes its job.json and starts its process. If an OSError prevents this (a
        full or missing runs folder, no process available), the attempt ends as failed with the class `infrastructure`.
        The error is not raised, the result is True, and the retry goes to the front of `queue`.

        Raises:
            LeaseLost: Another supervisor took the sweep over.
            SweepBroken: From the end of an attempt that could not be started.
        """
        try:
            attempt = self.store.start_attempt(
                task.cell.id,
                kind=task.kind,  # type: ignore[arg-type]
                parent_id=task.parent_id,
                owner=self._owner,
                fence=self.fence,
                sweep=self.sweep,
                steps_total=task.cell.config.train.steps,
                deviation=task.deviation,
            )
        except CellAlreadyRunning:
            self._await_running_cell(task.cell)
            return False
        resume = list(resumable(self.store, attempt))
        job = Job(
            attempt=attempt.id, fence=attempt.fence, cell=task.cell.id, slug=task.cell.slug, kind=task.kind,
            folder=attempt.run_dir, config=job_config(task.config), missing=list(task.missing), resume=resume,
            ends={} if self.executor.writes_directly else last_points(self.store, resume, attempt), weights=task.weights,
            weights_sha256=self._weights_sha256(task), commit=self.commit[0], dirty=self.commit[1],
        )  # fmt: skip
        self._running[attempt.id] = _Running(task)
        self.listener.started(task, attempt)
        url = self.store.url.render_as_string(hide_password=False) if self.executor.writes_directly else None
        try:
            job.write(self.runs)
            has_more = bool(queue) or self._task_source is not None
            resources = task.cell.config.resources
            self.executor.start(ProcessSpec(attempt.id, self.runs, job.folder, resources, url, self.source, has_more))
        except OSError as error:
            # a full or missing runs folder, or no process left: not the cell's fault
            with contextlib.suppress(LeaseLost):
                self.store.finish_attempt(
                    attempt.id, attempt.fence, "failed", cause=f"could not be started: {error}",
                    exit_code=EXIT_MACHINE, failure="infrastructure",
                )  # fmt: skip
            self._finish_attempt(attempt.id, EXIT_MACHINE, queue)
        return True

    def _weights_sha256(self, task: Task) -> str | None:
        """Return the recorded SHA-256, in hex, of the kept weights that the task evaluates.

        None for a task without weights or without a training, for weights without a recorded hash, and for a code
        snapshot too old to accept the hash in job.json.
        """
        if task.weights is None or task.parent_id is None:
            return None
        if self.source is not None and not takes_weights_hash(self.source):
            return None
        origin = self.store.provenance(task.parent_id)
        return origin.weights_sha256 if origin is not None else None

    def _await_running_cell(self, cell: Cell) -> None:
        """Report that another sweep trains the cell, and reap its attempt in case that sweep is dead.

        It reaps at most once per 5 s (RENEW_S), over all cells together. That blocks only while processes are
        terminated.
        """
        self.listener.waiting(cell)
        if time.monotonic() - self._last_reap >= RENEW_S:
            self._last_reap = time.monotonic()
            reap(self.store, [cell], self.runs, self.executor)

    def _finish_attempt(self, attempt_id: int, code: int, queue: deque[Task]) -> None:
        """Record the end of an attempt and decide about a retry, which goes to the front of the queue.

        An attempt whose process ended without recording a final state is classified from its exit code and log. An
        interrupted one that is not retried is then recorded as failed. An attempt that recorded `interrupted` itself is
        retried if its code is negative: a signal or its node ended it. A pruned attempt is marked as pruned and never
        retried. The task of a failed cell is remembered for a later `retry` command. Listener and task source are
        informed at the end.

        Args:
            attempt_id: Attempt whose process has ended.
            code: Exit code, negative for a signal; or NODE_LOST, OOM_KILLED.
            queue: Waiting tasks; receives the retried task.

        Raises:
            SweepBroken: Three cells (MAX_SAME_FAILURES) failed with the same error, and tasks are left.
        """
        entry = self._running.pop(attempt_id)
        task = entry.task
        attempt = self.store.attempt(attempt_id)
        next_task = None
        if attempt.state == "running":
            log = self.runs / attempt.run_dir / "log.txt"
            was_requested = entry.is_stopping or self._signals.number is not None
            verdict = classify_exit(code, log, hung=entry.is_hung, stop_requested=was_requested)
            state, cause = verdict.state, verdict.cause
            if verdict.failure is not None:
                next_task = self._retries.next_try(task, attempt, verdict.failure)
                if next_task is None and state == "interrupted":
                    state, cause = "failed", f"{cause}; no further retries in this launch"
            with contextlib.suppress(LeaseLost):
                self.store.finish_attempt(
                    attempt_id, attempt.fence, state, cause=cause, exit_code={NODE_LOST: None, OOM_KILLED: -signal.SIGKILL}.get(code, code),
                    failure=verdict.failure,
                )  # fmt: skip
            attempt = self.store.attempt(attempt_id)
        elif attempt.state == "failed":
            next_task = self._retries.next_try(task, attempt, cast(Failure, attempt.failure or "code"))
        elif attempt.state == "interrupted" and code < 0 and entry.prune_reason is None:
            # it saved a checkpoint and exited at its node's request, not ours
            next_task = self._retries.next_try(task, attempt, "node_lost" if code == NODE_LOST else PREEMPTED)
        if entry.prune_reason is not None and attempt.state == "interrupted":
            self.store.mark_pruned(attempt_id, entry.prune_reason)
            attempt, next_task = self.store.attempt(attempt_id), None
        if next_task is not None:
            queue.appendleft(next_task)
        elif attempt.state == "failed":
            self._failed_tasks[task.cell.id] = replace(task, deviation={}, alone=False, not_before=0.0)
        self.listener.ended(task, attempt)
        if self._task_source is not None:
            self._task_source.ended(task, attempt, next_task is not None)
        if attempt.state == "failed" and attempt.failure == "code":
            self._stop_if_broken(task, attempt, queue)

    def _stop_if_broken(self, task: Task, attempt: Attempt, queue: deque[Task]) -> None:
        """Count a failure in code or config; stop all attempts and raise SweepBroken once too many cells failed alike.

        "Alike" means the same cause apart from numbers, hashes and paths. Nothing is raised if no task waits or runs.
        Before the exception, a "stopped" event is recorded.
        """
        broken = self._retries.note_code_failure(task.cell.id, attempt.cause or "no cause")
        if broken is not None and (queue or self._running):
            self.store.add_event("stopped", str(broken), sweep=self.sweep)
            self._stop_attempts()
            raise broken

    def _kill_hung(self, attempts: Iterable[Attempt]) -> None:
        """Kill attempts whose record has not changed for `hang_minutes`, after a dump of their threads into the log.

        Heartbeat, step and phase count as the record. The time is measured on this process's clock, from the first look
        at the unchanged record. An attempt is killed once; a failed kill is tried again at the next call.
        """
        for attempt in attempts:
            entry, now = self._running[attempt.id], time.monotonic()
            progress = (attempt.heartbeat_at, attempt.step, attempt.phase)
            if progress != entry.progress:
                entry.progress, entry.changed_at = progress, now
            elif not entry.is_hung and now - entry.changed_at >= 60 * entry.task.cell.config.resources.hang_minutes:
                entry.is_hung = self.executor.kill(attempt, dump=True)

    def _report_progress(self) -> None:
        """Send the current records of this supervisor's attempts to the listener, then kill hung ones and prune.

        Does nothing while none runs.
        """
        if self._running:
            live = {attempt.id: attempt for attempt in self.store.live_attempts(self.sweep)}
            my_attempts = [live[key] for key in self._running if key in live]
            self.listener.running(my_attempts)
            self._kill_hung(my_attempts)
            self._prune(my_attempts)

    def _prune(self, attempts: Sequence[Attempt]) -> None:
        """Ask the attempts that the task source gives up to save and exit; remember the reason for each.

        An attempt that cannot be asked yet, since its process is unknown, is tried again at the next call.
        """
        if self._task_source is None:
            return
        candidates = [attempt for attempt in attempts if not self._running[attempt.id].is_stopping]
        reasons = self._task_source.attempts_to_prune(candidates)
        for attempt in candidates:
            if attempt.id in reasons and self.executor.stop(attempt):
                self._running[attempt.id].is_stopping = True
                self._running[attempt.id].prune_reason = reasons[attempt.id]

    def _stop_attempts(self) -> None:
        """Ask every attempt to save and exit; kill those that still run after 9 s (GRACE_S - 1).

        Blocks until all have ended. Killed attempts are marked as interrupted in the database; nothing is retried.
        Attempts on unreachable machines keep the state `running`, so that no sweep starts the cell before the node's
        lease ends. Afterwards this supervisor tracks no attempt.

        Raises:
            SweepBroken: If an attempt that ends meanwhile is the third that fails alike.
        """
        deadline = time.monotonic() + processes.GRACE_S - 1
        discarded: deque[Task] = deque()
        while self._running and time.monotonic() < deadline:
            for attempt in self.store.live_attempts(self.sweep):
                entry = self._running.get(attempt.id)
                if entry is not None and not entry.is_stopping:
                    entry.is_stopping = self.executor.stop(attempt)
            for attempt_id, code in self._oom_watch.mark(dict(self.executor.wait(POLL_S))).items():
                self._finish_attempt(attempt_id, code, discarded)
        for attempt_id in self._running:
            attempt = self.store.attempt(attempt_id)
            if self.executor.is_unreachable(attempt):
                continue  # stays `running`, so that no sweep starts the cell before the node's lease ends
            self.executor.kill(attempt)
            self.store.interrupt_dead(attempt_id, "killed: it did not exit in time after the launch was stopped")
        self._running.clear()


def resumable(store: Store, attempt: Attempt) -> Iterator[tuple[int, str]]:
    """Yield earlier unfinished trainings of a training's cell, newest first.

    Unfinished means neither done nor diverged: interrupted, failed or pruned. The first training that is done or has
    diverged ends the list; older ones are not yielded. Evaluations and attempts imported from a bundle are skipped. An
    evaluation as `attempt` yields none.

    Yields:
        (attempt id, address of the storage of its checkpoints). That a checkpoint exists is not checked.
    """
    for earlier in reversed(store.attempts(attempt.cell_id) if attempt.kind == "train" else ()):
        # an imported attempt has no checkpoint here, and paths from a bundle are not trusted
        if earlier.id == attempt.id or earlier.kind != "train" or earlier.imported:
            continue
        if earlier.state in ("done", "diverged"):
            return
        yield earlier.id, checkpoint_address(store, earlier)


def last_points(store: Store, resume: Iterable[tuple[int, str]], attempt: Attempt) -> dict[str, dict[str, Any]]:
    """Return the final curve points of those resumable trainings that reached the last step.

    An attempt that resumes from there writes no curve point of its own.

    Args:
        store: Database.
        resume: (attempt id, storage address) pairs, as `resumable` yields them.
        attempt: New attempt; its `steps_total` is the last step.

    Returns:
        Fields of the last curve point as a dict, by attempt id as a string: step, tokens, wall_s, train_loss, val_loss,
        tokens_per_s, grad_norm, lr, mfu_paper, mfu, peak_memory. Trainings without a curve or with an earlier last
        point are left out.
    """
    last = {earlier: store.curve(earlier)[-1:] for earlier, _ in resume}
    return {
        str(attempt_id): asdict(point)
        for attempt_id, points in last.items()
        for point in points
        if point.step == attempt.steps_total
    }


def job_config(config: CellConfig) -> dict[str, Any]:
    """Return a config as the JSON object that job.json stores, without settings that older code does not know.

    Older code runs with `--code kept`. Left out are settings at a default that every older cell had implicitly, and
    settings of the sections `resources` and `checkpoint` at their default.
    """
    settings = without_identity_defaults(config)
    for section in ("resources", "checkpoint"):
        settings[section] = getattr(config, section).model_dump(mode="json", exclude_defaults=True)
    return settings


def reap(store: Store, cells: Sequence[Cell], runs: Path, executor: Executor | None = None) -> list[Attempt]:
    """End and mark attempts of these cells whose supervisor is gone, so that the cells can run again.

    Applies the attempts' journals first, which may record their regular end. Attempts of cells that a live supervisor
    of another process runs are left alone. So are attempts on hosts that neither this process nor `executor` reaches,
    until their heartbeat is older than 300 s (DEAD_AFTER_S); those are then marked without being ended. Blocks until
    the processes are gone.

    Args:
        store: Database.
        cells: Cells to free.
        runs: Runs folder with the journals.
        executor: Executor that may reach other hosts; None for this machine only.

    Returns:
        The attempts that were marked as interrupted, as records read before the marking (their state is "running").
    """
    live = store.live_attempts()
    this_process = processes.this_process("launch")
    free_cells = {cell.id for cell in cells} - (_supervised_cells(store, this_process) if live else set())
    marked = []
    orphans = [attempt for attempt in live if attempt.cell_id in free_cells]
    for attempt in orphans:
        journal.apply_remaining(store, runs, attempt.id)  # records the process, or its end, in the database
    orphans = [
        attempt for attempt in map(store.attempt, (orphan.id for orphan in orphans)) if attempt.state == "running"
    ]
    ended = (executor or HostExecutor()).end(orphans, runs) if orphans else set()
    for attempt in orphans:
        if attempt.id not in ended and datetime.now(UTC) - attempt.heartbeat_at < timedelta(seconds=DEAD_AFTER_S):
            continue
        journal.apply_remaining(store, runs, attempt.id)
        if store.interrupt_dead(
            attempt.id, "its launch died; the process was ended before the next attempt of the cell"
        ):
            marked.append(attempt)
    return marked


def _supervised_cells(store: Store, this_process: Owner) -> set[str]:
    """Return the ids of the cells of every sweep that a live supervisor other than `this_process` runs.

    A supervisor whose process cannot be seen from here counts as live until its lease ends.
    """
    cells: set[str] = set()
    for sweep in store.sweeps():
        if sweep.owner is None or sweep.owner.is_same_process(this_process):
            continue
        if processes.is_holder_active(sweep.owner, sweep.lease_until):
            cells |= {state.cell_id for state in store.cell_states(sweep.name)}
    return cells


def freeze_plugins(cells: Sequence[Cell], runs: Path) -> list[Cell]:
    """Copy plugin files to `runs`/plugins and return the cells, in their order, with absolute paths of the copies.

    Installed packages are not copied. A later edit of a plugin then changes no cell under way. Existing copies with the right hash are reused, and their
    modification time is renewed, since `gc` spares young files. A new copy is not compared with the hash. Cells without
    plugins are returned as they are; the given cells are not changed.

    Raises:
        OSError: A plugin file is missing, or the copy cannot be written.
    """
    frozen_cells = []
    for cell in cells:
        frozen = []
        for plugin in cell.config.plugins:
            if is_installed(plugin.path):
                frozen.append(plugin)
                continue
            copy = runs / "plugins" / f"{plugin.sha256[:12]}_{Path(plugin.path).name}"
            if copy.is_symlink() or not copy.is_file() or sha256(copy) != plugin.sha256:
                copy.parent.mkdir(parents=True, exist_ok=True)
                temporary = copy.with_name(f"{copy.name}.{os.getpid()}.part")
                shutil.copyfile(plugin.path, temporary)
                os.replace(temporary, copy)
            with contextlib.suppress(OSError):
                os.utime(copy)  # gc spares young files, which a sweep may be about to use
            frozen.append(plugin.model_copy(update={"path": str(copy.resolve())}))
        frozen_cells.append(
            replace(cell, config=cell.config.model_copy(update={"plugins": tuple(frozen)})) if frozen else cell
        )
    return frozen_cells
