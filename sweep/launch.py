"""`atma-sweep launch`: from a grid to finished cells, in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..results.errors import SweepUnknown
from ..results.store import Store
from . import machine, planner, process, supervisor
from .cell import Cell
from .errors import SweepError
from .executors import Executor, LocalExecutor
from .grid import Grid
from .probes import requested
from .supervisor import Listener, Supervisor
from .training import corpora
from .training.corpora import CorpusError
from .training.data import Batches

UNPREPARED = "unprepared"


@dataclass(frozen=True)
class Outcome:
    """Where the launched cells stand after a launch."""

    standings: Counter[str]
    finished: bool
    """Every cell of this launch is done or has diverged."""


def expand(grid: Grid, *, dry: bool = False) -> tuple[list[Cell], list[str]]:
    """The grid's cells with their corpora pinned, and remarks.

    A dry run forgives a corpus that is not on this machine: ids are then provisional, and a remark says so.
    """
    remarks: list[str] = []

    def pin(data: corpora.DataConfig) -> str:
        try:
            return corpora.fingerprint(data)
        except SweepError as error:
            if not dry or isinstance(error, CorpusError):
                raise
            remarks.append(f"{error}; the ids above are provisional")
            return f"{UNPREPARED}:{data.corpus}:{data.tokenizer}"

    return grid.expand(pin), remarks


def plan(
    grid: Grid,
    cells: Sequence[Cell],
    store: Store | None,
    *,
    only: Sequence[str] = (),
    retrain: bool = False,
    runs: Path | None = None,
) -> planner.Plan:
    """What a launch would do now; `store` is None when there is no database yet.

    With `runs`, kept weights whose file is not in that folder count as gone. The database is not told: another machine
    that shares it may have them.
    """
    chosen = planner.select(grid, cells, only) if only else list(cells)
    states = store.states({cell.id for cell in chosen}) if store is not None else {}
    if runs is not None:
        gone = [state for state in states.values() if state.weights and not (runs / state.weights).is_file()]
        states |= {state.cell_id: replace(state, weights=None) for state in gone}
    return planner.plan(chosen, states, retrain=retrain, left_out=len(cells) - len(chosen))


def run(
    grid: Grid,
    cells: Sequence[Cell],
    store: Store,
    listener: Listener,
    *,
    runs: Path,
    executor: str = "ray",
    only: Sequence[str] = (),
    retrain: bool = False,
    planned: Callable[[planner.Plan], None] = lambda plan: None,
) -> Outcome:
    """Launches a grid and stays until its cells are finished.

    Raises SweepBusy when somebody else runs the sweep, MachineError when a GPU is missing or held, CorpusError and
    DataError for unusable text, Interrupted after a clean stop.
    """
    chosen = planner.select(grid, cells, only) if only else list(cells)
    _prepare(chosen, runs)
    cells = supervisor.freeze_plugins(cells, runs)
    kept = {cell.id for cell in chosen}
    chosen = [cell for cell in cells if cell.id in kept]
    commit = _git_state()
    owner = process.this_process("launch")
    fence = _claim(store, grid, cells, commit, owner)
    locks = machine.GpuLocks()
    try:
        supervisor.reap(store, chosen)
        plan_ = plan(grid, cells, store, only=only, retrain=retrain, runs=runs)
        planned(plan_)
        if plan_.tasks:
            gpus = _gpus(plan_.tasks, locks)
            room = _executor(executor, gpus)
            try:
                Supervisor(store, grid.name, fence, room, listener, runs=runs, commit=commit).run(plan_.tasks)
            finally:
                room.close()
        after = plan(grid, chosen, store, runs=runs)
        rest = {word for word, count in after.counts.items() if count} - {"done", "diverged"}
        return Outcome(after.counts, not rest)
    finally:
        locks.release()
        store.release_sweep(grid.name, fence)


def _claim(
    store: Store, grid: Grid, cells: Sequence[Cell], commit: tuple[str | None, bool | None], owner: process.Owner
) -> int:
    """Takes the sweep, then records what is launched, so that a refused launch changes nothing."""
    wanted = sorted({pair for cell in cells for pair in requested(cell.config.eval)})

    def record() -> None:
        store.record_revision(
            grid.name,
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

    try:
        fence = store.acquire_sweep(grid.name, owner, supervisor.LEASE_S, is_alive=process.is_alive)
    except SweepUnknown:
        record()
        return store.acquire_sweep(grid.name, owner, supervisor.LEASE_S, is_alive=process.is_alive)
    record()
    return fence


def _prepare(cells: Sequence[Cell], runs: Path) -> None:
    """Writes the corpora's shards and checks them against what the cells ask, before any process starts."""
    for data in {cell.config.data for cell in cells}:
        corpora.prepare(data, runs / "corpora")
    for cell in {(c.config.data, c.config.train.seq_len, c.config.eval.validation_tokens): c for c in cells}.values():
        train = cell.config.train
        corpus = corpora.open_corpus(runs / "corpora", cell.config.data.fingerprint or "")
        Batches(corpus.train, train.seq_len, train.batch_tokens // train.seq_len, 0, cell.config.data.shuffle)
        need = cell.config.eval.validation_tokens // train.seq_len * train.seq_len + 1
        if len(corpus.validation) < need or need == 1:
            raise CorpusError(
                f"the validation split of corpus {cell.config.data.corpus!r} has {len(corpus.validation)} tokens; "
                f"eval.validation_tokens asks for {max(need, train.seq_len + 1)}"
            )


def _gpus(tasks: Sequence[planner.Task], locks: machine.GpuLocks) -> list[str]:
    if not any(task.cell.config.resources.gpus for task in tasks):
        return []
    return [gpu.device for gpu in locks.take(machine.gpus())]


def _executor(name: str, gpus: list[str]) -> Executor:
    if name == "local":
        return LocalExecutor(gpus)
    from .scheduler import RayExecutor

    return RayExecutor(gpus)


def _git_state() -> tuple[str | None, bool | None]:
    from .provenance import git_state

    return git_state()
