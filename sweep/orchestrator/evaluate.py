"""`atma-sweep evaluate`: probes on kept weights, repeated or at other lengths, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...results.console.text import counted
from ...results.metrics import SAMPLES, STDERR_SUFFIX
from ...results.store.records import MeasuredValue, NewRevision
from ...results.store.store import Store
from ..attempt import trained_cells
from ..checkpoints import storage
from ..checkpoints.weights import CheckpointError, damage
from ..config import Plugin
from ..data import corpora
from ..errors import GridError, SweepError
from ..executors.executor import ExecutorContext
from ..executors.registry import DEFAULT_EXECUTOR, open_executor
from ..executors.source_snapshot import git_state
from ..grid.cell import Cell
from ..grid.plugins import installed_plugins
from ..host import processes
from ..host.signals import Interrupted
from ..planning.planner import Task
from ..probes import PROBES, bound, requested, with_settings
from ..probes.downstream import load_harness
from . import supervisor
from .launch import run_tasks
from .supervisor import Listener

ProbeSettings = Mapping[str, Mapping[str, Any]]
"""Settings by name of the probe."""
NO_SETTINGS: ProbeSettings = {}


class CellNotListed(SweepError):
    """Error of a cell that no writable sweep lists."""


@dataclass(frozen=True)
class CellMeasurements:
    """New measurements of one cell; `values` is empty when its evaluation failed or measured nothing."""

    cell: Cell
    values: Sequence[MeasuredValue]
    folder: Path | None = None
    """Folder of the attempt with these values; None without values."""

    def _samples(self, value: MeasuredValue) -> Path | None:
        """Return the file with the questions and answers that a score was computed from; None if none was kept."""
        name = (value.description or {}).get(SAMPLES)
        return self.folder / name if self.folder is not None and name else None

    def as_json(self) -> list[dict[str, Any]]:
        """Return one dict per measurement, in the order of `values`.

        Keys: cell (id), slug, the database's columns probe, metric, length, value, unit, n, reason, and samples (the
        file of a task's questions). `value` is None where `reason` says why there is none.
        """
        names = ("probe", "metric", "length", "value", "unit", "n", "reason")
        cell_columns = {"cell": self.cell.id, "slug": self.cell.slug}
        return [
            {
                **cell_columns, **{name: getattr(value, name) for name in names},
                SAMPLES: str(file) if (file := self._samples(value)) else None,
            }
            for value in self.values
        ]  # fmt: skip

    def text(self) -> str:
        """Return one line, "SLUG: PROBE METRIC [LENGTH] VALUE, ...", with all measurements in order.

        Values have six significant digits. A missing value shows its reason code, the part of the reason before ":". A
        value with a standard error is followed by "± ERROR". A second line names the folder of kept samples.
        """
        files = {file for value in self.values if (file := self._samples(value))}
        sample_lines = [
            f"{self.cell.slug}: samples of {counted(len(files), 'task')} in {file.parent}" for file in files
        ][:1]
        errors = {value.metric: value.value for value in self.values if value.metric.endswith(STDERR_SUFFIX)}
        texts = [
            _format_value(value, errors.get(value.metric + STDERR_SUFFIX))
            for value in self.values
            if value.metric not in errors
        ]
        return "\n".join([f"{self.cell.slug}: {', '.join(texts)}", *sample_lines])


def _format_value(value: MeasuredValue, error: float | None) -> str:
    """Return a measurement as `CellMeasurements.text` shows it; `error` is its standard error, None for none."""
    labels = [value.probe, value.metric, *([str(value.length)] if value.length else [])]
    number = f"{value.value:.6g}" if value.value is not None else (value.reason or "").partition(":")[0]
    return " ".join([*labels, number, *([f"± {error:.2g}"] if error is not None else [])])


def plan(
    store: Store, cell_names: Sequence[str], *, runs: Path, probes: Sequence[str] = (), lengths: Sequence[int] = (),
    sweep: str | None = None, settings: ProbeSettings = NO_SETTINGS, plugins: Sequence[Plugin] = (),
) -> dict[str, list[Task]]:  # fmt: skip
    """Return the evaluation tasks by the name of the sweep that has to be claimed for them. Writes nothing.

    Each distinct cell gives one task, which measures all its probes again, also those with a number. Weights are read
    to compare them with their recorded hash.

    Args:
        store: Database with the cells.
        cell_names: Cells by slug or id, as `Store.find_cell` takes them.
        runs: Runs folder with weights and corpora.
        probes: Probes to run instead of those of the cells' configs; empty to keep these.
        lengths: Context lengths in tokens, 2 at least, instead of those of the configs; empty to keep these.
        sweep: Sweep to evaluate within; None for the writable one, launched last, that lists the cell.
        settings: Settings of probes that replace those of the configs, by name of the probe.
        plugins: Loaded plugins that `probes` need beside those of the cells; installed packages are found here.

    Raises:
        GridError: A probe is unknown, or a length cannot be measured.
        CellNotListed: No writable sweep lists a cell; not checked if `sweep` is given.
        CorpusError: A cell's text is missing or differs from its manifest.
        ShardError: A file of a cell's text is damaged.
        CheckpointError: A cell's kept weights are damaged.
        UserError: Any error of `trained_cells.find_trained_cell`, such as an unknown or untrained cell, or weights that
            are gone.
    """
    for length in lengths:
        if length < 2:
            raise GridError("--length", None, str(length), "must be at least 2 tokens")
    # cells first, since their plugins may register the probes
    trained = [trained_cells.find_trained_cell(store, name, runs, sweep) for name in cell_names]
    for trained_cell in trained:
        if (line := damage(storage.resolve(runs, trained_cell.weights), trained_cell.sha256)) is not None:
            raise CheckpointError(line)
    plugins = (*plugins, *installed_plugins(lambda: {name.partition(":")[0] for name in probes}))
    check_probes("--probe", probes)
    if lengths and probes and not any(PROBES.load(name).by_length for name in probes):
        raise GridError("--length", None, "", f"{', '.join(probes)} has no context length; leave --length out")
    cells_by_sweep = _cells_by_sweep(store) if sweep is None else {}
    tasks_by_sweep: dict[str, list[Task]] = {}
    for trained_cell in {trained_cell.cell.id: trained_cell for trained_cell in trained}.values():
        cell = with_plugins(with_requested_probes(trained_cell.cell, probes, lengths, settings), plugins)
        corpus = corpora.open_verified(runs / "corpora", cell.config.data.fingerprint or "")
        if lengths:
            check_lengths(cell, corpus)
        sweep_name = sweep or next((name for name, ids in cells_by_sweep.items() if cell.id in ids), None)
        if sweep_name is None:
            raise CellNotListed(f"no sweep lists cell {cell.id} ({cell.slug}) any more; launch a grid that has it")
        pairs = requested(cell.config.eval)
        task = Task(
            cell, "evaluate", pairs, "needs-eval", trained_cell.weights, trained_cell.attempt, should_remeasure=True
        )
        tasks_by_sweep.setdefault(sweep_name, []).append(task)
    return tasks_by_sweep


def with_plugins(cell: Cell, plugins: Sequence[Plugin]) -> Cell:
    """Return the cell with these plugins after its own; its id stays the same."""
    own = cell.config.plugins
    hashes = {plugin.sha256 for plugin in own}
    added = tuple(plugin for plugin in plugins if plugin.sha256 not in hashes)
    return replace(cell, config=cell.config.model_copy(update={"plugins": (*own, *added)})) if added else cell


def check_lengths(cell: Cell, corpus: corpora.Corpus) -> None:
    """Raise GridError for a length or probe of this cell that can never be measured.

    Such a request would leave a permanent gap in tables. Only probes that are measured at context lengths are checked:
    a length may exceed the limit of none of them, and none may be inapplicable to the cell.

    Args:
        cell: Cell with the probes and lengths to check in its config.
        corpus: Prepared text of the cell, which limits the lengths.
    """
    config = cell.config
    probes = [probe for probe in (bound(name, config) for name in config.eval.probes) if probe.by_length]
    limits = {probe.name: limit for probe in probes if (limit := probe.longest(corpus)) is not None}
    too_long = [length for length in config.eval.lengths if any(length > limit for limit in limits.values())]
    if too_long:
        limits_text = ", ".join(f"{name} {limit:,}" if limit > 1 else f"{name} none" for name, limit in limits.items())
        problem = (
            f"too long for the text of cell {cell.id} ({cell.slug}); longest length by probe, in tokens: {limits_text}"
        )
        raise GridError("--length", None, str(too_long[0]), problem)
    for probe in probes:
        if (reason := probe.inapplicable()) is not None:
            limits_text = f"cell {cell.id} ({cell.slug}) {reason}; leave the probe or the cell out"
            raise GridError("--probe", None, probe.name, limits_text)


def _cells_by_sweep(store: Store) -> dict[str, set[str]]:
    """Return the ids of the cells of every writable sweep, by name; the sweep launched last comes first."""
    names = [summary.name for summary in store.sweeps() if not summary.read_only]
    return {name: {state.cell_id for state in store.cell_states(name)} for name in names}


def task_settings(
    tasks: Sequence[str], *, include_path: str | None, shots: int | None, limit: int | None, samples: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the settings of the probe downstream for an evaluation; nothing is loaded.

    Args:
        tasks: Tasks, groups or tags of lm-evaluation-harness; each item may hold several, separated by commas.
        include_path: Folder with further task files; None: none.
        shots: Solved examples before each question; None: as the task says.
        limit: Number of questions of each task; None: all.
        samples: Keep the questions and answers.

    Returns:
        The settings by name of the probe; empty without tasks.

    Raises:
        SweepError: No task is named, but an option of tasks.
    """
    names = tuple(dict.fromkeys(name.strip() for item in tasks for name in item.split(",") if name.strip()))
    if not names:
        options = {"--include-path": include_path, "--shots": shots, "--limit": limit, "--samples": samples or None}
        for option in (option for option, value in options.items() if value is not None):
            raise SweepError(f"{option}: applies to downstream tasks only; name some with --tasks")
        if tasks:
            raise SweepError("--tasks: names no task; write names such as blimp,hellaswag")
        return {}
    folder = None if include_path is None else str(Path(include_path).expanduser().resolve())
    settings = {"tasks": names, "include_path": folder, "shots": shots, "limit": limit, "samples": samples}
    return {"downstream": settings}


def check_tasks(settings: ProbeSettings) -> None:
    """Load the data of the tasks in `settings`, as `task_settings` returns them, so that every problem ends here.

    Raises:
        SweepError: A task does not exist or is not supported.
        MachineError: The data of a task can neither be read nor downloaded.
        PackageMissing: lm-evaluation-harness is not installed.
    """
    if named := settings.get("downstream"):
        load_harness().check_tasks(named["tasks"], named["include_path"])


def check_probes(setting: str, names: Sequence[str]) -> None:
    """Raise GridError for a name that is no registered probe; `setting` is the option or key that named it."""
    for name in names:
        if name not in PROBES:
            raise GridError(
                setting,
                None,
                name,
                "no such probe; name the file of a plugin with --plugin",
                list(PROBES),
                name,
            )


def with_requested_probes(
    cell: Cell, probes: Sequence[str], lengths: Sequence[int], settings: ProbeSettings = NO_SETTINGS
) -> Cell:
    """Return the cell with these probes and lengths in its config; its id stays the same.

    Neither probes nor lengths are part of the id. Duplicates are dropped; probes keep their order, lengths are sorted.
    Settings of probes that derive from lengths keep those derived from the config's lengths.

    Args:
        cell: Trained cell; it is not changed.
        probes: Names of probes; empty to keep those of the config.
        lengths: Context lengths in tokens; empty to keep those of the config.
        settings: Settings of probes that replace those of the config, by name of the probe.

    Raises:
        GridError: A probe is unknown, or the stored settings of the probes are invalid.
    """
    probe_update: dict[str, Any] = {"settings": {**cell.config.eval.settings, **settings}}
    if probes:
        probe_update["probes"] = tuple(dict.fromkeys(probes))
    config = cell.config.model_copy(update={"eval": cell.config.eval.model_copy(update=probe_update)})
    check_probes(f"eval.probes of cell {cell.id}", config.eval.probes)
    try:
        # settings derived from lengths are derived from the grid's lengths
        evaluation = with_settings(config.eval)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        problem = f"{message}; launch its grid again to store valid ones"
        raise GridError(f"settings of the probes of cell {cell.id}", None, "", problem) from error
    length_update = {"lengths": tuple(sorted(set(lengths)))} if lengths else {}
    return replace(cell, config=config.model_copy(update={"eval": evaluation.model_copy(update=length_update)}))


def run(
    store: Store, tasks_by_sweep: dict[str, list[Task]], listener: Listener, *, runs: Path,
    executor: str = DEFAULT_EXECUTOR,
    revisions: Mapping[str, NewRevision] | None = None,
) -> list[CellMeasurements]:  # fmt: skip
    """Run the planned evaluations, block until they have ended, and return the new measurements.

    Every sweep is claimed before the first attempt starts, and released at the end. Dead attempts of these cells are
    reaped first. Attempts run the installed package. A failed evaluation is no error here.

    Args:
        store: Database with the cells.
        tasks_by_sweep: Tasks from `plan`, by the name of the sweep.
        listener: Receiver of progress events.
        runs: Runs folder.
        executor: Name of the executor in the registry.
        revisions: Revision to record when a sweep is claimed, by name; None to record none.

    Returns:
        One item per task, in the tasks' order. Its values are those of the cell's newest finished attempt of this run,
        none if there was none.

    Raises:
        SweepBusy: Another supervisor runs one of the sweeps.
        SweepReadOnly: A sweep takes no launches.
        MachineError: A GPU is missing or locked.
        SweepBroken: Several evaluations failed with the same error.
        Interrupted: After a clean stop.
    """
    owner = processes.this_process("evaluate")
    for tasks in tasks_by_sweep.values():
        frozen = supervisor.freeze_plugins([task.cell for task in tasks], runs)
        tasks[:] = [replace(task, cell=cell) for task, cell in zip(tasks, frozen, strict=True)]
    cells = [task.cell for tasks in tasks_by_sweep.values() for task in tasks]
    with ExitStack() as resources:
        claimed = []
        for sweep, share in tasks_by_sweep.items():
            fence = store.acquire_sweep(
                sweep, owner, supervisor.LEASE_S, is_alive=processes.is_alive, revision=(revisions or {}).get(sweep)
            )
            resources.callback(store.release_sweep, sweep, fence)
            claimed.append((sweep, fence, share))
        supervisor.reap(store, cells, runs)
        newest_attempts = {
            cell.id: max((attempt.id for attempt in store.attempts(cell.id)), default=0) for cell in cells
        }
        try:
            opened_executor = resources.enter_context(
                closing(open_executor(executor, ExecutorContext(store, runs, tell=lambda line: None)))
            )
            run_tasks(store, claimed, listener, opened_executor, runs=runs, commit=git_state())
        except Interrupted as stop:
            raise Interrupted(stop.number, "run evaluate again for the cells that are not finished") from stop
    return [_new_measurements(store, cell, newest_attempts[cell.id], runs) for cell in cells]


def _new_measurements(store: Store, cell: Cell, after_attempt: int, runs: Path) -> CellMeasurements:
    """Return the measurements of the newest finished evaluation after the attempt with the id `after_attempt`.

    Trainings do not count. Empty without such an evaluation. `runs` is the runs folder.
    """
    attempts = [
        attempt for attempt in store.attempts(cell.id) if attempt.kind != "train" and attempt.id > after_attempt
    ]
    done = [attempt for attempt in attempts if attempt.state == "done"]
    if not done:
        return CellMeasurements(cell, [])
    values = [value for value in store.measurements(cell.id) if value.attempt_id == done[-1].id]
    return CellMeasurements(cell, values, runs / done[-1].run_dir)
