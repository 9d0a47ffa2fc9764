"""Attempts of one small cell in float32 on several ranks: curve, measurements and examples as in one process."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.results.weights import WEIGHTS_SHA256
from attempts import STEPS, Room
from ranked import run_ranks
from ranked_attempts import run


def attempt_on(ours: Room, size: int, stop: int | None = None) -> tuple[Any, list[str]]:
    """Run one attempt of the cell on so many ranks; return it as recorded, and how each rank ended."""
    job = ours.job("train", ours.settings(), None)
    ends = run_ranks(size, run, ours.runs, job.folder, ours.store.path, stop)
    return ours.store.attempt(job.attempt), ends


def sql(ours: Room, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(str(ours.store.path)) as connection:
        return connection.execute(query).fetchall()


def measurements(ours: Room, attempt: Any) -> dict[tuple[Any, ...], Any]:
    rows = sql(ours, f"SELECT probe, metric, length, value, n FROM measurement WHERE attempt_id = {attempt.id}")
    clock = ("tokens_per_s", "train_seconds", "peak_memory")
    return {tuple(row[:3]): tuple(row[3:]) for row in rows if row[1] not in clock}


def extra(ours: Room, attempt: Any) -> dict[str, Any]:
    ((text,),) = sql(ours, f"SELECT extra FROM provenance WHERE attempt_id = {attempt.id}")
    return dict(json.loads(text))


@pytest.mark.thorough
def test_attempt_on_ranks_records_the_same(room: Callable[..., Room]) -> None:
    alone, several = room(), room()
    expected, _ = attempt_on(alone, 1)
    ours, ends = attempt_on(several, 2)
    assert ends == ["done", "done"]
    assert ours.state == "done"
    curve, reference = several.curve(ours), alone.curve(expected)
    assert [point[0] for point in curve] == list(range(1, STEPS + 1))
    for point, expected_point in zip(curve, reference, strict=True):
        assert point == pytest.approx(expected_point, rel=2e-3)
    mine, theirs = measurements(several, ours), measurements(alone, expected)
    assert mine.keys() == theirs.keys()
    for key, (value, n) in theirs.items():
        assert mine[key][1] == n
        # a value that is missing in one is missing in the other
        assert mine[key][0] == (None if value is None else pytest.approx(value, rel=2e-3)), key
    assert extra(several, ours)["ranks"] == 2
    assert extra(several, ours)["steps"].startswith("as they come: 2 ranks")
    assert WEIGHTS_SHA256 in extra(several, ours)
    assert "ranks" not in extra(alone, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_stopped_attempt_continues_on_another_number(room: Callable[..., Room], sizes: tuple[int, int]) -> None:
    ours = room()
    first, ends = attempt_on(ours, sizes[0], stop=9)
    assert first.state == "interrupted"
    assert set(ends) == {"interrupted"}
    second, _ = attempt_on(ours, sizes[1])
    assert second.state == "done"
    resumed = [event.message for event in ours.store.events() if event.kind == "resumed"]
    assert len(resumed) == 1
    assert [point[0] for point in ours.curve(second)] == list(range(1, STEPS + 1))
