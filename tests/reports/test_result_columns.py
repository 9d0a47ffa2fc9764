"""The columns of probes that the package does not know, from what stands beside their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atma_sweep.reports.result_columns import complete_columns
from atma_sweep.reports.sweep_data import SweepData
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.records import MeasuredValue, Measurement
from atma_sweep.results.store.store import Store

LIGHT = {"heading": "Glow", "better": "higher", "decimals": 1, "words": "Light."}


def sweep(*values: MeasuredValue) -> SweepData:
    measured = {(v.cell_id, v.probe, v.metric, v.length): v for v in values}
    return SweepData(sweep="s", revision=1, cells=(), values=measured, references={})


def value(
    metric: str = "light", length: int = 0, *, probe: str = "glow", cell: str = "a", attempt: int = 1, **more: Any
) -> MeasuredValue:
    fields: dict[str, Any] = {"unit": "lux", "value": 1.0, "description": LIGHT} | more
    return MeasuredValue(probe=probe, metric=metric, length=length, cell_id=cell, attempt_id=attempt, **fields)


def headings(data: SweepData) -> list[str]:
    return [column.heading for column in complete_columns(data)][7:]


def test_metric_with_heading_has_a_column_before_mfu() -> None:
    assert headings(sweep()) == ["MFU"]
    data = sweep(value(), value("heat", description={"words": "Heat."}))
    assert headings(data) == ["Glow", "MFU"]
    column = complete_columns(data)[7]
    assert (column.direction, column.decimals, column.percent, column.unit) == (1, 1, False, "lux")


def test_metric_with_lengths_has_two_columns() -> None:
    assert headings(sweep(*(value(length=length) for length in (64, 2048, 128)))) == ["Glow@64", "Glow@2K", "MFU"]


def test_duplicate_heading_becomes_the_full_name() -> None:
    loss = value("loss", probe="mine", description={"heading": "Val"})
    data = sweep(value(), loss, value("light", probe="other"))
    assert headings(data) == ["Glow", "mine.loss", "other.light", "MFU"]


def test_undescribed_metric_has_no_column() -> None:
    data = sweep(value("nats", description=None))
    assert headings(data) == ["MFU"]
    assert data.metric("glow", "nats").direction == 0
    assert data.metric("glow", "nats").unit == "lux"


def test_newest_description_is_used() -> None:
    old = value(description=LIGHT | {"chance": 0.25, "words": "Old."})
    new = value(cell="b", attempt=2, description=LIGHT | {"chance": 0.25, "words": "New."})
    assert sweep(new, old).metric("glow", "light").definition == (
        "New. More is better. Score of a trivial answer: 0.25 lux."
    )
    newer_value = value(cell="c", attempt=3, description=LIGHT | {"chance": 0.5})
    assert sweep(new, old, newer_value).metric("glow", "light").chance is None


def test_requested_package_probe_has_columns() -> None:
    flips = [
        MeasuredValue(
            probe="flipflop", metric=f"{kind}_dense", length=0, cell_id="a", attempt_id=1, unit="fraction", value=0.5
        )
        for kind in ("exact", "error")
    ]
    assert headings(sweep(value(), *flips)) == ["FF dense", "Glow", "MFU"]
    assert complete_columns(sweep(*flips))[7].percent


def test_extra_column_states_chance_and_unit(empty: Store, make: Any, run: Callable[..., None]) -> None:
    cell, _ = make
    empty.record_revision("s", grid_text="x", grid_file="x.yaml", cells=[cell(1)])
    key = Measurement(
        probe="passkey",
        metric="digit_accuracy",
        length=64,
        value=0.5,
        unit="fraction",
        n=9,
        description={"chance": 0.15},
    )
    run(
        empty,
        cell(1).id,
        "done",
        [key, Measurement(probe="extrapolation", metric="perplexity", length=64, value=30.5, unit="1")],
    )
    table = make_table("6", empty)
    assert {"Key@64", "PPL@64"} <= set(table.columns)
    notes = "\n".join(table.notes)
    assert "Score of a trivial answer: 15%." in notes
    assert "PPL: Perplexity of a text" in notes
