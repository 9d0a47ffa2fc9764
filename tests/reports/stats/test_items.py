"""Items of probes: read as they were stored, and tested item by item."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.stats.items import answers_frame, item_effects, items_of, mcnemar
from atma_sweep.reports.sweep_data import ReportError, SweepData, load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, Example, Measurement, Owner
from atma_sweep.results.store.store import Store
from statsmodels.stats import contingency_tables

ME = Owner(name="ada", host="here", pid=1, started=0.0)
NEEDLE = ("needle", "digit_accuracy", 64)


def record(store: Store, cell: CellRecord, measured: dict[tuple[str, str, int], Any], kind: str = "train") -> int:
    """Store a finished attempt with items of each measure, [item] or [item, position], and return its id."""
    attempt = store.start_attempt(cell.id, owner=ME, fence=1, kind=kind)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    for (probe, metric, length), values in measured.items():
        table = np.asarray(values, dtype=float).reshape(len(values), -1)
        unit = "fraction" if metric == "digit_accuracy" else "nats/token"
        fields: dict[str, Any] = {"probe": probe, "metric": metric, "length": length}
        recorder.measurements(
            [
                Measurement(
                    **fields,
                    value=float(table[~np.isnan(table)].mean()) if not np.isnan(table).all() else 0.0,
                    unit=unit,
                    n=table.size,
                )
            ]
        )
        recorder.examples(
            [
                Example(**fields, item=item, position=position, value=None if np.isnan(value) else float(value))
                for item, row in enumerate(table)
                for position, value in enumerate(row)
            ]
        )
    store.finish_attempt(attempt.id, 1, "done")
    return attempt.id


@pytest.fixture
def sweep(empty: Store, make: Any) -> Callable[..., SweepData]:
    """Return a function that stores a sweep of (levels, seed, measures) cells and returns its data."""
    cell, _ = make

    def sweep(cells: list[tuple[dict[str, str], int, dict[Any, Any] | None]]) -> SweepData:
        records = [cell(index + 1, seed=seed, **levels) for index, (levels, seed, _) in enumerate(cells)]
        empty.record_revision("own", grid_text="x", grid_file="x.yaml", cells=records)
        for cell_record, (_, _, measured) in zip(records, cells, strict=True):
            if measured is not None:
                record(empty, cell_record, measured)
        return load_sweep_data(empty, "own")

    return sweep


@pytest.fixture
def hits() -> Iterator[np.ndarray]:
    """Return random hits, [6 cells, 4 trials, 5 digits]."""
    return (np.random.default_rng(7).random((6, 4, 5)) < 0.7).astype(float)  # type: ignore[return-value]


class TestReading:
    def test_item_mean_is_over_its_digits(
        self, empty: Store, sweep: Callable[..., SweepData], hits: np.ndarray
    ) -> None:
        data = sweep([({"memory": m}, seed, {NEEDLE: hits[2 * k + seed]}) for k, m in enumerate(("off", "on")) for seed in (0, 1)])  # fmt: skip
        frame = answers_frame(empty, data)
        assert frame["cell"].tolist() == [f"{index:012x}" for index in (1, 2, 3, 4) for _ in range(4)]
        assert frame["seed"].tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
        assert frame["trial"].tolist() == [0, 1, 2, 3] * 4
        assert frame["value"].tolist() == pytest.approx(hits[:4].mean(2).ravel().tolist())
        assert frame["exact"].tolist() == hits[:4].all(2).ravel().tolist()
        assert frame["configuration"].nunique() == 2
        assert set(frame["length"]) == {64}

    def test_items_of_the_newer_attempt(self, empty: Store, sweep: Any, hits: np.ndarray, make: Any) -> None:
        data = sweep([({}, 0, {NEEDLE: hits[0]})])
        attempt = record(empty, make[0](1), {NEEDLE: hits[1]}, "evaluate")
        (items,) = items_of(empty, load_sweep_data(empty, "own"), [NEEDLE])
        assert items.mean[0] == pytest.approx(hits[1].mean(1))
        assert set(answers_frame(empty, load_sweep_data(empty, "own"))["attempt"]) == {attempt}
        assert items_of(empty, data, [NEEDLE])[0].mean[0] == pytest.approx(hits[0].mean(1)), "of the numbers it holds"

    def test_missing_items_are_nan(self, empty: Store, sweep: Any, hits: np.ndarray) -> None:
        gone = hits[1].copy()
        gone[2, 3] = np.nan
        data = sweep(
            [({}, 0, {NEEDLE: hits[0]}), ({}, 1, {NEEDLE: gone}), ({}, 2, {NEEDLE: hits[2][:2]}), ({}, 3, None)]
        )
        (items,) = items_of(empty, data, [NEEDLE, ("needle", "digit_accuracy", 128), ("clean", "nats", 64)])
        assert items.measure == NEEDLE
        assert np.isnan(items.mean).tolist() == [
            [False] * 4,
            [False, False, True, False],
            [False, False, True, True],
            [True] * 4,
        ]
        assert len(answers_frame(empty, data)) == 9

    def test_table_without_items(self, published: Store) -> None:
        with pytest.raises(ReportError, match="printed-v2 has no items of probe needle"):
            answers_frame(published, load_sweep_data(published, "printed-v2"))


def by_trial(hits: np.ndarray) -> dict[Any, np.ndarray]:
    return {NEEDLE: hits}


class TestEffects:
    def test_item_effect_of_a_single_pair_by_hand(self, empty: Store, sweep: Callable[..., SweepData]) -> None:
        """Memory on and off, 16 trials of 5 digits: permutation by brute force, McNemar by statsmodels."""
        draw = np.random.default_rng(3)
        off, on = ((draw.random((16, 5)) < share).astype(float) for share in (0.8, 0.97))
        data = sweep([({"memory": "off"}, 0, by_trial(off)), ({"memory": "on"}, 0, by_trial(on))])
        (effect,) = item_effects(empty, data)
        d = (on - off).mean(1)
        assert (effect.axis, effect.level, effect.reference, effect.n, effect.pairs, effect.seeds) == (
            "memory",
            "on",
            "off",
            16,
            1,
            1,
        )
        assert effect.mean == pytest.approx(d.mean(), abs=1e-12)
        sums = np.array(list(product((-1, 1), repeat=16))) @ d
        assert effect.p == pytest.approx(float((np.abs(sums) >= abs(d.sum()) - 1e-9).mean()), abs=1e-12)
        assert (effect.low > 0 or effect.high < 0) == (effect.p < 0.05)
        both = on.all(1), off.all(1)
        table = [[int((a & b).sum()) for b in (both[1], ~both[1])] for a in (both[0], ~both[0])]
        assert (effect.gained, effect.lost) == (table[0][1], table[1][0])
        assert effect.p_mcnemar == pytest.approx(contingency_tables.mcnemar(table, exact=True).pvalue, abs=1e-12)
        assert effect.p_corrected == effect.p, "a family of one"
        assert [cell for cell, _ in effect.origins] == ["000000000002", "000000000001"]

    def test_item_effects_equal_plain_loops(self, empty: Store, sweep: Any) -> None:
        """The reference is a loop over plain dictionaries, for mixers, memory and window."""
        draw = np.random.default_rng(5)
        measured = {
            key: draw.normal(3, 1, 7)
            for key in product(("polar", "nope", "rope"), ("off", "on"), ("off", "on"))
            if key != ("rope", "on", "on")
        }
        clean = ("clean", "nats", 64)
        axes = ("attn_type", "memory", "window")
        cells = [(dict(zip(axes, key, strict=True)), 0, {clean: values}) for key, values in measured.items()]
        by_row = {
            (effect.axis, effect.level, effect.reference, effect.where): effect
            for effect in item_effects(empty, sweep(cells))
        }
        assert len(by_row) == 3 + 2 * 4
        for (axis, level, reference, where), effect in by_row.items():
            axis_index, mixer = axes.index(axis), where.removeprefix("attn_type=")
            pairs = [
                values - measured[partner]
                for key, values in measured.items()
                if key[axis_index] == level
                and (partner := (*key[:axis_index], reference, *key[axis_index + 1 :])) in measured
                and (not mixer or key[0] == mixer)
            ]
            d = np.mean(pairs, axis=0)
            assert (effect.pairs, effect.n, effect.mean) == (len(pairs), 7, pytest.approx(d.mean(), abs=1e-12))
            assert (effect.up, effect.down) == (int((d > 0).sum()), int((d < 0).sum()))
            assert (effect.gained, effect.lost, str(effect.p_mcnemar)) == (None, None, "nan")
            assert effect.family == f"Clean@64: {axis}"
        assert ("attn_type", "rope", "nope", "") in by_row

    def test_item_effects_cross_seeds_with_items(self, empty: Store, sweep: Any) -> None:
        """Seeds that shift all items alike say nothing about the level; pooling over seeds would be too narrow."""
        draw = np.random.default_rng(11)
        items, shifts = draw.normal(0, 0.02, 12), (-0.3, 0.05, 0.25)
        cells = [
            (
                {"memory": memory},
                seed,
                {("clean", "nats", 64): 3 + (memory == "on") * (shifts[seed] + items + draw.normal(0, 0.01, 12))},
            )
            for memory in ("off", "on")
            for seed in range(3)
        ]
        (effect,) = item_effects(empty, sweep(cells))
        assert (effect.method, effect.n, effect.seeds, effect.pairs) == ("crossed", 12, 3, 1)
        # three seeds of standard deviation s: t with two degrees of freedom and s / sqrt(3), as good as
        half = 4.302652729911 * np.std([np.mean(shifts) - s for s in shifts], ddof=1) / np.sqrt(3)
        assert effect.high - effect.low == pytest.approx(2 * half, rel=0.05)
        assert effect.p > 0.5

    def test_item_effects_use_common_items(self, empty: Store, sweep: Any, hits: np.ndarray) -> None:
        data = sweep([({"memory": "off"}, 0, by_trial(hits[0])), ({"memory": "on"}, 0, by_trial(hits[1][:3]))])
        (effect,) = item_effects(empty, data)
        assert (effect.n, effect.mean) == (3, pytest.approx((hits[1][:3] - hits[0][:3]).mean()))
        assert effect.method == "t"

    def test_item_effects_leave_out_unmatched_seeds(self, empty: Store, sweep: Any, hits: np.ndarray) -> None:
        cells = [({"memory": "on"}, seed, by_trial(hits[seed])) for seed in range(3)]
        cells += [({"memory": "off"}, seed, by_trial(hits[3 + seed])) for seed in range(2)]
        (effect,) = item_effects(empty, sweep(cells))
        d = (hits[:2] - hits[3:5]).mean((0, 2))
        assert (effect.n, effect.seeds, effect.mean) == (4, 2, pytest.approx(d.mean()))

    def test_levels_without_common_seed_have_no_row(self, empty: Store, sweep: Any, hits: np.ndarray) -> None:
        cells = [({"memory": "on"}, 0, by_trial(hits[0])), ({"memory": "off"}, 1, by_trial(hits[4]))]
        assert item_effects(empty, sweep(cells)) == []


class TestMcNemar:
    @pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 1), (3, 3), (0, 9), (16, 0), (10, 4)])
    def test_mcnemar_of_a_single_pair_equals_statsmodels(self, gained: int, lost: int) -> None:
        net = np.array([1] * gained + [-1] * lost + [0] * 3)
        table = [[4, gained], [lost, 2]]
        assert mcnemar(net) == pytest.approx(contingency_tables.mcnemar(table, exact=True).pvalue, abs=1e-12)

    @pytest.mark.parametrize("net", [[3, -1, 2, 0, 5], [4], [-2, -2, -2, 1], [7, 7, -7, 1, 1, 1, 1, -3, 2]])
    def test_mcnemar_of_several_pairs_by_enumeration(self, net: list[int]) -> None:
        sums = [sum(s * n for s, n in zip(turn, net, strict=True)) for turn in product((-1, 1), repeat=len(net))]
        assert mcnemar(np.array(net)) == pytest.approx(np.mean([abs(s) >= abs(sum(net)) for s in sums]), abs=1e-12)


class TestTable:
    def test_table_prints_item_effects(self, empty: Store, sweep: Any, hits: np.ndarray) -> None:
        sweep([({"memory": "off"}, 0, by_trial(hits[0])), ({"memory": "on"}, 0, by_trial(hits[1]))])
        table = make_table("items", empty, "own")
        (row,) = table.rows
        gained = int((hits[1].all(1) & ~hits[0].all(1)).sum())
        assert row[:6] == ("Ndl@64", "memory", "on - off", "all", "4", "1")
        assert row[6].lstrip("+-") == f"{abs(100 * (hits[1] - hits[0]).mean()):.1f}"
        assert row[11] == str(gained)
        assert "chance level 10 %" in " ".join(table.notes)
        assert "other items like these" in " ".join(table.notes)

    def test_printed_sweeps_have_no_items(self, published: Store) -> None:
        table = make_table("items", published, "printed-v2")
        assert table.rows == ()
        assert "printed numbers have none" in table.notes[-1]

    @pytest.mark.parametrize(
        "cells",
        [
            [({}, 0, by_trial(np.ones((4, 5))))],
            [({"memory": m}, 0, None) for m in ("off", "on")],
            [({"memory": m}, 0, by_trial(np.ones((4, 5)))) for m in ("off", "on")],
            [({"memory": m}, 0, by_trial(np.ones((1, 5)))) for m in ("off", "on")],
            [({"memory": m}, s, by_trial(np.full((3, 5), s == 1))) for m, s in (("off", 0), ("on", 0), ("on", 1), ("off", 2))],
            [({"memory": m}, 0, by_trial(np.full((3, 5), np.nan))) for m in ("off", "on")],
        ],
        ids=["one cell", "not measured", "constant", "one item", "seeds missing", "items without values"],
    )  # fmt: skip
    def test_table_items_with_hostile_input(self, empty: Store, sweep: Any, cells: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sweep(cells)
            table = make_table("items", empty, "own")
        assert table.rows or "No items are stored" in table.notes[-1]
