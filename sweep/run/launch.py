"""`atma-sweep launch`: from a grid to finished cells, in one call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...results.errors import SweepBusy, SweepUnknown
from ...results.store.cell_status import standing
from ...results.store.records import NewRevision
from ...results.store.store import Store
from ..checkpoints import storage
from ..errors import SweepError
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..machine import allocation, hardware, processes
from ..machine.locks import GpuLocks
from ..plan import corpora, disk_usage, fit, ordering, planner
from ..probes import requested
from ..scheduler import source_snapshot
from ..scheduler.base import Executor, LocalExecutor
from . import supervisor
from .supervisor import Listener, Supervisor

if TYPE_CHECKING:
    from ..scheduler.ray_cluster import ClusterExecutor

CODE = "code"
"""Kind of the event that names the code a sweep was launched with."""
CLAIM_AGAIN_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """Where the launched cells stand after a launch."""

    standings: Counter[str]
    finished: bool
    """Every cell of this launch is done or has diverged."""


def plan(
    grid: Grid,
    cells: Sequence[Cell],
    store: Store | None,
    *,
    runs: Path,
    only: Sequence[str] = (),
    retrain: bool = False,
) -> planner.Plan:
    """What a launch would do now, in the order it would, and the disk it needs; without a database `store` is None.

    Kept weights that are wanted and not found under `runs`, or where else the database says, count as gone. The
    database is not told: another machine that shares it may have them. Raises AddressError for a checkpoint.path that
    cannot be understood, StorageError when the place of weights cannot be reached.
    """
    chosen = planner.select(grid, cells, only) if only else list(cells)
    states = store.states({cell.id for cell in chosen}) if store is not None else {}
    for cell in chosen:
        state = states.get(cell.id)
        if state is None or not state.weights or standing(state, requested(cell.config.eval)) != "needs-eval":
            continue
        if not storage.exists(storage.resolve(runs, state.weights)):
            states[cell.id] = replace(state, weights=None)
    made = planner.plan(chosen, states, retrain=retrain, left_out=len(cells) - len(chosen))
    finished = {cell for cell, word in made.standings.items() if word == "done"}
    tasks = ordering.ordered(made.tasks, chosen, list(grid.axes), states, finished)
    return replace(made, tasks=tasks, disk=disk_usage.needed([task.cell for task in made.training], runs))


def run(
    grid: Grid,
    cells: Sequence[Cell],
    store: Store,
    listener: Listener,
    *,
    runs: Path,
    executor: str = "ray",
    address: str | None = None,
    only: Sequence[str] = (),
    retrain: bool = False,
    code: str = "new",
    commit: tuple[str | None, bool | None] | None = None,
    again: bool = False,
    planned: Callable[[planner.Plan], None] = lambda plan: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Launches a grid and stays until its cells are finished.

    Attempts run a frozen copy of this package: as it stands now, or with `code` "kept" as the sweep was launched last.
    With `address` they run on that Ray cluster. `commit`: where the code comes from, else this checkout. `again`: the
    same launch goes on after its process died.

    Raises SweepBusy when somebody else runs the sweep, MachineError when a GPU is missing or held, CorpusError and
    DataError for unusable text, AddressError and StorageError for a checkpoint.path that cannot be used, Interrupted
    after a clean stop.
    """
    chosen = planner.select(grid, cells, only) if only else list(cells)
    corpora.check(chosen, runs / "corpora")
    cells = supervisor.freeze_plugins(cells, runs)
    kept = {cell.id for cell in chosen}
    chosen = [cell for cell in cells if cell.id in kept]
    commit = commit or _git_state()
    owner = processes.this_process("launch")
    before = _last_source(store, grid.name)
    source = _source(before, grid.name, runs, code, tell)
    folder = source_snapshot.folder(runs, source)
    # before the sweep is claimed, so that a cluster that cannot be reached changes nothing
    with (
        _cluster(address, store, runs, tell) as cluster,
        _claimed(store, grid, cells, commit, owner, again) as fence,
        closing(cluster) if cluster is not None else nullcontext(),  # attempts end before the sweep is released
    ):
        if source != before:
            store.add_event(CODE, source, sweep=grid.name)
        supervisor.reap(store, chosen, runs, cluster)
        plan_ = plan(grid, cells, store, only=only, retrain=retrain, runs=runs)
        planned(plan_)
        for place in {task.cell.config.checkpoint.path for task in plan_.tasks if task.kind == "train"}:
            if place is not None:
                storage.place(place).check()
        carry_out(
            store, [(grid.name, fence, plan_.tasks)], listener,
            runs=runs, executor=cluster or executor, commit=commit, source=folder,
        )  # fmt: skip
        after = plan(grid, chosen, store, runs=runs)
        rest = {word for word, count in after.counts.items() if count} - {"done", "diverged"}
        return Outcome(after.counts, not rest)


@contextmanager
def _claimed(
    store: Store,
    grid: Grid,
    cells: Sequence[Cell],
    commit: tuple[str | None, bool | None],
    owner: processes.Owner,
    again: bool,
) -> Iterator[int]:
    """The sweep, under its fence, until it is released."""
    fence = claim(store, grid, cells, commit, owner, again=again)
    try:
        yield fence
    finally:
        store.release_sweep(grid.name, fence)


@contextmanager
def _cluster(
    address: str | None, store: Store, runs: Path, tell: Callable[[str], None]
) -> Iterator[ClusterExecutor | None]:
    """The nodes of the cluster at that address, until their agents are ended; None without an address."""
    if address is None:
        yield None
        return
    from ..scheduler.ray_cluster import open_cluster

    place = open_cluster(address, store, runs, tell)
    try:
        yield place
    finally:
        place.close()


def carry_out(
    store: Store,
    shares: Sequence[tuple[str, int, Sequence[planner.Task]]],
    listener: Listener,
    *,
    runs: Path,
    executor: str | ClusterExecutor,
    commit: tuple[str | None, bool | None],
    source: Path | None = None,
) -> None:
    """Runs the tasks of sweeps that the caller holds, (sweep, fence, tasks) each, one sweep after the other.

    The GPUs that they need are locked for as long, so that attempts of these sweeps alone share them; a cluster keeps
    them until its agents end. Raises MachineError (also for a cell that no machine has room for), Interrupted, LostLease.
    """
    tasks = [task for _, _, share in shares for task in share]
    if not tasks:
        return
    with ExitStack() as held:
        place: Executor
        if isinstance(executor, str):
            locks = GpuLocks()
            held.callback(locks.release)
            place = _executor(executor, _machine([task.cell for task in tasks], locks))
            held.callback(place.close)
        else:
            place = executor
            executor.admit([task.cell for task in tasks])
        every = [(sweep, fence) for sweep, fence, _ in shares]
        for sweep, fence, share in shares:
            supervisor_ = Supervisor(
                store, sweep, fence, place, listener, runs=runs, commit=commit, source=source, beside=every
            )
            supervisor_.run(share)


def claim(
    store: Store,
    grid: Grid,
    cells: Sequence[Cell],
    commit: tuple[str | None, bool | None],
    owner: processes.Owner,
    *,
    again: bool = False,
) -> int:
    """Takes the sweep and records what is launched, in one: a refused launch changes nothing.

    `again`: the same launch goes on after its process died, and waits for the lease that it had on another machine.
    """
    wanted = sorted({pair for cell in cells for pair in requested(cell.config.eval)})
    revision = NewRevision(
        grid_text=grid.document.text,
        grid_file=str(grid.document.path),
        options={
            "requested": [list(pair) for pair in wanted],
            "set": {path: setting.value for path, setting in grid.command_line.items()},
        },
        commit=commit[0],
        dirty=commit[1],
        cells=[planner.record(cell) for cell in cells],
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


def _source(before: str | None, sweep: str, runs: Path, code: str, tell: Callable[[str], None]) -> str:
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


def _machine(cells: Sequence[Cell], locks: GpuLocks) -> allocation.Machine:
    """This machine, its GPUs locked if any cell needs one. Raises MachineError for a cell that it has no room for."""
    kinds = {cell.config.resources.gpu_type for cell in cells if cell.config.resources.gpus}
    if not kinds:
        here = allocation.Machine.here()
        fit.check(cells, here)
        return here
    every = hardware.gpus()
    # before any lock is taken: what does not fit the whole machine will not when another sweep has ended
    fit.check(cells, allocation.Machine.here(every))
    taken = locks.take([gpu for gpu in every if any(allocation.is_type(gpu.name, kind) for kind in kinds)])
    here = allocation.Machine.here(taken)
    fit.check(cells, here, held=[gpu for gpu in every if gpu not in taken])
    return here


def _executor(name: str, here: allocation.Machine) -> Executor:
    if name == "local":
        return LocalExecutor(here)
    from ..scheduler.ray_local import RayExecutor

    return RayExecutor(here)


def _git_state() -> tuple[str | None, bool | None]:
    from ..attempt.git import git_state

    return git_state()
