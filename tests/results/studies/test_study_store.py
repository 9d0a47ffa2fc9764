"""Studies in the database: what is written comes back, under the fence alone, and goes with its sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from atma_sweep.results import forecast
from atma_sweep.results.errors import LeaseLost
from atma_sweep.results.forecast import Forecast
from atma_sweep.results.maintenance import deletion
from atma_sweep.results.store.records import NewRevision, Owner
from atma_sweep.results.store.store import Store
from atma_sweep.results.studies.optuna_study import Trial
from atma_sweep.results.studies.search import (
    OPTION_KEY,
    Interval,
    LevelChoice,
    Search,
    search_as_json,
    search_from_options,
)
from atma_sweep.results.studies.study_store import StudyWriter, sampler_state, search_of, trials_of

SEARCH = Search(
    {"train.muon_lr": Interval(1e-3, 0.1, log=True), "model.n_layers": Interval(2, 8, step=2), "memory": LevelChoice(("on", True))},
    {"val.val_loss": "minimize", "throughput.tokens_per_s": "maximize"},
    "nsga2", 30, None, 7, {"population": 4},
)  # fmt: skip


@pytest.fixture
def studied(store: Store, cells: Any, owner: Owner) -> tuple[StudyWriter, list[Any]]:
    revision = NewRevision(
        grid_text="x",
        grid_file="x.yaml",
        options=json.loads(json.dumps({OPTION_KEY: search_as_json(SEARCH)})),
        cells=[],
    )
    return StudyWriter(store, "s", store.acquire_sweep("s", owner, 60.0, revision=revision)), cells(3)


def test_a_search_comes_back_from_the_options_of_its_revision(studied: Any, store: Store) -> None:
    restored = search_of(store, "s")
    assert restored == SEARCH
    assert list(restored.ranges) == list(SEARCH.ranges)
    layers = restored.ranges["model.n_layers"]
    assert isinstance(layers, Interval)
    assert layers.is_integer


@pytest.mark.parametrize(
    ("key", "value"),
    [("ranges", []), ("ranges", [["a", {"low": 2, "high": 1, "log": False, "step": None}]]), ("sampler", "grid"),
     ("trials", "many"), ("objectives", [["a", "up"]]), ("pruner", "shears")],
)  # fmt: skip
def test_what_is_no_search_is_none(key: str, value: Any) -> None:
    options = {OPTION_KEY: search_as_json(SEARCH)}
    assert search_from_options(options) == SEARCH
    options[OPTION_KEY][key] = value
    assert search_from_options(options) is None
    assert search_from_options({}) is search_from_options(None) is search_from_options({OPTION_KEY: 3}) is None


def test_trials_are_restored_as_written(studied: tuple[StudyWriter, list[Any]], store: Store) -> None:
    studies, cells = studied
    first = Trial(0, {"train.muon_lr": 1 / 3, "memory": True}, attrs={"a": [1.5]}, cell=cells[0].id)
    studies.propose(first, cells[0], memory={"generation": 1})
    assert (trials_of(store, "s"), sampler_state(store, "s")) == ([first], {"generation": 1})
    second = Trial(1, {"train.muon_lr": 0.1, "memory": "on"}, cell=cells[1].id)
    first = replace(first, attrs={"b": 2})
    studies.propose(second, cells[1], [first], {"generation": 2})
    first = replace(first, standing="done", values=(1 / 7, 3.0), curve=((1, 0.1 + 0.2), (2, 1 / 3)))
    second = replace(second, standing="failed", reason="no memory")
    studies.update_trials(first, second)
    same = Trial(2, first.params, "done", first.values, cell=cells[0].id)
    nowhere = Trial(3, {"train.muon_lr": 9.0}, "failed", reason="makes no cell")
    studies.propose(same, cells[0])
    studies.propose(nowhere, None)
    assert trials_of(store, "s") == [first, second, same, nowhere]
    assert sampler_state(store, "s") == {"generation": 2}, "what is not told stays"
    assert [cell for cell, _ in store.members("s")] == [cells[0].id, cells[1].id], "a cell is listed once"
    assert trials_of(store, "s", "other") == []


def test_forecast_of_a_proposal_follows_its_cell(store: Store, cells: Any, owner: Owner) -> None:
    def cost(hours: float) -> Forecast:
        return Forecast("here", (0,), ({"FLOPs": (hours / 2, hours, 2 * hours)},))

    listed, first, second = cells(3)
    options = {forecast.OPTION_KEY: forecast.forecast_as_json(cost(1.0))}
    revision = NewRevision(grid_text="x", grid_file="x.yaml", options=options, cells=[listed])
    studies = StudyWriter(store, "s", store.acquire_sweep("s", owner, 60.0, revision=revision))
    for number, (cell, hours) in enumerate([(first, 2.0), (listed, 9.0), (second, 3.0), (first, 9.0)]):
        studies.propose(Trial(number, {"a": number}, cell=cell.id), cell, forecast=cost(hours))
    restored = forecast.forecast_from_options(store.revision("s").options)
    assert restored is not None
    assert [cell for cell, _ in store.members("s")] == [listed.id, first.id, second.id]
    assert [restored.cell(position)["FLOPs"][1] for position in range(3)] == [1.0, 2.0, 3.0]


def test_only_who_holds_the_sweep_writes(studied: Any, store: Store) -> None:
    studies, cells = studied
    with pytest.raises(LeaseLost):
        replace(studies, fence=studies.fence - 1).propose(Trial(0, {}, cell=cells[0].id), cells[0])
    assert trials_of(store, "s") == store.members("s") == []


def test_deletion_resets_trials_and_removes_studies(studied: Any, store: Store) -> None:
    studies, cells = studied
    for number in range(2):
        trial = Trial(number, {"a": number}, "done", (1.0,), ((1, 2.0),), cell=cells[number].id)
        studies.propose(trial, cells[number])
    store.release_sweep("s", studies.fence)

    def delete(name: str) -> None:
        deletion.execute_deletion(store, deletion.plan_deletion(store, [name], holds=lambda *a: False), [name], holds=lambda *a: False, who="ada")  # fmt: skip

    delete(cells[1].id)
    remaining, gone = trials_of(store, "s")
    assert remaining.values == (1.0,)
    assert gone == Trial(1, {"a": 1})
    delete("s")
    assert store.sweeps() == []
    with store.transaction() as session:
        from sqlalchemy import text

        assert [session.scalar(text(f"SELECT COUNT(*) FROM {table}")) for table in ("study", "trial")] == [0, 0]
