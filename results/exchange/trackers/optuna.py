"""A study as a database of Optuna's own, which optuna-dashboard and every program that knows Optuna opens.

It is made anew from our records each time: they are the truth, and nothing is read back from the copy.
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
from ...studies.optuna_study import Trial, made
from ...studies.search import Search
from ...studies.study_store import search_of, trials_of


def export(store: Store, sweep: str, out: Path) -> int:
    """Writes a SQLite file with one study, the sweep; returns how many trials. Directions, distributions, numbers, settings, values and
    curves (by validation) are those of our trials; start and end those of their attempts; in the attributes of a trial stand its
    cell, its standing here, why it failed, and settings that are outside of what is searched now.

    Raises StoreError: the sweep is no study, the file exists or cannot be written.
    """
    search = search_of(store, sweep)
    if search is None:
        raise StoreError(f"sweep {sweep} is no study, so Optuna has nothing to show of it; --to mlflow takes any sweep")
    if os.path.lexists(out):
        raise StoreError(f"{out} exists; name a new file with --out, since --to optuna replaces no database")
    trials = trials_of(store, sweep)
    times = _times(store.attempts_of({one.cell for one in trials if one.cell is not None}))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "optuna.db"
        _write(file, sweep, search, trials, times)
        with atomic_file(out) as stream, file.open("rb") as written:
            shutil.copyfileobj(written, stream)
    return len(trials)


def _write(
    file: Path, sweep: str, search: Search, trials: list[Trial], times: Mapping[str, tuple[datetime, datetime | None]]
) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    study = optuna.create_study(storage=storage, study_name=sweep, directions=list(search.objectives.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that names of objectives are called experimental
        study.set_metric_names(list(search.objectives))
    study.set_user_attr("sampler", search.sampler)
    study.set_user_attr("pruner", search.pruner or "none")
    here = made(search, trials).get_trials(deepcopy=False)
    study.add_trials([_told(one, frozen, times) for one, frozen in zip(trials, here, strict=True)])
    storage.remove_session()
    storage.engine.dispose()


def _told(trial: Trial, frozen: FrozenTrial, times: Mapping[str, tuple[datetime, datetime | None]]) -> FrozenTrial:
    """The trial of Optuna's with what it does not know."""
    began, ended = times.get(trial.cell or "", (None, None))
    frozen.datetime_start = _local(began) or frozen.datetime_start
    if frozen.state.is_finished():
        frozen.datetime_complete = _local(ended) or frozen.datetime_start or frozen.datetime_complete
    told: dict[str, Any] = {"cell": trial.cell, "standing": trial.standing, "reason": trial.reason}
    told |= {f"outside.{path}": value for path, value in trial.params.items() if path not in frozen.params}
    for name, value in told.items():
        if value is not None:
            frozen.set_user_attr(name, value)
    return frozen


def _times(attempts: list[Attempt]) -> dict[str, tuple[datetime, datetime | None]]:
    """By cell: when its first attempt began, and when the last of them ended, if it has."""
    found: dict[str, tuple[datetime, datetime | None]] = {}
    for one in attempts:
        first = found.get(one.cell_id, (one.started_at, None))[0]
        found[one.cell_id] = (first, one.finished_at)
    return found


def _local(moment: datetime | None) -> datetime | None:
    """As Optuna keeps times: of this machine's zone, which is not written."""
    return None if moment is None else moment.astimezone().replace(tzinfo=None)
