"""Columns of a single context length, and counts beside means that lack some of their cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.render import render
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.records import Measurement
from atma_sweep.results.store.store import Store

Make = tuple[Callable[..., Any], Callable[..., Any]]
Run = Callable[..., None]


def at(probe: str, length: int, value: float) -> Measurement:
    metric, unit = ("digit_accuracy", "fraction") if probe == "needle" else ("nats", "nats/token")
    return Measurement(probe=probe, metric=metric, length=length, value=value, unit=unit, n=10)


def speeds(seconds: float) -> list[Measurement]:
    return [
        Measurement(probe="throughput", metric="train_seconds", value=seconds, unit="s"),
        Measurement(probe="throughput", metric="tokens_per_s", value=1000 / seconds, unit="tokens/s"),
        Measurement(probe="val", metric="val_loss", value=seconds / 10, unit="nats/token"),
    ]


@pytest.fixture
def three_seeds(empty: Store, make: Make, run: Run) -> Store:
    """Return a store with three seeds of one configuration; the last lacks length 256 and its speed."""
    cell, _ = make
    cells = [cell(index, seed=index, memory="off") for index in range(3)]
    probes = ("clean", "junk", "needle")
    requested = [["val", 0], *([probe, length] for probe in probes for length in (128, 256))]
    empty.record_revision("s", grid_text="x", grid_file="x", options={"requested": requested}, cells=cells)
    for seed, record in enumerate(cells):
        lengths = (128, 256) if seed < 2 else (128,)
        measurements = [at(probe, length, (seed + length / 64) / 10) for probe in probes for length in lengths]
        run(empty, record.id, "done", measurements + (speeds(10.0 + seed) if seed < 2 else []))
    return empty


@pytest.mark.parametrize("requested", [[], [["clean", 128], ["junk", 128], ["needle", 128]]])
def test_single_length_has_a_single_column(empty: Store, make: Make, run: Run, requested: list[list[object]]) -> None:
    cell, _ = make
    empty.record_revision("s", grid_text="x", grid_file="x", options={"requested": requested}, cells=[cell(1)])
    run(empty, cell(1).id, "done", [at(probe, 128, 0.5) for probe in ("clean", "junk", "needle")])
    table = make_table("6", empty, "s")
    assert table.columns[5:] == ("Val", "Clean@128", "Junk@128", "Ndl@128", "MFU")
    assert table.rows[0][6:9] == ("0.50", "0.50", "50.0")
    open_weight = make_table("open-weight", empty, "s")
    assert open_weight.columns[2:] == ("Clean WAvg", "Clean 128", "Junk WAvg", "Junk 128", "Ndl WAvg", "Ndl 128")
    assert any("this sweep only at 128" in note for note in open_weight.notes)
    assert make_figure("needle", empty, "s").as_json()["rows"][0]["length"] == 128


def test_table_6_counts_seeds_of_incomplete_means(three_seeds: Store) -> None:
    table = make_table("6", three_seeds, "s")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["Clean@128"] == "0.30 ± 0.10"
    assert row["Clean@256"] == "0.45 ± 0.07 (n=2)"
    assert "(n=k) where only k of them have a measurement" in render(table, "md")


@pytest.mark.thorough
def test_derived_entries_count_seeds(three_seeds: Store) -> None:
    open_weight = make_table("open-weight", three_seeds, "s")
    row = dict(zip(open_weight.columns, open_weight.rows[-1], strict=True))
    # (128 * 0.3 + 256 * 0.45) / 384 / ln 2 = 0.577
    assert row["Clean WAvg"] == "0.58 (n=2 to 3)"
    assert row["Clean 256"].endswith(" (n=2)")
    assert "(n=" not in row["Clean 128"]
    assert "Means over up to 3 seeds; (n=k) where only k of them have a measurement." in open_weight.notes
    front = make_table("pareto", three_seeds, "s")
    assert front.rows[0][6:8] == ("95 ± 6 (n=2)", "1.050 ± 0.071 (n=2)")
    assert any("(n=k)" in note for note in front.notes)


def test_step_seconds_have_deviation_and_count(three_seeds: Store) -> None:
    three_seeds.write(lambda session: session.connection().exec_driver_sql("UPDATE attempt SET steps_total = 10"))
    table = make_table("4", three_seeds, "s")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["Step s"] == "1.05 ± 0.07 (n=2)"


@pytest.mark.thorough
def test_figures_mark_incomplete_means(three_seeds: Store) -> None:
    for name in ("needle", "length"):
        figure = make_figure(name, three_seeds, "s")
        assert "Some means are over fewer cells at 256 (2 of 3)." in figure.notes
    pareto = make_figure("pareto", three_seeds, "s")
    assert "2 means are over fewer seeds than the configuration has." in pareto.notes


@pytest.mark.thorough
def test_figures_of_complete_lines_have_no_mark(published: Store) -> None:
    for name in ("needle", "length", "pareto", "interactions"):
        assert not any("fewer" in note for note in make_figure(name, published, "printed-v2").notes), name


def test_interaction_uses_common_seeds(empty: Store, make: Make, run: Run) -> None:
    cell, _ = make
    cells = [cell(i, seed=i % 2, attn_type=kind, memory=memory) for i, (kind, memory) in enumerate(
        (kind, memory) for kind in ("polar", "nope") for memory in ("off", "on") for _ in range(2))]  # fmt: skip
    empty.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    for index, record in enumerate(cells[:-1]):
        run(empty, record.id, "done", [Measurement(probe="val", metric="val_loss", value=1.0 + index)])
    (row,) = make_figure("interactions", empty, "s").as_json()["rows"]
    assert row["fours"] == 1
    # of means over whatever there is it would be (7 - 5.5) - (3.5 - 1.5) = -0.5
    assert row["mean"] == 0
