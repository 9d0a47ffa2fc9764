"""A study that is exported for Optuna is, loaded by Optuna itself, what the database holds: trial by trial."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
import studied
from atma_sweep.results.exchange.trackers.optuna import export
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.results.studies.optuna_study import Trial
from here import run_in_process
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from studied import DECAY, DEPTH, KIND, RATE, SEARCH, SECONDS, START, trials_at_random

pytestmark = pytest.mark.thorough
STATES = {
    "done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "diverged": TrialState.PRUNED,
    "failed": TrialState.FAIL, "asked": TrialState.RUNNING,
}  # fmt: skip


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return open_store(tmp_path / "atma.db", create=True)


def loaded(file: Path, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{file}")


def test_every_trial_is_what_it_was(empty: Store, tmp_path: Path) -> None:
    trials = studied.record_study(empty)
    assert export(empty, "tuned", tmp_path / "o.db") == 40
    study = loaded(tmp_path / "o.db", "tuned")
    assert [item.name for item in study.directions] == ["MINIMIZE"]
    assert study.metric_names == ["val.val_loss"]
    assert study.user_attrs == {"sampler": "tpe", "pruner": "asha"}
    spaces = {
        RATE: FloatDistribution(0.003, 0.1, log=True), DEPTH: IntDistribution(4, 16, step=4),
        KIND: CategoricalDistribution(("polar", "nope", "rope")), DECAY: FloatDistribution(0.0, 0.2),
    }  # fmt: skip
    assert len(study.trials) == len(trials)
    for theirs, ours in zip(study.trials, trials, strict=True):
        assert theirs.number == ours.number
        assert theirs.state is STATES[ours.standing]
        assert theirs.params == ours.params
        assert theirs.distributions == spaces
        if ours.standing == "done":
            assert theirs.values == list(ours.values or ())
        assert theirs.intermediate_values == dict(ours.curve)
        assert theirs.user_attrs["cell"] == ours.cell
        assert theirs.user_attrs["standing"] == ours.standing
        if ours.standing != "asked":
            assert theirs.datetime_start == START.astimezone().replace(tzinfo=None)
            assert theirs.duration == timedelta(seconds=SECONDS * (ours.number + 1))
    best = min((item for item in trials if item.standing == "done"), key=lambda item: (item.values or (0,))[0])
    assert study.best_trial.number == best.number


def test_a_front_is_optunas_and_a_study_there_can_go_on(empty: Store, tmp_path: Path) -> None:
    trials = studied.two(empty)
    export(empty, "both", tmp_path / "o.db")
    study = loaded(tmp_path / "o.db", "both")
    assert [item.name for item in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    points = {item.number: item.values for item in trials if item.values is not None}
    front = {n for n, a in points.items() if not any(b[0] <= a[0] and b[1] >= a[1] and b != a for b in points.values())}
    assert {item.number for item in study.best_trials} == front
    assert study.ask(study.trials[0].distributions).number == 30


def test_parameters_outside_a_narrower_search_are_exported(empty: Store, tmp_path: Path) -> None:
    first, second = trials_at_random(SEARCH, 2)
    odd = replace(first, params={**first.params, RATE: 0.5, KIND: "titans"})
    nowhere = Trial(2, {RATE: 0.01}, "failed", reason="makes no cell")
    studied.record(empty, "odd", SEARCH, [odd, second, nowhere])
    export(empty, "odd", tmp_path / "o.db")
    theirs = loaded(tmp_path / "o.db", "odd").trials
    assert set(theirs[0].params) == {DEPTH, DECAY}
    assert {k: v for k, v in theirs[0].user_attrs.items() if k.startswith("outside.")} == {
        f"outside.{RATE}": 0.5,
        f"outside.{KIND}": "titans",
    }
    assert theirs[2].user_attrs == {"standing": "failed", "reason": "makes no cell"}


def test_the_command_writes_a_file_and_replaces_none(empty: Store, tmp_path: Path, cells: Any) -> None:
    studied.record_study(empty)
    code, out, err = run_in_process(tmp_path, "export", "--sweep", "tuned", "--to", "optuna")
    assert (code, err) == (0, "")
    assert out == "tuned-optuna.db: 40 trials of sweep tuned\n"
    with sqlite3.connect(tmp_path / "tuned-optuna.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM trials").fetchone() == (40,)
    result = run_in_process(tmp_path, "export", "--sweep", "tuned", "--to", "optuna", "--out", "x.db", "--json")
    assert json.loads(result[1]) == {"sweep": "tuned", "file": "x.db", "trials": 40}
    before = (tmp_path / "atma.db").read_bytes()
    for name in ("atma.db", "x.db"):
        code, out, err = run_in_process(tmp_path, "export", "--sweep", "tuned", "--to", "optuna", "--out", name)
        assert (code, out) == (2, "")
        assert err == (
            f"atma-sweep: {name} exists already, and --to optuna never overwrites a database; name a new file with "
            "--out\n"
        )
    assert (tmp_path / "atma.db").read_bytes() == before
    empty.record_revision("grid", grid_text="x", grid_file="x", cells=cells(1))
    code, _, err = run_in_process(tmp_path, "export", "--sweep", "grid", "--to", "optuna")
    assert (code, err.count("\n")) == (2, 1)
    assert "sweep grid is not a study, which --to optuna requires; --to mlflow exports any sweep" in err
    assert not (tmp_path / "grid-optuna.db").exists()


@pytest.mark.thorough
def test_optuna_dashboard_itself_reads_it(empty: Store, tmp_path: Path) -> None:
    dashboard = pytest.importorskip("optuna_dashboard", reason="needs optuna-dashboard: pip install -e '.[oracles]'")
    studied.record_study(empty)
    export(empty, "tuned", tmp_path / "o.db")
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'o.db'}")
    serve = dashboard.wsgi(storage)
    output: list[str] = []

    def fetched(path: str) -> Any:
        environment: dict[str, Any] = {"PATH_INFO": path}
        setup_testing_defaults(environment)
        body = b"".join(serve(environment, lambda status, *_: output.append(status)))
        return json.loads(body)

    (study,) = fetched("/api/studies")["study_summaries"]
    assert study["study_name"] == "tuned"
    trials = fetched(f"/api/studies/{study['study_id']}")["trials"]
    assert [entry["number"] for entry in trials] == list(range(40))
    assert sum(entry["state"] == "Complete" for entry in trials) == 33
    assert all(status.startswith("200") for status in output)
