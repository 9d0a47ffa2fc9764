"""Reports show the context lengths that the grid asks for; a further one stands in them only where it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.check import check_file
from atma_sweep.reports.dashboard.page import dashboard
from atma_sweep.reports.figures import FIGURES, make_figure
from atma_sweep.reports.figures.files import rendered
from atma_sweep.reports.render import render
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store
from ordinary import TABLES

REQUESTED = [[probe, length] for probe in ("clean", "junk", "needle") for length in (128, 256)]
STRANGER, MEASURED = 999_999_999, 512


@pytest.fixture
def record_evaluation() -> Callable[..., None]:
    """Return a function that records an evaluation of a cell, by other code and on another GPU."""

    def record(store: Store, cell: str, measured: list[Measurement]) -> None:
        attempt = store.start_attempt(cell, owner=Owner(name="ada", host="there", pid=1, started=0.0), fence=1, kind="evaluate")  # fmt: skip
        recorder = DatabaseRecorder(store, attempt.id, 1)
        recorder.provenance(Provenance(config={}, seed=0, git_commit=cell * 3, gpu_name="NVIDIA H200"))
        recorder.measurements(measured)
        store.finish_attempt(attempt.id, 1, "done")

    return record


def values(length: int, value: float | None) -> list[Measurement]:
    reason = None if value is not None else "too-few-docs: 0 of 2 held-out documents have that"
    return [
        Measurement(probe=probe, metric=metric, length=length, value=value, reason=reason, unit=unit, n=10)
        for probe, metric, unit in (
            ("clean", "nats", "nats"),
            ("junk", "nats", "nats"),
            ("needle", "digit_accuracy", "1"),
        )
    ]


@pytest.fixture
def lengths(empty: Store, make: tuple[Callable[..., Any], Any], run: Callable[..., None]) -> Store:
    """Return a store with two finished cells, the first of which was also measured at further lengths."""
    cell, _ = make
    cells = [cell(0, memory="off"), cell(1, memory="off", attn_type="nope")]
    empty.record_revision("s", grid_text="x", grid_file="x", options={"requested": REQUESTED}, cells=cells)
    for index, record in enumerate(cells):
        more = [*values(MEASURED, 0.75), *values(STRANGER, None)] if index == 0 else []
        run(empty, record.id, "done", [*values(128, 0.5), *values(256, 0.25 + index), *more])
    return empty


@pytest.mark.thorough
def test_tables_show_requested_lengths_only(lengths: Store) -> None:
    for name in TABLES:
        if name == "compare":
            continue  # holds only what the published sweep has too
        text = render(make_table(name, lengths, "s"), "csv", trace=False)
        assert "1000M" not in text, name
        assert str(STRANGER) not in text, name
        assert "512" not in text.replace("a state of 512 KB", "").replace("A state of 512 KB", ""), name
        if name in ("1", "2", "3", "open-weight"):
            assert "needs-eval" not in text, name
    rows = {row[0]: row for row in make_table("1", lengths, "s").rows}
    assert list(rows) == ["128", "256"]
    open_weight = make_table("open-weight", lengths, "s")
    average = dict(zip(open_weight.columns, open_weight.rows[-2], strict=True))
    # (128 * 0.5 + 256 * 0.25) / 384 / ln 2
    assert average["Clean WAvg"] == "0.48"


def test_figures_show_requested_lengths_only(lengths: Store) -> None:
    for name in ("needle", "length"):
        rows = make_figure(name, lengths, "s").as_json()["rows"]
        assert {row["length"] for row in rows} == {128, 256}
    assert "Ndl@256" in {row[0] for row in make_table("effects", lengths, "s").rows}
    assert str(MEASURED) not in json.dumps(load_sweep_data(lengths, "s").requested_lengths())


@pytest.mark.thorough
def test_extra_length_is_unmeasured_where_missing(lengths: Store) -> None:
    table = make_table("1", lengths, "s", lengths=[MEASURED])
    assert [row[0] for row in table.rows] == ["128", "256", "512"]
    assert set(table.rows[2][1:]) == {"unmeasured", "0.75", "75"}
    assert "unmeasured: not requested by the grid; evaluate measures it, and report --length shows it." in table.notes
    assert make_table("6", lengths, "s", lengths=[MEASURED]).columns[6:8] == ("Clean@128", "Clean@512")
    all_lengths = make_table("1", lengths, "s", lengths="all")
    assert [row[0] for row in all_lengths.rows] == ["128", "256", "512", str(STRANGER)]
    assert "too-few-docs" in all_lengths.rows[3]
    frame = make_figure("needle", lengths, "s", lengths=[MEASURED]).frame
    assert set(frame["length"]) == {128, 256, 512}
    for name in [name for name, line in TABLES.items() if "lengths" in line.takes and name != "compare"]:
        assert make_table(name, lengths, "s", lengths=[MEASURED]).trace["options"]["lengths"] == [MEASURED], name
    assert len(dashboard(lengths, "s", lengths=[MEASURED])) != len(dashboard(lengths, "s"))


def glow(value: float) -> Measurement:
    """Return a measurement of a probe that only a plugin has."""
    metric = {"heading": "Glow", "better": "higher"}
    return Measurement(probe="glow", metric="light", length=64, value=value, unit="lux", n=1, description=metric)


def beyond(index: int) -> list[Measurement]:
    """Return measurements that an evaluation may add: another length, and probes that the grid does not request."""
    tail = [Measurement(probe="same_tail", metric="nats", length=n, value=2.5 - index, unit="nats/token", n=9) for n in (128, 256)]  # fmt: skip
    val = [Measurement(probe="val", metric="val_loss", value=3.5 - index, unit="nats/token", n=9)]
    return [*values(MEASURED, 0.75), *tail, *val, glow(96.0 + index)]


def shown(store: Store, name: str, **more: Any) -> str:
    return render(make_table(name, store, "s", **more), "json") + render(make_table(name, store, "s", **more), "md")


@pytest.mark.thorough
def test_extra_evaluation_changes_no_byte_of_any_table(
    lengths: Store, record_evaluation: Callable[..., None], tmp_path: Path
) -> None:
    """Not even what stands above and below it: other code measured what is not shown. But for tables that count attempts."""
    names = [name for name in TABLES if name not in ("failures", "budget", "compare")]
    before = {name: shown(lengths, name) for name in names}
    pictures = {name: make_figure(name, lengths, "s").as_json() for name in ("needle", "length")}
    for index in range(2):
        record_evaluation(lengths, f"{index:012x}", beyond(index))
    assert [name for name in names if shown(lengths, name) != before[name]] == []
    assert [name for name, expected in pictures.items() if make_figure(name, lengths, "s").as_json() != expected] == []
    all_lengths = make_table("6", lengths, "s", lengths="all")
    assert {f"Clean@{STRANGER}", "Tail@128", "Tail@256", "Glow@64"} <= set(all_lengths.columns)
    row = dict(zip(all_lengths.columns, all_lengths.rows[1], strict=True))
    assert (row["Val"], row["Tail@256"], row["Glow@64"]) == ("2.500", "1.500", "97.000")
    assert any("code differs" in line for line in all_lengths.above)
    assert set(make_figure("length", lengths, "s", lengths="all").frame["probe"]) == {"clean", "junk", "same_tail"}
    file = tmp_path / "whole.md"
    file.write_text(render(all_lengths, "md"))
    assert check_file(file, lengths) == []
    assert "Clean@512" in make_table("6", lengths, "s", lengths=[MEASURED]).columns


@pytest.mark.thorough
def test_what_was_written_on_request_is_checked_with_it(lengths: Store, tmp_path: Path) -> None:
    for name, written in (
        ("t.md", render(make_table("1", lengths, "s", lengths="all"), "md").encode()),
        ("f.svg", rendered(make_figure("needle", lengths, "s", lengths=[MEASURED]))),
    ):
        file = tmp_path / name
        file.write_bytes(written)
        assert check_file(file, lengths) == []


def test_unrequested_probe_shows_measured_lengths(lengths: Store, run: Callable[..., None]) -> None:
    norms = [Measurement(probe="state_norm", metric="delta_norm", length=64, value=1.0)]
    run(lengths, f"{0:012x}", "done", norms)
    assert set(make_figure("state-norm", lengths, "s").frame["length"]) == {64}


@pytest.mark.thorough
def test_lengths_without_numbers_are_refused(lengths: Store) -> None:
    with pytest.raises(
        ReportError, match=r"--length 4096: no cell of sweep s is measured there; .*: 128, 256, 512, 999999999"
    ):
        make_table("6", lengths, "s", lengths=[4096])
    for name in [name for name, line in TABLES.items() if "lengths" not in line.takes]:
        with pytest.raises(ReportError, match="remove --length"):
            make_table(name, lengths, "s", lengths=[MEASURED])
    for name in ("loss", "timeline", "count-map"):
        assert name in FIGURES
        with pytest.raises(ReportError, match="remove --length"):
            make_figure(name, lengths, "s", lengths=[MEASURED])
