"""`atma-sweep launch`: from a grid to finished cells, in one call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results import contrasts, forecast
from ...results.designs import design_option
from ...results.errors import SweepBusy, SweepUnknown
from ...results.stopping import stopping_rule
from ...results.store.records import CellState, NewRevision, standing
from ...results.store.store import Store
from ...results.studies import search
from ..checkpoints import storage
from ..checkpoints.weights import damage
from ..errors import SweepError
from ..executors import journaling, source_snapshot
from ..executors.executor import Executor, ExecutorContext, Tell
from ..executors.registry import DEFAULT, EXECUTORS, open_executor
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..host import processes
from ..planning import admission, cost_estimate, ordering, planner, replicates
from ..planning.studies import StudyProgress, TrialSpace, progress_of
from ..probes import requested
from . import notify, supervisor
from .supervisor import Listener, Supervisor, TaskSource
from .trials import TrialSource

if TYPE_CHECKING:
    from .seeds import Seeds

CODE = "code"
"""Kind of the event that names the code a sweep was launched with."""
CLAIM_AGAIN_S = 2.0


Commit = tuple[str | None, bool | None]
"""Where code comes from: a commit, and whether files differed from it; None where nobody can say."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One launch, as it was asked for."""

    grid: Grid
    cells: Sequence[Cell]
    """All of the grid's; of a study those of its trials so far, which `run` and `plan` look up."""
    space: TrialSpace | None = None
    """Of a study: where its cells come from."""
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
    notify: str | None = None
    """Web address that is told of the end; see notify.py."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What its revision keeps besides, as JSON."""
    budget: float | None = None
    """GPU-hours, or core-hours without GPUs, that the grid's cells may have cost after it; None for no limit."""

    @property
    def like(self) -> Sequence[Cell]:
        """Cells that stand for all that are to come: the grid's, or those at the ends of a study's ranges."""
        return self.cells if self.space is None else self.space.ends

    @property
    def most(self) -> int:
        """Cells, or trials, that there will be."""
        return len(self.cells) if self.space is None else self.space.search.trials

    @property
    def chosen(self) -> list[Cell]:
        """The cells to carry out now. Raises GridError for an `only` that means none."""
        return planner.select(self.grid, self.cells, self.only) if self.only else list(self.cells)


@dataclass(frozen=True)
class LaunchOutcome:
    """Where the launched cells stand after a launch."""

    standings: Counter[str]
    finished: bool
    """Every cell of this launch is done or has diverged, but for those that a budget left."""
    left: Sequence[str] = ()
    """What a budget left, in words."""
    stop: Sequence[str] = ()
    """Why no more seeds were added, in words."""
    study: StudyProgress | None = None
    """Of a study: its trials, which `standings` counts."""


def plan(request: LaunchRequest, store: Store | None) -> planner.Plan:
    """What a launch would do now, in the order it would, and the disk it needs; without a database `store` is None.

    Kept weights that are wanted and not found under `runs`, or where else the database says, or that differ from their
    recorded hash, count as gone. The database is not told: another machine that shares it may have them. Raises AddressError for a checkpoint.path that
    cannot be understood, StorageError when the place of weights cannot be reached.
    """
    if request.space is not None:
        return _of_study(request, request.space, store)
    chosen, runs = request.chosen, request.runs
    states, damaged = _states(request, chosen, store)
    made = planner.plan(chosen, states, retrain=request.retrain, left_out=len(request.cells) - len(chosen))
    finished = {cell for cell, word in made.standings.items() if word == "done"}
    tasks = ordering.ordered(made.tasks, chosen, list(request.grid.axes), states, finished, request.grid.contrasts)
    made = replace(made, tasks=tasks, damaged=damaged)
    if request.budget is not None:
        known = cost_estimate.machine_prices(request.cells, runs, store)
        used = cost_estimate.hours_spent(store, request.cells)
        fitting, told = cost_estimate.within_budget(made, request.budget, used, known, request.grid.contrasts, finished)
        made = replace(made, tasks=fitting, budget=told)
    return replace(made, disk=admission.disk_needed([task.cell for task in made.training], runs))


def with_stop_seeds(request: LaunchRequest, store: Store | None) -> LaunchRequest:
    """The request with the cells at further seeds that its grid's `stop` begins with, or has asked for so far. Raises GridError."""
    return replace(request, cells=replicates.with_further_seeds(request.grid, request.cells, store))


def _of_study(request: LaunchRequest, space: TrialSpace, store: Store | None) -> planner.Plan:
    """The trials that were begun; how many are to come follows from where the study stands."""
    study = progress_of(space, store, retrain=request.retrain)
    cells = list(study.cells.values())
    # a trial whose weights are gone before all objectives were measured is trained again: without them it tells nothing
    states, damaged = _states(request, cells, store)
    made = planner.plan(cells, states, retrain=True)
    tasks = [task for task in made.tasks if task.cell.id in study.open]
    made = replace(made, damaged=damaged, tasks=tasks, study=study)
    training = made.with_proposals().training
    return replace(made, disk=admission.disk_needed([task.cell for task in training], request.runs))


def _states(
    request: LaunchRequest, cells: Sequence[Cell], store: Store | None
) -> tuple[dict[str, CellState], tuple[str, ...]]:
    """Return the cells' states, without weights that are missing or damaged, and a line for each damaged file."""
    if store is None:
        return {}, ()
    states = store.states({cell.id for cell in cells})
    wanted = [
        state
        for cell in cells
        if (state := states.get(cell.id))
        and state.weights
        and standing(state, requested(cell.config.eval)) == "needs-eval"
    ]
    origins = store.provenances([state.trained_attempt_id for state in wanted if state.trained_attempt_id is not None])
    damaged = []
    for state in wanted:
        address = storage.resolve(request.runs, state.weights or "")
        origin = origins.get(state.trained_attempt_id or 0)
        line = None
        if storage.exists(address):
            line = damage(address, origin.weights_sha256 if origin is not None else None, fetch=request.retrain)
            if line is None:
                continue
        states[state.cell_id] = replace(state, weights=None)
        damaged += [f"{state.slug}: {line}"] if line is not None else []
    return states, tuple(damaged)


def check_launch_corpora(request: LaunchRequest, *, dry: bool = False) -> None:
    """Compares the text with what the cells to carry out ask, or with what a study may ask; a dry run only what is prepared.

    Raises GridError for an `only` that means none, CorpusError and ShardError for text that is too short or damaged.
    """
    admission.check_corpora(
        request.chosen if request.space is None else request.like, request.runs / "corpora", dry=dry
    )


def run(
    request: LaunchRequest, store: Store, listener: Listener, *,
    planned: Callable[[planner.Plan], None] = lambda plan: None, tell: Tell = lambda line: None,
) -> LaunchOutcome:  # fmt: skip
    """Launches a grid and stays until its cells are finished. Attempts run a frozen copy of this package.

    Raises SweepBusy when somebody else runs the sweep, MachineError when a GPU is missing or held, CorpusError and
    DataError for unusable text, AddressError and StorageError for a checkpoint.path that cannot be used, Interrupted
    after a clean stop.
    """
    runs, sweep = request.runs, request.grid.name
    request = with_stop_seeds(request, store)
    check_launch_corpora(request)
    request = _with_trials(request, store)
    request = replace(
        request,
        cells=supervisor.freeze_plugins(request.cells, runs),
        commit=request.commit or source_snapshot.git_state(),
    )
    opening = ExecutorContext(store, runs, tell, request.address)
    before = last_source(store, sweep)
    source = _source(before, sweep, runs, request.code, tell)
    folder = source_snapshot.folder(runs, source)
    with ExitStack() as held:
        executor: Executor | None = None
        if EXECUTORS[request.executor].needs_address:
            # before the sweep is claimed, so that a cluster that cannot be reached changes nothing
            executor = held.enter_context(closing(open_executor(request.executor, opening)))
        fence = claim(request, store, processes.this_process("launch"))
        held.callback(store.release_sweep, sweep, fence)
        seeds = seeds_source(request, store, fence, tell)
        ending = held.enter_context(
            notify.EndNotifier(
                request.notify, sweep, tell=tell,
                count=lambda: _left(_now(request, seeds, store), store)[0],
                states=lambda: list(store.states({cell.id for cell in _now(request, seeds, store).chosen}).values()),
            )
        )  # fmt: skip
        if source != before:
            store.add_event(CODE, source, sweep=sweep)
        supervisor.reap(store, request.chosen, runs, executor)
        plan_ = plan(request, store)
        planned(plan_)
        _check_storage(request, plan_)
        more, likely = _further(request, plan_, seeds, store, fence)
        tasks = plan_.tasks or (seeds.further(lambda resources: True) if seeds is not None else [])
        if tasks or (plan_.study is not None and plan_.study.left):
            # attempts end before the sweep is released
            executor = held.enter_context(closing(executor or open_executor(request.executor, opening)))
            run_tasks(
                store, [(sweep, fence, tasks)], listener, executor, runs=runs, commit=request.commit, source=folder,
                further={sweep: more} if more is not None else {}, likely=likely,
            )  # fmt: skip
        outcome = _outcome(_now(request, seeds, store), store, plan_, seeds)
        ending.finished, ending.counts = outcome.finished, outcome.standings
        return outcome


def seeds_source(request: LaunchRequest, store: Store, fence: int, tell: Tell) -> Seeds | None:
    """Who adds seeds to the sweep while it runs; None without a rule, and for a launch of a part of the cells."""
    if request.grid.stop is None:
        return None
    # SciPy, which other grids need not wait for
    from .seeds import Seeds

    if request.only:
        tell("stop: no seeds are added by a launch with --only")
        return None

    return Seeds(
        request.grid, request.cells, store, fence, allowed=request.budget, tell=tell,
        plan=lambda cells: plan(replace(request, cells=cells, budget=None), store).tasks,
        prices=lambda cells: cost_estimate.machine_prices(cells, request.runs, store),
    )  # fmt: skip


def _check_storage(request: LaunchRequest, made: planner.Plan) -> None:
    """Raise AddressError or StorageError for a checkpoint.path of what is to be trained that cannot be used."""
    cells = request.like if made.study is not None else [task.cell for task in made.tasks if task.kind == "train"]
    for address in {cell.config.checkpoint.path for cell in cells}:
        if address is not None:
            storage.place(address).check()


def _further(
    request: LaunchRequest, made: planner.Plan, seeds: Seeds | None, store: Store, fence: int
) -> tuple[TaskSource | None, Sequence[Cell]]:
    """Return the source of further tasks while the sweep runs, and cells with the resources of those; None without one."""
    if made.study is not None:
        prices = cost_estimate.machine_prices(request.like, request.runs, store)
        return TrialSource(made.study, store, fence, prices), request.like
    return seeds, seeds.likely if seeds is not None else ()


def _now(request: LaunchRequest, seeds: Seeds | None, store: Store) -> LaunchRequest:
    """The request with the seeds, or the trials, that were added meanwhile."""
    return _with_trials(request, store) if seeds is None else replace(request, cells=seeds.cells)


def _with_trials(request: LaunchRequest, store: Store) -> LaunchRequest:
    """Of a study: with the cells of its trials so far, and with plugins that nobody edits."""
    space = request.space
    if space is None:
        return request
    ends = supervisor.freeze_plugins(space.ends, request.runs)
    space = TrialSpace(replace(space.grid, plugins=ends[0].config.plugins), ends, space.known)
    return replace(request, space=space, cells=list(progress_of(space, store).cells.values()))


def _outcome(request: LaunchRequest, store: Store, before: planner.Plan, seeds: Seeds | None) -> LaunchOutcome:
    counts, after = _left(request, store)
    if after.study is not None:
        return LaunchOutcome(counts, after.study.finished, study=after.study)
    late = {task.cell.id for task in before.budget.left} if before.budget is not None else set[str]()
    rest = {word for cell, word in after.standings.items() if cell not in late} - {"done", "diverged"}
    left = after.budget.describe() if after.budget is not None and late else ()
    return LaunchOutcome(counts, not rest, left, tuple(seeds.told) if seeds is not None else ())


def _left(request: LaunchRequest, store: Store) -> tuple[Counter[str], planner.Plan]:
    """Where the cells, or the trials of a study, stand now, and what another launch would do."""
    if request.space is not None:
        study = progress_of(request.space, store, again=False)
        return study.counts, planner.Plan([], dict(study.standings), list(study.cells.values()), study=study)
    after = plan(replace(request, cells=request.chosen, only=()), store)
    return after.counts, after


def run_tasks(
    store: Store, shares: Sequence[tuple[str, int, Sequence[planner.Task]]], listener: Listener, executor: Executor,
    *, runs: Path, commit: Commit | None, source: Path | None = None, further: Mapping[str, TaskSource] | None = None,
    likely: Sequence[Cell] = (),
) -> None:  # fmt: skip
    """Runs the tasks of sweeps that the caller holds, (sweep, fence, tasks) each, one sweep after the other.

    `further` gives a sweep more tasks while it runs, for cells whose resources are those of `likely`.
    The executor holds the GPUs that they need until it is closed, so that attempts of these sweeps alone share them.
    Raises MachineError (also for a cell that no machine has room for), Interrupted, LostLease.
    """
    executor = journaling.with_journal_if_needed(executor, store, source)
    executor.admit([*(task.cell for _, _, share in shares for task in share), *likely])
    every = [(sweep, fence) for sweep, fence, _ in shares]
    for sweep, fence, share in shares:
        one = Supervisor(
            store, sweep, fence, executor, listener,
            runs=runs, commit=commit or (None, None), source=source, beside=every,
        )  # fmt: skip
        one.run(share, (further or {}).get(sweep))


def claim(request: LaunchRequest, store: Store, owner: processes.Owner) -> int:
    """Takes the sweep and records what is launched, in one: a refused launch changes nothing. Returns its fence.

    The same launch that goes on again waits for the lease that it had on another machine. Raises SweepBusy.
    """
    grid, again = request.grid, request.again
    commit, dirty = request.commit or (None, None)
    wanted = sorted({pair for cell in request.like for pair in requested(cell.config.eval)})
    revision = NewRevision(
        grid_text=grid.document.text,
        grid_file=str(grid.document.path),
        options={
            "requested": [list(pair) for pair in wanted],
            "set": {path: setting.value for path, setting in grid.command_line.items()},
            # absent where there is none, so that a sweep of before they existed is relaunched as the same revision
            **({contrasts.OPTION: contrasts.as_options(grid.contrasts)} if grid.contrasts else {}),
            **({design_option.OPTION: design_option.as_options(grid.chosen.design)} if grid.chosen is not None else {}),
            **({stopping_rule.OPTION: stopping_rule.as_option(grid.stop)} if grid.stop is not None else {}),
            **request.options,
            **({search.OPTION: search.as_options(grid.search)} if grid.search is not None else {}),
            # what it will be compared with by `report --table budget`; no part of what makes a revision another one
            forecast.OPTION: forecast.as_option(
                cost_estimate.forecast(request.cells, cost_estimate.machine_prices(request.like, request.runs, store))
            ),
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
    now = source_snapshot.take_snapshot(runs)
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


def last_source(store: Store, sweep: str) -> str | None:
    """Fingerprint of the code that the sweep was launched with last."""
    try:
        known = (event.message for event in reversed(store.events(sweep=sweep)) if event.kind == CODE)
        return next((message for message in known if source_snapshot.is_fingerprint(message)), None)
    except SweepUnknown:
        return None
