"""`atma-sweep launch`: from a grid to finished cells, in one call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from ...results import contrasts
from ...results.errors import SweepBusy, SweepUnknown
from ...results.store.cell_status import standing
from ...results.store.records import NewRevision
from ...results.store.store import Store
from ..attempt import git
from ..checkpoints import storage
from ..errors import SweepError
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..machine import processes
from ..plan import corpora, disk_usage, ordering, planner
from ..probes import requested
from ..scheduler import journalled, source_snapshot
from ..scheduler.base import Executor, Opening, Tell
from ..scheduler.registry import DEFAULT, EXECUTORS, open_executor
from . import supervisor
from .supervisor import Listener, Supervisor

CODE = "code"
"""Kind of the event that names the code a sweep was launched with."""
CLAIM_AGAIN_S = 2.0


Commit = tuple[str | None, bool | None]
"""Where code comes from: a commit, and whether files differed from it; None where nobody can say."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One launch, as it was asked for."""

    grid: Grid
    cells: Sequence[Cell]
    """All of the grid's."""
    runs: Path
    executor: str = DEFAULT
    """Its name in the registry, as `chosen` gives it."""
    address: str | None = None
    """Of the cluster, for an executor that is found at one."""
    only: Sequence[str] = ()
    """Which cells to carry out now, as `--only` says it; none: all."""
    retrain: bool = False
    """Whether cells are trained again that diverged or whose weights are gone."""
    code: str = "new"
    """new, or kept: attempts run the code that the sweep was launched with last."""
    commit: Commit | None = None
    """None: of this checkout."""
    again: bool = False
    """Whether the same launch goes on after its process died."""

    @property
    def chosen(self) -> list[Cell]:
        """The cells to carry out now. Raises GridError for an `only` that means none."""
        return planner.select(self.grid, self.cells, self.only) if self.only else list(self.cells)


@dataclass(frozen=True)
class Outcome:
    """Where the launched cells stand after a launch."""

    standings: Counter[str]
    finished: bool
    """Every cell of this launch is done or has diverged."""


def plan(request: Request, store: Store | None) -> planner.Plan:
    """What a launch would do now, in the order it would, and the disk it needs; without a database `store` is None.

    Kept weights that are wanted and not found under `runs`, or where else the database says, count as gone. The
    database is not told: another machine that shares it may have them. Raises AddressError for a checkpoint.path that
    cannot be understood, StorageError when the place of weights cannot be reached.
    """
    chosen, runs = request.chosen, request.runs
    states = store.states({cell.id for cell in chosen}) if store is not None else {}
    for cell in chosen:
        state = states.get(cell.id)
        if state is None or not state.weights or standing(state, requested(cell.config.eval)) != "needs-eval":
            continue
        if not storage.exists(storage.resolve(runs, state.weights)):
            states[cell.id] = replace(state, weights=None)
    made = planner.plan(chosen, states, retrain=request.retrain, left_out=len(request.cells) - len(chosen))
    finished = {cell for cell, word in made.standings.items() if word == "done"}
    tasks = ordering.ordered(made.tasks, chosen, list(request.grid.axes), states, finished)
    return replace(made, tasks=tasks, disk=disk_usage.needed([task.cell for task in made.training], runs))


def run(
    request: Request,
    store: Store,
    listener: Listener,
    *,
    planned: Callable[[planner.Plan], None] = lambda plan: None,
    tell: Tell = lambda line: None,
) -> Outcome:
    """Launches a grid and stays until its cells are finished. Attempts run a frozen copy of this package.

    Raises SweepBusy when somebody else runs the sweep, MachineError when a GPU is missing or held, CorpusError and
    DataError for unusable text, AddressError and StorageError for a checkpoint.path that cannot be used, Interrupted
    after a clean stop.
    """
    runs, sweep = request.runs, request.grid.name
    corpora.check(request.chosen, runs / "corpora")
    request = replace(
        request, cells=supervisor.freeze_plugins(request.cells, runs), commit=request.commit or git.git_state()
    )
    opening = Opening(store, runs, tell, request.address)
    before = _last_source(store, sweep)
    source = _source(before, sweep, runs, request.code, tell)
    folder = source_snapshot.folder(runs, source)
    with ExitStack() as held:
        executor: Executor | None = None
        if EXECUTORS[request.executor].needs_address:
            # before the sweep is claimed, so that a cluster that cannot be reached changes nothing
            executor = held.enter_context(closing(open_executor(request.executor, opening)))
        fence = claim(request, store, processes.this_process("launch"))
        held.callback(store.release_sweep, sweep, fence)
        if source != before:
            store.add_event(CODE, source, sweep=sweep)
        supervisor.reap(store, request.chosen, runs, executor)
        plan_ = plan(request, store)
        planned(plan_)
        for place in {task.cell.config.checkpoint.path for task in plan_.tasks if task.kind == "train"}:
            if place is not None:
                storage.place(place).check()
        if plan_.tasks:
            # attempts end before the sweep is released
            executor = held.enter_context(closing(executor or open_executor(request.executor, opening)))
            share = [(sweep, fence, plan_.tasks)]
            carry_out(store, share, listener, executor, runs=runs, commit=request.commit, source=folder)
        after = plan(replace(request, cells=request.chosen, only=()), store)
        rest = {word for word, count in after.counts.items() if count} - {"done", "diverged"}
        return Outcome(after.counts, not rest)


def carry_out(
    store: Store,
    shares: Sequence[tuple[str, int, Sequence[planner.Task]]],
    listener: Listener,
    executor: Executor,
    *,
    runs: Path,
    commit: Commit | None,
    source: Path | None = None,
) -> None:
    """Runs the tasks of sweeps that the caller holds, (sweep, fence, tasks) each, one sweep after the other.

    The executor holds the GPUs that they need until it is closed, so that attempts of these sweeps alone share them.
    Raises MachineError (also for a cell that no machine has room for), Interrupted, LostLease.
    """
    executor = journalled.understood(executor, store, source)
    executor.admit([task.cell for _, _, share in shares for task in share])
    every = [(sweep, fence) for sweep, fence, _ in shares]
    for sweep, fence, share in shares:
        one = Supervisor(
            store, sweep, fence, executor, listener,
            runs=runs, commit=commit or (None, None), source=source, beside=every,
        )  # fmt: skip
        one.run(share)


def claim(request: Request, store: Store, owner: processes.Owner) -> int:
    """Takes the sweep and records what is launched, in one: a refused launch changes nothing. Returns its fence.

    The same launch that goes on again waits for the lease that it had on another machine. Raises SweepBusy.
    """
    grid, again = request.grid, request.again
    commit, dirty = request.commit or (None, None)
    wanted = sorted({pair for cell in request.cells for pair in requested(cell.config.eval)})
    revision = NewRevision(
        grid_text=grid.document.text,
        grid_file=str(grid.document.path),
        options={
            "requested": [list(pair) for pair in wanted],
            "set": {path: setting.value for path, setting in grid.command_line.items()},
            # absent where there is none, so that a sweep of before they existed is relaunched as the same revision
            **({contrasts.OPTION: contrasts.as_options(grid.contrasts)} if grid.contrasts else {}),
        },
        commit=commit,
        dirty=dirty,
        cells=[planner.record(cell) for cell in request.cells],
    )
    deadline = time.monotonic() + (2 * supervisor.LEASE_S if again else 0.0)
    while True:
        try:
            return store.acquire_sweep(
                grid.name, owner, supervisor.LEASE_S, is_alive=processes.is_alive, revision=revision, forget=not again
            )
        except SweepBusy:
            if time.monotonic() >= deadline:
                raise
        time.sleep(CLAIM_AGAIN_S)


def _source(before: str | None, sweep: str, runs: Path, code: str, tell: Tell) -> str:
    """Which copy of the package this launch runs, by its fingerprint; tells when it is another than before."""
    now = source_snapshot.freeze(runs)
    if before is None or before == now:
        return now
    if code == "kept":
        if source_snapshot.folder(runs, before) is None:
            raise SweepError(f"the code that sweep {sweep} was launched with ({before}) is gone; launch without --code")
        tell(f"code: as launched before ({before}), not as it is now ({now})")
        return before
    tell(
        f"code: changed since the last launch ({before} to {now}); finished cells stay, the others go on with the new code; "
        "--code kept goes on with the old"
    )
    return now


def _last_source(store: Store, sweep: str) -> str | None:
    """Fingerprint of the code that the sweep was launched with last."""
    try:
        known = (event.message for event in reversed(store.events(sweep=sweep)) if event.kind == CODE)
        return next((message for message in known if source_snapshot.is_fingerprint(message)), None)
    except SweepUnknown:
        return None
