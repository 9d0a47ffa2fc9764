"""Bundles that earlier releases wrote are taken in, with every number as that release read it from its own database.

fixtures/bundle-<revision>.zip was exported, and the .json beside it written, by the release whose schema that is; neither
is ever written again, since they stand for files that people have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results import open_store
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.maintenance.check import check
from atma_sweep.results.store.records import CurvePoint
from atma_sweep.results.store.schema import AttemptRow, ExampleRow
from atma_sweep.results.store.store import Store
from sqlalchemy import select

FIXTURES = Path(__file__).with_name("fixtures")
FILES = sorted(FIXTURES.glob("bundle-*.zip"))
pytestmark = [
    pytest.mark.usefixtures("working_folder"),
    pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem),
]


CELL = "cell_id slug seed levels axes tokens_total state attempt_number step steps_total loss cause".split()
REVISION = "number grid_text grid_file options git_commit git_dirty".split()
ATTEMPT = "cell_id number kind state started_at finished_at host pid failure cause deviation".split()
"""What the JSON has of each, in this order."""


def only(values: Any, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the old release had; times as text, as in JSON."""
    selected = {name: values[name] for name in like}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in selected.items()}


def in_json(value: Any) -> Any:
    """Return the value as JSON would restore it: tuples as lists, mappings as objects, times as text."""
    return json.loads(
        json.dumps(value, default=lambda item: item.isoformat() if isinstance(item, datetime) else dict(item))
    )


def recorded_values(file: Path) -> dict[str, Any]:
    return json.loads(file.with_suffix(".json").read_text())  # type: ignore[no-any-return]


def test_the_numbers_are_those_of_the_release_that_wrote_it(file: Path, store: Store, tmp_path: Path) -> None:
    recorded = recorded_values(file)
    summary = import_bundle(store, file, runs=tmp_path / "runs")
    assert summary.added["measurement"] == 23
    values = [vars(value) | {"number": store.attempt(value.attempt_id).number} for value in store.values("before")]
    assert len(values) == len(recorded["values"]) == 12
    assert [only(actual, like) for actual, like in zip(values, recorded["values"], strict=True)] == recorded["values"]
    cells = [attrgetter(*CELL)(cell) for cell in store.cell_states("before")]
    assert in_json(cells) == recorded["cells"]
    revisions = [store.revision("before", number) for number in (1, 2)]
    actual = [attrgetter(*REVISION)(revision) for revision in revisions]
    assert in_json(actual) == recorded["revisions"]


def test_old_bundle_keeps_attempts_curves_and_items(file: Path, store: Store, tmp_path: Path) -> None:
    recorded = recorded_values(file)
    import_bundle(store, file, runs=tmp_path / "runs")
    points: list[str] = list(recorded["attempts"][0][-1][0])
    assert set(points) <= set(CurvePoint.__dataclass_fields__)
    attempts = [attempt for cell in store.cell_states("before") for attempt in store.attempts(cell.cell_id)]
    actual = [
        (
            *attrgetter(*ATTEMPT)(attempt),
            [only(vars(point), dict.fromkeys(points)) for point in store.curve(attempt.id)],
        )
        for attempt in attempts
    ]
    assert in_json(actual) == recorded["attempts"]
    trained = next(attempt for attempt in attempts if attempt.weights)
    assert in_json(only(vars(store.provenance(trained.id)), recorded["provenance"])) == recorded["provenance"]
    assert next(attempt for attempt in attempts if attempt.kind == "evaluate").parent_id == trained.id
    assert (tmp_path / "runs" / str(trained.weights)).read_bytes() == b"weights of a polar cell"
    columns = (ExampleRow.probe, ExampleRow.metric, ExampleRow.length, ExampleRow.item, ExampleRow.position)
    query = select(AttemptRow.cell_id, AttemptRow.number, *columns, ExampleRow.value, ExampleRow.detail)
    query = query.join(AttemptRow, AttemptRow.id == ExampleRow.attempt_id)
    items = store.read(lambda session: [list(row) for row in session.execute(query)])
    assert sorted(items, key=repr) == recorded["examples"]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_the_database_is_sound_and_gives_the_bundle_on(file: Path, store: Store, tmp_path: Path) -> None:
    import_bundle(store, file, runs=tmp_path / "runs")
    assert [finding for finding in check(store.path, runs=tmp_path / "runs") if finding.severity == "error"] == []
    export_sweep(store, "before", tmp_path / "again.zip", weights=True, runs=tmp_path / "runs")
    second_store = open_store(tmp_path / "other.db", create=True)
    assert (
        import_bundle(second_store, tmp_path / "again.zip").added
        == import_bundle(open_store(tmp_path / "third.db", create=True), file).added
    )
    assert [value.value for value in second_store.values()] == [value.value for value in store.values()]
