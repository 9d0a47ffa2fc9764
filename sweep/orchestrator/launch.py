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
from ..executors.registry import DEFAULT_EXECUTOR, EXECUTORS, open_executor
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..host import processes
from ..planning import admission, cost_estimate, ordering, planner, replicates
from ..planning.initial_weights import WeightsFinder, copy_initial_weights
from ..planning.studies import StudyProgress, TrialSpace, progress_of
from ..probes import requested
from . import notify, supervisor
from .supervisor import Listener, Supervisor, TaskSource
from .trials import TrialSource

if TYPE_CHECKING:
    from .seeds import Seeds

CODE_EVENT = "code"
"""Kind of the event whose message is the fingerprint of the code that a sweep was launched with."""
CLAIM_RETRY_S = 2.0
"""Seconds between two attempts to claim a sweep whose old lease has not ended."""


Commit = tuple[str | None, bool | None]
"""Git commit of the code, and whether tracked files differed from it; None where unknown."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Everything that one launch was asked to do."""

    grid: Grid
    cells: Sequence[Cell]
    """All cells of the grid; for a study those of its trials so far, which `process` and `plan` look up."""
    space: TrialSpace | None = None
    """For a study: the search space that its cells come from; None for a factorial."""
    runs: Path
    """Runs folder."""
    executor: str = DEFAULT_EXECUTOR
    """Registry name of the executor, as `resolve_executor_name` returns it."""
    address: str | None = None
    """HOST:PORT of the cluster, for an executor that needs one."""
    only: Sequence[str] = ()
    """Selections of cells to carry out now, in the syntax of `--only`; empty for all cells."""
    retrain: bool = False
    """True to train cells again that diverged or whose weights are gone."""
    code: str = "new"
    """"new" to run the current code; "kept" to run the code that the sweep was launched with last."""
    commit: Commit | None = None
    """Commit to record; None for that of this checkout."""
    is_restart: bool = False
    """True if the same launch goes on after its process died."""
    notify: str | None = None
    """Web address that receives a summary at the end; see notify.py."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON options to record with the revision."""
    budget: float | None = None
    """GPU-hours (core-hours without GPUs) that the grid's cells may have cost in total after this launch; None for no
    limit."""

    @property
    def representative_cells(self) -> Sequence[Cell]:
        """Cells that represent all cells to come: the grid's own, or those at the ends of a study's ranges."""
        return self.cells if self.space is None else self.space.corner_cells

    @property
    def max_cells(self) -> int:
        """Number of cells that there will be, or of trials for a study; seeds added by a `stop` rule do not count."""
        return len(self.cells) if self.space is None else self.space.search.trials

    @property
    def selected_cells(self) -> list[Cell]:
        """Cells to carry out now. Raises GridError if `only` selects none."""
        return planner.select(self.grid, self.cells, self.only) if self.only else list(self.cells)


@dataclass(frozen=True)
class LaunchOutcome:
    """State of the launched cells after a launch."""

    standings: Counter[str]
    """Number of cells by standing, or of trials by state for a study."""
    finished: bool
    """True if every cell of this launch is done or has diverged, except those that a budget left out."""
    over_budget: Sequence[str] = ()
    """Lines that describe the cells left out by the budget."""
    stop_messages: Sequence[str] = ()
    """Sentences that say why no more seeds were added."""
    study: StudyProgress | None = None
    """Progress of the study whose trials `standings` counts; None for a factorial."""


def plan(request: LaunchRequest, store: Store | None) -> planner.Plan:
    """Return the plan of a launch now: tasks in their order, standings, budget and disk usage. Writes nothing.

    Tasks cover the cells that `only` selects; with a budget, those that it covers (the others are in
    `budget.deferred`). Kept weights that are missing, or differ from their recorded hash, count as gone in the plan
    only. The database keeps them, since another machine that shares it may still have the files.

    For a study, the tasks are the unfinished work of trials begun so far, and `only` and the budget are not applied.

    Args:
        request: Launch to plan.
        store: Database, or None if there is none yet; every cell is then new.

    Raises:
        GridError: `only` selects no cell.
        StorageAddressError: A checkpoint.path cannot be parsed.
        StorageError: The storage of weights cannot be reached.
    """
    if request.space is not None:
        return _plan_study(request, request.space, store)
    selected, runs = request.selected_cells, request.runs
    states, damaged = _usable_states(request, selected, store)
    launch_plan = planner.plan(
        selected, states, retrain=request.retrain, num_filtered_out=len(request.cells) - len(selected)
    )
    finished = {cell for cell, cell_standing in launch_plan.standings.items() if cell_standing == "done"}
    tasks = ordering.ordered(
        launch_plan.tasks, selected, list(request.grid.axes), states, finished, request.grid.contrasts
    )
    launch_plan = replace(launch_plan, tasks=tasks, damaged=damaged)
    if request.budget is not None:
        prices = cost_estimate.machine_prices(request.cells, runs, store)
        hours_used = cost_estimate.hours_spent(store, request.cells)
        fitting, budget = cost_estimate.select_within(
            launch_plan, request.budget, hours_used, prices, request.grid.contrasts, finished
        )
        launch_plan = replace(launch_plan, tasks=fitting, budget=budget)
    return replace(launch_plan, disk=admission.disk_needed([task.cell for task in launch_plan.training], runs))


def with_stop_seeds(request: LaunchRequest, store: Store | None) -> LaunchRequest:
    """Return the request with the cells at further seeds that the grid's `stop` rule has requested so far.

    Before the first interim look, these are the seeds that the rule starts with. A grid without a rule leaves the cells
    as they are. Only the contrast's cells get further seeds.

    Raises:
        GridError: The rule does not fit the grid.
    """
    return replace(request, cells=replicates.with_further_seeds(request.grid, request.cells, store))


def _plan_study(request: LaunchRequest, space: TrialSpace, store: Store | None) -> planner.Plan:
    """Return the plan of a study: unfinished work of the trials begun so far, and the study's progress.

    Trials without weights and without all objectives are trained again. Trials still to be proposed have no tasks yet;
    the disk usage includes them.

    Args:
        request: Launch of the study.
        space: Its search space.
        store: Database; None if there is none yet.
    """
    study = progress_of(space, store, retrain=request.retrain)
    cells = list(study.cells.values())
    # retrain=True: a trial without weights and without all objectives is useless until it is trained again
    states, damaged = _usable_states(request, cells, store)
    study_plan = planner.plan(cells, states, retrain=True)
    tasks = [task for task in study_plan.tasks if task.cell.id in study.open_cells]
    study_plan = replace(study_plan, damaged=damaged, tasks=tasks, study=study)
    training = study_plan.with_proposals().training
    return replace(study_plan, disk=admission.disk_needed([task.cell for task in training], request.runs))


def _usable_states(
    request: LaunchRequest, cells: Sequence[Cell], store: Store | None
) -> tuple[dict[str, CellState], tuple[str, ...]]:
    """Return the cells' states by id, without weights that are missing or damaged, and a line for each damaged file.

    Cells without an attempt are absent. Only cells that still need an evaluation have their weights checked. A damaged
    remote file is fetched for the check only with `request.retrain`. Both results are empty without a database.

    Returns:
        States by cell id, with `weights` None where the file cannot be used; and "SLUG: problem" for each file that
        exists but is damaged. Missing files give no line.
    """
    if store is None:
        return {}, ()
    states = store.states({cell.id for cell in cells})
    with_weights = [
        state
        for cell in cells
        if (state := states.get(cell.id))
        and state.weights
        and standing(state, requested(cell.config.eval)) == "needs-eval"
    ]
    origins = store.provenances(
        [state.trained_attempt_id for state in with_weights if state.trained_attempt_id is not None]
    )
    damaged = []
    for state in with_weights:
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
    """Check that the prepared text satisfies the selected cells, or those at the corners of a study's search space.

    Args:
        request: Launch whose cells are checked.
        dry: True to skip text that is not prepared yet, and to read no tokens, only sizes.

    Raises:
        GridError: `only` selects no cell.
        CorpusError: Text is too short.
        ShardError: A file of the text is damaged.
    """
    admission.check_corpora(
        request.selected_cells if request.space is None else request.representative_cells,
        request.runs / "corpora",
        dry=dry,
    )


def run(
    request: LaunchRequest, store: Store, listener: Listener, *,
    on_plan: Callable[[planner.Plan], None] = lambda plan: None, tell: Tell = lambda line: None,
) -> LaunchOutcome:  # fmt: skip
    """Launch a grid and block until its cells are finished. Attempts run a snapshot of this package.

    In this order: checks the text, copies plugins into the runs folder, takes the snapshot, opens an executor that
    needs an address, claims the sweep and records its revision, reaps dead attempts, plans, copies initial weights into
    the runs folder, calls `on_plan`, and runs the tasks. Executors of this machine are opened only if there are tasks.

    Whatever the outcome, the executor is closed, a notification is sent to `request.notify`, and the sweep is released.
    A launch that could not claim the sweep sends none.

    Args:
        request: Launch to carry out. Seeds of a `stop` rule and trials of a study are looked up here.
        store: Open, writable database; it stays open.
        listener: Receiver of progress events.
        on_plan: Called once with the plan, before the first attempt starts; also for a plan without tasks.
        tell: Prints one line of information.

    Returns:
        The number of cells by standing, and if all are done or diverged; also when some of them failed.

    Raises:
        SweepBusy: Another supervisor runs the sweep.
        LeaseLost: Another supervisor took the sweep over during the launch.
        SweepError: `code` is "kept" and that snapshot is gone, or a snapshot was changed.
        GridError: `only` selects no cell, or the `stop` rule does not fit the grid.
        MachineError: A GPU is missing or locked, the cluster cannot be reached, or no machine is large enough for a
            cell.
        CorpusError: The text is unusable.
        ShardError: The text is damaged.
        StorageAddressError: A checkpoint.path cannot be parsed.
        StorageError: A checkpoint.path cannot be used.
        SweepBroken: Several cells failed with the same error.
        Interrupted: After a clean stop.
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
    context = ExecutorContext(store, runs, tell, request.address)
    previous_source = last_snapshot(store, sweep)
    source = _choose_snapshot(previous_source, sweep, runs, request.code, tell)
    folder = source_snapshot.find_snapshot(runs, source)
    with ExitStack() as resources:
        executor: Executor | None = None
        if EXECUTORS[request.executor].needs_address:
            # opened before the sweep is claimed, so that an unreachable cluster changes nothing
            executor = resources.enter_context(closing(open_executor(request.executor, context)))
        fence = claim_sweep(request, store, processes.this_process("launch"))
        resources.callback(store.release_sweep, sweep, fence)
        seeds = seeds_source(request, store, fence, tell)
        notifier = resources.enter_context(
            notify.EndNotifier(
                request.notify, sweep, tell=tell,
                count=lambda: _remaining_work(_with_current_cells(request, seeds, store), store)[0],
                states=lambda: list(
                    store.states(
                        {cell.id for cell in _with_current_cells(request, seeds, store).selected_cells}
                    ).values()
                ),
            )
        )  # fmt: skip
        if source != previous_source:
            store.add_event(CODE_EVENT, source, sweep=sweep)
        supervisor.reap(store, request.selected_cells, runs, executor)
        launch_plan = plan(request, store)
        _check_storage(request, launch_plan)
        task_source, likely = _task_source(request, launch_plan, seeds, store, fence)
        if isinstance(request.grid.initial, WeightsFinder):
            training = [task.cell for task in launch_plan.tasks if task.kind == "train"]
            url = store.url.render_as_string(hide_password=False)
            copy_initial_weights([*training, *likely], replace(request.grid.initial, db=url, runs=runs))
        on_plan(launch_plan)
        tasks = launch_plan.tasks or (seeds.next_tasks(lambda resources: True) if seeds is not None else [])
        if tasks or (launch_plan.study is not None and launch_plan.study.num_remaining):
            # closed before the sweep is released, so that no attempt outlives the claim
            executor = resources.enter_context(closing(executor or open_executor(request.executor, context)))
            run_tasks(
                store, [(sweep, fence, tasks)], listener, executor, runs=runs, commit=request.commit, source=folder,
                task_sources={sweep: task_source} if task_source is not None else {}, future_cells=likely,
            )  # fmt: skip
        outcome = _outcome(_with_current_cells(request, seeds, store), store, launch_plan, seeds)
        notifier.finished, notifier.counts = outcome.finished, outcome.standings
        return outcome


def seeds_source(request: LaunchRequest, store: Store, fence: int, tell: Tell) -> Seeds | None:
    """Return the source of further seeds for the grid's `stop` rule.

    None without a rule, and with `--only`, after a line of output. The tasks that it adds are planned without the
    request's budget, which the source applies to each wave of seeds instead.

    Args:
        request: Launch with all its cells.
        store: Database.
        fence: Fencing token under which the caller holds the sweep.
        tell: Prints one line.
    """
    if request.grid.stop is None:
        return None
    # imported here since it imports SciPy, which takes long
    from .seeds import Seeds

    if request.only:
        tell("stop: a launch with --only adds no seeds")
        return None

    return Seeds(
        request.grid, request.cells, store, fence, budget_hours=request.budget, tell=tell,
        plan=lambda cells: plan(replace(request, cells=cells, budget=None), store).tasks,
        prices=lambda cells: cost_estimate.machine_prices(cells, request.runs, store),
    )  # fmt: skip


def _check_storage(request: LaunchRequest, launch_plan: planner.Plan) -> None:
    """Raise StorageAddressError or StorageError if a checkpoint.path of the cells to train cannot be used.

    Each distinct address is tried once. Cells without an address (the runs folder) are not checked. A study is checked
    at the corners of its search space.
    """
    cells = (
        request.representative_cells
        if launch_plan.study is not None
        else [task.cell for task in launch_plan.tasks if task.kind == "train"]
    )
    for address in {cell.config.checkpoint.path for cell in cells}:
        if address is not None:
            storage.open_storage(address).check()


def _task_source(
    request: LaunchRequest, launch_plan: planner.Plan, seeds: Seeds | None, store: Store, fence: int
) -> tuple[TaskSource | None, Sequence[Cell]]:
    """Return (source of further tasks, cells with the resources of those tasks).

    A study yields a `TrialSource` and the corners of its search space; creating it writes to the database. A `stop`
    rule yields `seeds` and the cells of its contrast. Otherwise the result is (None, empty).

    Args:
        request: Launch to carry out.
        launch_plan: Its plan, with the study's progress.
        seeds: Source of further seeds; None without one.
        store: Database.
        fence: Fencing token under which the caller holds the sweep.
    """
    if launch_plan.study is not None:
        prices = cost_estimate.machine_prices(request.representative_cells, request.runs, store)
        return TrialSource(launch_plan.study, store, fence, prices), request.representative_cells
    return seeds, seeds.future_cells if seeds is not None else ()


def _with_current_cells(request: LaunchRequest, seeds: Seeds | None, store: Store) -> LaunchRequest:
    """Return the request with the cells of all seeds or trials that were added so far."""
    return _with_trials(request, store) if seeds is None else replace(request, cells=seeds.cells)


def _with_trials(request: LaunchRequest, store: Store) -> LaunchRequest:
    """Return a study's request with the cells of its trials so far and with frozen copies of its plugins.

    Trials are read from the database; the copies are written to the runs folder. A request without a search space is
    returned unchanged.
    """
    space = request.space
    if space is None:
        return request
    ends = supervisor.freeze_plugins(space.corner_cells, request.runs)
    space = TrialSpace(replace(space.grid, plugins=ends[0].config.plugins), ends, space.prepared_corpus)
    return replace(request, space=space, cells=list(progress_of(space, store).cells.values()))


def _outcome(request: LaunchRequest, store: Store, before: planner.Plan, seeds: Seeds | None) -> LaunchOutcome:
    """Return the outcome from the current states.

    Finished means that every selected cell is done or has diverged, except those that `before` left out for the budget.
    A study is finished when all its trials are. `over_budget` describes the budget as it is now, and is empty if
    `before` left no cell out.

    Args:
        request: Launch with its current cells.
        store: Database with their states.
        before: Plan that the launch carried out.
        seeds: Source of further seeds; None without a `stop` rule.
    """
    counts, after = _remaining_work(request, store)
    if after.study is not None:
        return LaunchOutcome(counts, after.study.finished, study=after.study)
    over_budget_ids = {task.cell.id for task in before.budget.deferred} if before.budget is not None else set[str]()
    unfinished = {cell_standing for cell, cell_standing in after.standings.items() if cell not in over_budget_ids} - {
        "done",
        "diverged",
    }
    over_budget = after.budget.describe() if after.budget is not None and over_budget_ids else ()
    return LaunchOutcome(counts, not unfinished, over_budget, tuple(seeds.end_messages) if seeds is not None else ())


def _remaining_work(request: LaunchRequest, store: Store) -> tuple[Counter[str], planner.Plan]:
    """Return the number of selected cells by standing (of trials by state), and the plan of another launch.

    For a study the plan has the current standings but no tasks. Writes nothing.
    """
    if request.space is not None:
        study = progress_of(request.space, store, retry_failed=False)
        return study.counts, planner.Plan([], dict(study.standings), list(study.cells.values()), study=study)
    after = plan(replace(request, cells=request.selected_cells, only=()), store)
    return after.counts, after


def run_tasks(
    store: Store, tasks_by_sweep: Sequence[tuple[str, int, Sequence[planner.Task]]], listener: Listener,
    executor: Executor, *, runs: Path, commit: Commit | None, source: Path | None = None,
    task_sources: Mapping[str, TaskSource] | None = None,
    future_cells: Sequence[Cell] = (),
) -> None:  # fmt: skip
    """Run tasks of claimed sweeps, one sweep after the other, on one executor; block until all have ended.

    The executor locks the GPUs that all tasks need until the caller closes it. The leases of all sweeps are renewed
    throughout. An exception ends the run; later sweeps are then not started.

    Args:
        store: Database with the sweeps.
        tasks_by_sweep: (sweep, fence, tasks) of each sweep; the caller holds the sweep under that fence.
        listener: Receiver of progress events.
        executor: Open executor. Wrapped to use journals if `source` has another database schema.
        runs: Runs folder.
        commit: Commit to record with attempts; None for unknown.
        source: Folder of the code snapshot that attempts run; None for the installed package.
        task_sources: Sources of further tasks while a sweep runs, by the sweep's name.
        future_cells: Cells with the resources of those that `task_sources` may add, for the reservation of GPUs.

    Raises:
        MachineError: The executor failed, or no machine is large enough for a cell.
        Interrupted: After a clean stop.
        LeaseLost: Another supervisor took a sweep over.
        SweepBroken: Several cells failed with the same error.
    """
    executor = journaling.with_journal_if_needed(executor, store, source)
    executor.admit([*(task.cell for _, _, share in tasks_by_sweep for task in share), *future_cells])
    leases = [(sweep, fence) for sweep, fence, _ in tasks_by_sweep]
    for sweep, fence, tasks in tasks_by_sweep:
        supervisor_ = Supervisor(
            store, sweep, fence, executor, listener,
            runs=runs, commit=commit or (None, None), source=source, additional_leases=leases,
        )  # fmt: skip
        supervisor_.run(tasks, (task_sources or {}).get(sweep))


def claim_sweep(request: LaunchRequest, store: Store, owner: processes.Owner) -> int:
    """Claim the sweep and record the revision in one transaction; return the fencing token.

    A refused launch changes nothing. The revision holds the grid's text, the commit, all cells of the request (not only
    the selected ones) and its options. Their keys are requested ([probe, length] pairs), set (values of `--set` by
    path), contrasts, design, stop, search, price (cost forecast) and those of `request.options`. Contrasts, design,
    stop and search are absent if the grid lacks them. Pending control commands are cleared, except at a restart.

    With `request.is_restart`, a busy sweep is tried again every 2 s (CLAIM_RETRY_S) for up to two lease durations,
    since the launch's own old lease may still last.

    Args:
        request: Launch to record.
        store: Database.
        owner: Process that will hold the sweep.

    Raises:
        SweepBusy: Another supervisor runs the sweep.
    """
    grid, is_restart = request.grid, request.is_restart
    commit, dirty = request.commit or (None, None)
    requested_pairs = sorted({pair for cell in request.representative_cells for pair in requested(cell.config.eval)})
    revision = NewRevision(
        grid_text=grid.document.text,
        grid_file=str(grid.document.path),
        options={
            "requested": [list(pair) for pair in requested_pairs],
            "set": {path: setting.value for path, setting in grid.command_line.items()},
            # absent without contrasts, so that relaunching an older sweep gives the same revision
            **({contrasts.OPTION_KEY: contrasts.contrasts_as_json(grid.contrasts)} if grid.contrasts else {}),
            **(
                {design_option.OPTION_KEY: design_option.design_as_json(grid.chosen.design)}
                if grid.chosen is not None
                else {}
            ),
            **({stopping_rule.OPTION_KEY: stopping_rule.rule_as_json(grid.stop)} if grid.stop is not None else {}),
            **request.options,
            **({search.OPTION_KEY: search.search_as_json(grid.search)} if grid.search is not None else {}),
            # for `report --table budget`; a changed forecast alone makes no new revision
            forecast.OPTION_KEY: forecast.forecast_as_json(
                cost_estimate.forecast(
                    request.cells, cost_estimate.machine_prices(request.representative_cells, request.runs, store)
                )
            ),
        },
        commit=commit,
        dirty=dirty,
        cells=[planner.to_record(cell) for cell in request.cells],
    )
    deadline = time.monotonic() + (2 * supervisor.LEASE_S if is_restart else 0.0)
    while True:
        try:
            return store.acquire_sweep(
                grid.name,
                owner,
                supervisor.LEASE_S,
                is_alive=processes.is_alive,
                revision=revision,
                clear_requests=not is_restart,
            )
        except SweepBusy:
            if time.monotonic() >= deadline:
                raise
        time.sleep(CLAIM_RETRY_S)


def _choose_snapshot(previous: str | None, sweep: str, runs: Path, code: str, tell: Tell) -> str:
    """Return the fingerprint of the code snapshot to run.

    A snapshot of the current code is made in any case, unless it exists. One line is printed if the code changed since
    `previous`.

    Args:
        previous: Fingerprint of the last launch; None for a new sweep, which runs the current code.
        sweep: Name of the sweep, for messages.
        runs: Runs folder with the snapshots.
        code: "kept" to return `previous`, else the current code.
        tell: Prints one line.

    Raises:
        SweepError: The kept snapshot is gone, or a snapshot was changed.
    """
    current = source_snapshot.take_snapshot(runs)
    if previous is None or previous == current:
        return current
    if code == "kept":
        if source_snapshot.find_snapshot(runs, previous) is None:
            raise SweepError(
                f"the code that sweep {sweep} was launched with ({previous}) is gone; launch without --code"
            )
        tell(f"code: that of the last launch ({previous}), not the current code ({current})")
        return previous
    tell(
        f"code: changed since the last launch ({previous} to {current}); finished cells stay, the others continue with the new code; "
        "--code kept continues with the old"
    )
    return current


def last_snapshot(store: Store, sweep: str) -> str | None:
    """Return the fingerprint of the code that the sweep was launched with last, from its newest valid "code" event.

    None for an unknown or never launched sweep. That the snapshot still exists is not checked.
    """
    try:
        messages = (event.message for event in reversed(store.events(sweep=sweep)) if event.kind == CODE_EVENT)
        return next((message for message in messages if source_snapshot.is_fingerprint(message)), None)
    except SweepUnknown:
        return None
