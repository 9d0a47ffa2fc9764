"""Carries out a plan: claims the sweep, reaps what died, keeps one process per running attempt, survives Ctrl-C."""

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
from ...results.store.records import DEAD_AFTER_S, Attempt, CellState, Owner, Standing, missing, standing
from ...results.store.store import Store
from ..attempt.failures import EXIT_MACHINE, NODE_LOST, judge, oom_kills
from ..attempt.job import Job
from ..checkpoints.address import place_of
from ..checkpoints.seal import sha256
from ..config import CellConfig, Resources, without_identity_defaults
from ..errors import MachineError
from ..executors.executor import Executor, HostExecutor, ProcessSpec
from ..executors.source_snapshot import takes_weights_hash
from ..grid.cell import Cell
from ..host import processes
from ..host.allocation import should_yield_gpu
from ..host.signals import Interrupted, StopSignals
from ..planning.planner import Task
from .retries import RetryTracker

CapacityCheck = Callable[[Resources], bool]
"""Whether an attempt of that size could start now. Always so while nothing runs: what does not fit then never will."""


class TaskSource(Protocol):
    """Asked by one supervisor, from its thread. Whatever it raises ends the launch."""

    def further(self, fits: CapacityCheck) -> Sequence[Task]:
        """Tasks to make now, whose cells the database knows already; none before an attempt that runs has ended.

        Asked again and again while no task waits. None, and nothing runs: the launch has ended.
        """

    def ended(self, task: Task, attempt: Attempt, again: bool) -> None:
        """An attempt of whichever task has ended, however it did; `again`: its cell is tried once more, and nothing is final."""
        return

    def hopeless(self, attempts: Sequence[Attempt]) -> Mapping[int, str]:
        """Which of these running attempts are to save themselves and end now, by id, and why; their cells count as pruned.

        Asked several times a second.
        """
        return {}


LEASE_S = 60.0
RENEW_S = 5.0
POLL_S = 0.2
LISTEN_S = 1.0


class Listener(Protocol):
    """Told of what happens, for a display."""

    def started(self, task: Task, attempt: Attempt) -> None:
        """An attempt's process is starting."""

    def running(self, attempts: Sequence[Attempt]) -> None:
        """The attempts of this supervisor as they stand, several times a second."""

    def ended(self, task: Task, attempt: Attempt) -> None:
        """An attempt has ended, however it did."""

    def waiting(self, cell: Cell) -> None:
        """A cell is being trained by another sweep; this one will take the result."""


@dataclass
class _Running:
    """An attempt of this supervisor, from its start until its end is noted."""

    task: Task
    progress: object = None
    """What the database last knew of it."""
    changed: float = 0.0
    """When that changed, on the monotonic clock."""
    hung: bool = False
    is_stopping: bool = False
    """Whether it was asked to save itself and leave."""
    hopeless: str | None = None
    """Why the source has given it up."""


class Supervisor:
    """One launch of one sweep. The caller holds the sweep under `fence`."""

    def __init__(
        self, store: Store, sweep: str, fence: int, executor: Executor, listener: Listener, *, runs: Path,
        commit: tuple[str | None, bool | None], source: Path | None = None, beside: Sequence[tuple[str, int]] = (),
    ) -> None:  # fmt: skip
        """`beside`: other sweeps that the caller holds, by name and fence, whose leases are to be kept meanwhile."""
        self.store, self.sweep, self.fence = store, sweep, fence
        self._held = [(sweep, fence), *(pair for pair in beside if pair[0] != sweep)]
        self.source = source
        self.executor, self.listener = executor, listener
        self.runs, self.commit = runs, commit
        self._owner = processes.this_process("launch")
        self._running: dict[int, _Running] = {}
        self._retries = RetryTracker()
        self._given_up: dict[str, Task] = {}
        self._source: TaskSource | None = None
        self._signals = StopSignals()
        self._oom_kills = oom_kills()
        self._paused = self._finishing = False
        self._renewed = self._listened = 0.0
        self._looked = time.monotonic()

    def run(self, tasks: Sequence[Task], source: TaskSource | None = None) -> None:
        """Runs every task to its end, and whatever `source` gives whenever no task waits.

        Raises Interrupted after a clean stop, LostLease when the sweep was taken over, SweepBroken when cell after cell
        fails in the same way, MachineError when the executor breaks.
        """
        queue = deque(tasks)
        self._source = source
        with StopSignals() as self._signals:
            while self._more(queue):
                self._renew()
                if self._signals.number is not None:
                    self._stop()
                    raise Interrupted(self._signals.number)
                broken = self.executor.broken()
                if broken is not None:
                    self._stop()
                    raise MachineError(f"{broken}; launch again to continue")
                self._listen(queue)
                if not self._paused and not self._finishing:
                    self._fill(queue)
                ended = self.executor.wait(POLL_S)
                for attempt, code in ended:
                    self._close(attempt, code, queue)
                self._show()
                if not self._running and not ended:
                    time.sleep(POLL_S)
        if self._finishing:
            self.store.ask(self.sweep, finish=None, pause=None, retry=None)
            if queue or source is not None:
                raise Interrupted(signal.SIGTERM, "finished what ran, as asked; launch again to continue")

    def _more(self, queue: deque[Task]) -> bool:
        """Whether anything is left to do, after asking for more where no task waits."""
        if self._finishing:
            return bool(self._running)
        if self._source is not None and not queue and not self._paused and self._signals.number is None:
            queue.extend(self._source.further(self._fits))
        return bool(queue or self._running) or (self._source is not None and self._paused)

    def _fits(self, resources: Resources) -> bool:
        return not self._is_alone() and (not self._running or self.executor.fits(resources))

    def _is_alone(self) -> bool:
        """Return whether an attempt runs that has the machine to itself."""
        return any(entry.task.alone for entry in self._running.values())

    def _listen(self, queue: deque[Task]) -> None:
        """Does what people have asked of the sweep: pause, finish, cancel, retry."""
        if time.monotonic() - self._listened < LISTEN_S:
            return
        self._listened = time.monotonic()
        asked = self.store.asked(self.sweep)
        if asked.get("cancel"):
            self._stop()
            self.store.ask(self.sweep, cancel=None, finish=None, pause=None, retry=None)
            raise Interrupted(signal.SIGTERM, "cancelled; launch again to continue")
        self._finishing = bool(asked.get("finish"))
        if bool(asked.get("pause")) != self._paused:
            self._paused = not self._paused
            if self._paused:
                held = [entry.task for entry in self._running.values()]
                self._stop()
                queue.extendleft(reversed(held))
            self.store.add_event("paused" if self._paused else "resumed", f"sweep {self.sweep}", sweep=self.sweep)
        # one whose attempt has failed, but is not closed yet, is asked for again the next time
        running = {entry.task.cell.id for entry in self._running.values()}
        heard = [cell for cell in asked.get("retry", ()) if cell not in running]
        for cell in heard:
            task = self._given_up.pop(cell, None)
            if task is not None:
                queue.append(task)
        if heard:
            self.store.answered(self.sweep, retry=heard)

    def _renew(self) -> None:
        if time.monotonic() - self._renewed >= RENEW_S:
            for sweep, fence in self._held:
                self.store.renew_sweep(sweep, fence, LEASE_S)
            self._renewed = time.monotonic()

    def _fill(self, queue: deque[Task]) -> None:
        crowded: set[Resources] = set()
        for _ in range(len(queue)):
            task = queue.popleft()
            wanted = task.cell.config.resources
            waits = time.monotonic() < task.not_before or self._is_alone()
            if waits or (task.alone and self._running) or should_yield_gpu(wanted, crowded):
                queue.append(task)
                continue
            if not self.executor.fits(wanted):
                crowded.add(wanted)
                queue.append(task)
                continue
            state = self.store.states({task.cell.id}).get(task.cell.id)
            now = standing(state, task.missing) if state is not None else task.why
            if now == "running":
                self._wait_for(task.cell)
                queue.append(task)
                continue
            still = self._revised(task, state, now)
            if still is not None and not self._start(still, queue):
                queue.append(still)

    def _revised(self, task: Task, state: CellState | None, now: Standing) -> Task | None:
        """The task as it stands now: another sweep may have trained the cell since the plan was made."""
        if task.repeat:
            return self._repeated(task, state)
        if now == task.why or now in ("new", "interrupted", "pruned", "failed"):
            return task
        if task.why == "weights gone" and now == "needs-eval":
            # the database still names weights that this machine does not have, which is why they are trained again
            return task
        if now == "needs-eval" and state is not None:
            lacking = missing(state, task.missing)
            return replace(
                task, kind="evaluate", missing=lacking, weights=state.weights, parent_id=state.trained_attempt_id
            )
        return None

    def _repeated(self, task: Task, state: CellState | None) -> Task | None:
        """The same measurements on the newest training, which another sweep may have made since; None without weights.

        What nobody here has trained has no newer training either.
        """
        if state is None or task.parent_id in (None, state.trained_attempt_id):
            return task
        return replace(task, weights=state.weights, parent_id=state.trained_attempt_id) if state.weights else None

    def _start(self, task: Task, queue: deque[Task]) -> bool:
        """False when another sweep trains the cell at this moment."""
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
            self._wait_for(task.cell)
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
            more = bool(queue) or self._source is not None
            resources = task.cell.config.resources
            self.executor.start(ProcessSpec(attempt.id, self.runs, job.folder, resources, url, self.source, more))
        except OSError as error:
            # a runs folder that is full or gone, no process left: whatever it is, the cell is not to blame
            with contextlib.suppress(LeaseLost):
                self.store.finish_attempt(
                    attempt.id, attempt.fence, "failed", cause=f"could not be started: {error}",
                    exit_code=EXIT_MACHINE, failure="infrastructure",
                )  # fmt: skip
            self._close(attempt.id, EXIT_MACHINE, queue)
        return True

    def _weights_sha256(self, task: Task) -> str | None:
        """Return the recorded SHA-256 of the kept weights that the task evaluates; None for code that would refuse it."""
        if task.weights is None or task.parent_id is None:
            return None
        if self.source is not None and not takes_weights_hash(self.source):
            return None
        origin = self.store.provenance(task.parent_id)
        return origin.weights_sha256 if origin is not None else None

    def _wait_for(self, cell: Cell) -> None:
        """Another sweep runs the cell: its result will do, and should that sweep turn out to be dead, the cell is freed."""
        self.listener.waiting(cell)
        if time.monotonic() - self._looked >= RENEW_S:
            self._looked = time.monotonic()
            reap(self.store, [cell], self.runs, self.executor)

    def _close(self, attempt_id: int, code: int, queue: deque[Task]) -> None:
        closing = self._running.pop(attempt_id)
        task = closing.task
        attempt = self.store.attempt(attempt_id)
        again = None
        if attempt.state == "running":
            kills = oom_kills()
            killed, self._oom_kills = kills > self._oom_kills, kills
            log = self.runs / attempt.run_dir / "log.txt"
            asked = closing.is_stopping or self._signals.number is not None
            ending = judge(code, log, oom_killed=killed, hung=closing.hung, asked=asked)
            state, cause = ending.state, ending.cause
            if ending.failure is not None:
                again = self._retries.after(task, attempt, ending.failure)
                if again is None and state == "interrupted":
                    state, cause = "failed", f"{cause}; given up for this launch"
            with contextlib.suppress(LeaseLost):
                self.store.finish_attempt(
                    attempt_id, attempt.fence, state, cause=cause, exit_code=None if code <= NODE_LOST else code,
                    failure=ending.failure,
                )  # fmt: skip
            attempt = self.store.attempt(attempt_id)
        elif attempt.state == "failed":
            again = self._retries.after(task, attempt, cast(Failure, attempt.failure or "code"))
        elif attempt.state == "interrupted" and code < 0 and closing.hopeless is None:
            # it had saved itself when its node, not we, asked it to leave
            again = self._retries.after(task, attempt, "node_lost" if code == NODE_LOST else PREEMPTED)
        if closing.hopeless is not None and attempt.state == "interrupted":
            self.store.mark_pruned(attempt_id, closing.hopeless)
            attempt, again = self.store.attempt(attempt_id), None
        if again is not None:
            queue.appendleft(again)
        elif attempt.state == "failed":
            self._given_up[task.cell.id] = replace(task, deviation={}, alone=False, not_before=0.0)
        self.listener.ended(task, attempt)
        if self._source is not None:
            self._source.ended(task, attempt, again is not None)
        if attempt.state == "failed" and attempt.failure == "code":
            self._break_off(task, attempt, queue)

    def _break_off(self, task: Task, attempt: Attempt, queue: deque[Task]) -> None:
        """Stops the sweep when too many cells made the same mistake and others are still to come."""
        broken = self._retries.broken(task.cell.id, attempt.cause or "no cause")
        if broken is not None and (queue or self._running):
            self.store.add_event("stopped", str(broken), sweep=self.sweep)
            self._stop()
            raise broken

    def _end_hung(self, attempts: Iterable[Attempt]) -> None:
        """Kills attempts that have told nothing new for too long, after asking where their threads stand."""
        for attempt in attempts:
            entry, now = self._running[attempt.id], time.monotonic()
            progress = (attempt.heartbeat_at, attempt.step, attempt.phase)
            if progress != entry.progress:
                entry.progress, entry.changed = progress, now
            elif not entry.hung and now - entry.changed >= 60 * entry.task.cell.config.resources.hang_minutes:
                entry.hung = self.executor.kill(attempt, dump=True)

    def _show(self) -> None:
        if self._running:
            live = {attempt.id: attempt for attempt in self.store.live_attempts(self.sweep)}
            mine = [live[key] for key in self._running if key in live]
            self.listener.running(mine)
            self._end_hung(mine)
            self._prune(mine)

    def _prune(self, attempts: Sequence[Attempt]) -> None:
        """Ends attempts that the source has given up."""
        if self._source is None:
            return
        free = [attempt for attempt in attempts if not self._running[attempt.id].is_stopping]
        hopeless = self._source.hopeless(free)
        for attempt in free:
            if attempt.id in hopeless and self.executor.stop(attempt):
                self._running[attempt.id].is_stopping = True
                self._running[attempt.id].hopeless = hopeless[attempt.id]

    def _stop(self) -> None:
        """Asks every attempt to save itself and leave; kills what is still there after the grace, marks everything."""
        deadline = time.monotonic() + processes.GRACE_S - 1
        nothing: deque[Task] = deque()
        while self._running and time.monotonic() < deadline:
            for attempt in self.store.live_attempts(self.sweep):
                entry = self._running.get(attempt.id)
                if entry is not None and not entry.is_stopping:
                    entry.is_stopping = self.executor.stop(attempt)
            for attempt_id, code in self.executor.wait(POLL_S):
                self._close(attempt_id, code, nothing)
        for attempt_id in self._running:
            attempt = self.store.attempt(attempt_id)
            if self.executor.away(attempt):
                continue  # still `running`, so that nobody takes the cell up before the node's lease has ended
            self.executor.kill(attempt)
            self.store.interrupt_dead(attempt_id, "killed: it did not leave in time after the launch was stopped")
        self._running.clear()


def resumable(store: Store, attempt: Attempt) -> Iterator[tuple[int, str]]:
    """Yield earlier unfinished trainings of a training's cell, newest first, back to the last one that ended as a result.

    Each is (attempt id, address of the place of its checkpoints); an attempt that trains nothing resumes none.
    """
    for earlier in reversed(store.attempts(attempt.cell_id) if attempt.kind == "train" else ()):
        # one that came with a bundle has no checkpoint here, and what it says of places is not ours to follow
        if earlier.id == attempt.id or earlier.kind != "train" or earlier.imported:
            continue
        if earlier.state in ("done", "diverged"):
            return
        yield earlier.id, place_of(store, earlier)


def last_points(store: Store, resume: Iterable[tuple[int, str]], attempt: Attempt) -> dict[str, dict[str, Any]]:
    """Return the last points of resumable curves that reach the last step: who goes on from there writes no point."""
    last = {earlier: store.curve(earlier)[-1:] for earlier, _ in resume}
    return {
        str(key): asdict(point) for key, found in last.items() for point in found if point.step == attempt.steps_total
    }


def job_config(config: CellConfig) -> dict[str, Any]:
    """A config as job.json has it: what older code, which `--code kept` runs, need not know of is left out.

    That is a setting at the default that every older cell had without saying so, and whatever touches no number and
    stands at its default.
    """
    told = without_identity_defaults(config)
    for section in ("resources", "checkpoint"):
        told[section] = getattr(config, section).model_dump(mode="json", exclude_defaults=True)
    return told


def reap(store: Store, cells: Sequence[Cell], runs: Path, executor: Executor | None = None) -> list[Attempt]:
    """Ends and marks attempts of these cells whose supervisor is gone, so that they can run again.

    What they left in a journal is applied first. An attempt of another live supervisor is left alone, and so is one on
    a host that neither is this one nor can be reached by `executor`, if it was heard of not long ago. Returns the
    attempts that were marked.
    """
    live = store.live_attempts()
    me = processes.this_process("launch")
    free = {cell.id for cell in cells} - (_supervised(store, me) if live else set())
    marked = []
    mine = [attempt for attempt in live if attempt.cell_id in free]
    for attempt in mine:
        journal.settle(store, runs, attempt.id)  # which tells who the process is, or how it ended
    mine = [attempt for attempt in map(store.attempt, (one.id for one in mine)) if attempt.state == "running"]
    ended = (executor or HostExecutor()).end(mine, runs) if mine else set()
    for attempt in mine:
        if attempt.id not in ended and datetime.now(UTC) - attempt.heartbeat_at < timedelta(seconds=DEAD_AFTER_S):
            continue
        journal.settle(store, runs, attempt.id)
        if store.interrupt_dead(
            attempt.id, "its launch died; the process was ended before the cell was taken up again"
        ):
            marked.append(attempt)
    return marked


def _supervised(store: Store, me: Owner) -> set[str]:
    """The cells of every sweep that a live supervisor other than this process runs."""
    cells: set[str] = set()
    for sweep in store.sweeps():
        if sweep.owner is None or sweep.owner.same_process(me):
            continue
        if processes.holds(sweep.owner, sweep.lease_until):
            cells |= {state.cell_id for state in store.cell_states(sweep.name)}
    return cells


def freeze_plugins(cells: Sequence[Cell], runs: Path) -> list[Cell]:
    """Copies plugin files into the runs folder, so that a later edit changes no cell that is under way."""
    out = []
    for cell in cells:
        frozen = []
        for plugin in cell.config.plugins:
            copy = runs / "plugins" / f"{plugin.sha256[:12]}_{Path(plugin.path).name}"
            if copy.is_symlink() or not copy.is_file() or sha256(copy) != plugin.sha256:
                copy.parent.mkdir(parents=True, exist_ok=True)
                aside = copy.with_name(f"{copy.name}.{os.getpid()}.part")
                shutil.copyfile(plugin.path, aside)
                os.replace(aside, copy)
            with contextlib.suppress(OSError):
                os.utime(copy)  # gc leaves young ones alone, which a sweep is about to name
            frozen.append(plugin.model_copy(update={"path": str(copy.resolve())}))
        out.append(replace(cell, config=cell.config.model_copy(update={"plugins": tuple(frozen)})) if frozen else cell)
    return out
