"""Exporter of a study to an Optuna database, which optuna-dashboard and every program based on Optuna can open.

Each export writes a new database from the records of this program; nothing is ever read back from it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from ...console.output_files import atomic_file
from ...errors import StoreError
from ...store.records import Attempt
from ...store.store import Store
from ...studies.optuna_study import Trial, build_study
from ...studies.search import Search
from ...studies.study_store import search_of, trials_of


def export(store: Store, sweep: str, out: Path) -> int:
    """Write a SQLite file with one Optuna study, the sweep, and return the number of trials.

    Directions, distributions, numbers, parameters, values and curves (by validation) are those of the study's trials.
    Start and end are those of their attempts. User attributes of a trial hold its cell, standing, failure reason, and
    parameters outside the current search space (`outside.PATH`). User attributes of the study hold sampler and pruner.

    Raises:
        StoreError: the sweep is not a study, or the file exists or cannot be written.
    """
    search = search_of(store, sweep)
    if search is None:
        raise StoreError(f"sweep {sweep} is not a study, which --to optuna requires; --to mlflow exports any sweep")
    if os.path.lexists(out):
        raise StoreError(
            f"{out} exists already, and --to optuna never overwrites a database; name a new file with --out"
        )
    trials = trials_of(store, sweep)
    times = _times(store.attempts_of({trial.cell for trial in trials if trial.cell is not None}))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "optuna.db"
        _write(file, sweep, search, trials, times)
        with atomic_file(out) as stream, file.open("rb") as written:
            shutil.copyfileobj(written, stream)
    return len(trials)


def _write(
    file: Path, sweep: str, search: Search, trials: list[Trial], times: Mapping[str, tuple[datetime, datetime | None]]
) -> None:
    """Write the study with all trials to a new Optuna database, and close it. Sets Optuna's log level to WARNING.

    Args:
        file: file that does not exist.
        sweep: name of the study.
        search: search space, objectives, sampler and pruner.
        trials: trials in the order of their numbers.
        times: (start, end) by cell id; end is None while the cell runs.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    study = optuna.create_study(storage=storage, study_name=sweep, directions=list(search.objectives.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that names of objectives are called experimental
        study.set_metric_names(list(search.objectives))
    study.set_user_attr("sampler", search.sampler)
    study.set_user_attr("pruner", search.pruner or "none")
    frozen_trials = build_study(search, trials).get_trials(deepcopy=False)
    study.add_trials(
        [_with_attributes(trial, frozen, times) for trial, frozen in zip(trials, frozen_trials, strict=True)]
    )
    storage.remove_session()
    storage.engine.dispose()


def _with_attributes(
    trial: Trial, frozen: FrozenTrial, times: Mapping[str, tuple[datetime, datetime | None]]
) -> FrozenTrial:
    """Set times and user attributes of an Optuna trial in place, and return it.

    A trial without a cell or attempt keeps Optuna's times. Attributes that are None are left out.

    Args:
        trial: trial of this program.
        frozen: the same trial as Optuna's.
        times: (start, end) by cell id.
    """
    began, ended = times.get(trial.cell or "", (None, None))
    frozen.datetime_start = _local_time(began) or frozen.datetime_start
    if frozen.state.is_finished():
        frozen.datetime_complete = _local_time(ended) or frozen.datetime_start or frozen.datetime_complete
    attributes: dict[str, Any] = {"cell": trial.cell, "standing": trial.standing, "reason": trial.reason}
    attributes |= {f"outside.{path}": value for path, value in trial.params.items() if path not in frozen.params}
    for name, value in attributes.items():
        if value is not None:
            frozen.set_user_attr(name, value)
    return frozen


def _times(attempts: list[Attempt]) -> dict[str, tuple[datetime, datetime | None]]:
    """Return the start of a cell's first attempt and the end of its last one (None while it runs), by cell id.

    `attempts` must come oldest first, of any number of cells.
    """
    times: dict[str, tuple[datetime, datetime | None]] = {}
    for attempt in attempts:
        first = times.get(attempt.cell_id, (attempt.started_at, None))[0]
        times[attempt.cell_id] = (first, attempt.finished_at)
    return times


def _local_time(moment: datetime | None) -> datetime | None:
    """Return the time as Optuna stores it: in this machine's time zone, without the zone."""
    return None if moment is None else moment.astimezone().replace(tzinfo=None)
