"""Items of probes: read as they were stored, and tested item by item."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.data import ReportError, SweepData, gather
from atma_sweep.reports.stats.items import answers, items_of
from atma_sweep.results.store.recorder import Recorder
from atma_sweep.results.store.records import CellRecord, Example, Measurement, Owner
from atma_sweep.results.store.store import Store

ME = Owner(name="ada", host="here", pid=1, started=0.0)
NEEDLE = ("needle", "digit_accuracy", 64)


def record(store: Store, cell: CellRecord, measured: dict[tuple[str, str, int], Any], kind: str = "train") -> int:
    """A finished attempt with these measures, each the array [items] or [items, positions] of its examples."""
    attempt = store.start_attempt(cell.id, owner=ME, fence=1, kind=kind)
    recorder = Recorder(store, attempt.id, 1)
    for (probe, metric, length), values in measured.items():
        table = np.asarray(values, dtype=float).reshape(len(values), -1)
        unit = "fraction" if metric == "digit_accuracy" else "nats/token"
        about: dict[str, Any] = {"probe": probe, "metric": metric, "length": length}
        recorder.measurements([Measurement(**about, value=float(np.nanmean(table)), unit=unit, n=table.size)])
        recorder.examples(
            [
                Example(**about, item=item, position=position, value=None if np.isnan(value) else float(value))
                for item, row in enumerate(table)
                for position, value in enumerate(row)
            ]
        )
    store.finish_attempt(attempt.id, 1, "done")
    return attempt.id


@pytest.fixture
def sweep(empty: Store, make: Any) -> Callable[..., SweepData]:
    """sweep([(levels, seed, measured), ...]) -> the data of a sweep of these cells."""
    cell, _ = make

    def sweep(cells: list[tuple[dict[str, str], int, dict[Any, Any] | None]]) -> SweepData:
        records = [cell(index + 1, seed=seed, **levels) for index, (levels, seed, _) in enumerate(cells)]
        empty.record_revision("own", grid_text="x", grid_file="x.yaml", cells=records)
        for one, (_, _, measured) in zip(records, cells, strict=True):
            if measured is not None:
                record(empty, one, measured)
        return gather(empty, "own")

    return sweep


@pytest.fixture
def hits() -> Iterator[np.ndarray]:
    """[6 cells, 4 trials, 5 digits]"""
    return (np.random.default_rng(7).random((6, 4, 5)) < 0.7).astype(float)  # type: ignore[return-value]


class TestReading:
    def test_every_trial_is_the_mean_of_its_digits(
        self, empty: Store, sweep: Callable[..., SweepData], hits: np.ndarray
    ) -> None:
        data = sweep([({"memory": m}, seed, {NEEDLE: hits[2 * k + seed]}) for k, m in enumerate(("off", "on")) for seed in (0, 1)])  # fmt: skip
        found = answers(empty, data)
        assert found["cell"].tolist() == [f"{index:012x}" for index in (1, 2, 3, 4) for _ in range(4)]
        assert found["seed"].tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
        assert found["trial"].tolist() == [0, 1, 2, 3] * 4
        assert found["value"].tolist() == pytest.approx(hits[:4].mean(2).ravel().tolist())
        assert found["exact"].tolist() == hits[:4].all(2).ravel().tolist()
        assert found["configuration"].nunique() == 2
        assert set(found["length"]) == {64}

    def test_of_two_attempts_the_newer_one_counts(self, empty: Store, sweep: Any, hits: np.ndarray, make: Any) -> None:
        data = sweep([({}, 0, {NEEDLE: hits[0]})])
        attempt = record(empty, make[0](1), {NEEDLE: hits[1]}, "evaluate")
        (one,) = items_of(empty, gather(empty, "own"), [NEEDLE])
        assert one.mean[0] == pytest.approx(hits[1].mean(1))
        assert set(answers(empty, gather(empty, "own"))["attempt"]) == {attempt}
        assert items_of(empty, data, [NEEDLE])[0].mean[0] == pytest.approx(hits[0].mean(1)), "of the numbers it holds"

    def test_what_a_cell_lacks_is_nan(self, empty: Store, sweep: Any, hits: np.ndarray) -> None:
        gone = hits[1].copy()
        gone[2, 3] = np.nan
        data = sweep(
            [({}, 0, {NEEDLE: hits[0]}), ({}, 1, {NEEDLE: gone}), ({}, 2, {NEEDLE: hits[2][:2]}), ({}, 3, None)]
        )
        (one,) = items_of(empty, data, [NEEDLE, ("needle", "digit_accuracy", 128), ("clean", "nats", 64)])
        assert one.measure == NEEDLE
        assert np.isnan(one.mean).tolist() == [
            [False] * 4,
            [False, False, True, False],
            [False, False, True, True],
            [True] * 4,
        ]
        assert len(answers(empty, data)) == 9

    def test_without_items_it_says_so(self, published: Store) -> None:
        with pytest.raises(ReportError, match="printed-v2 has no items of probe needle"):
            answers(published, gather(published, "printed-v2"))
