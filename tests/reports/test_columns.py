"""The columns of probes that the package does not know, from what stands beside their numbers."""

from __future__ import annotations

from typing import Any

from atma_sweep.reports.columns import complete_columns
from atma_sweep.reports.data import SweepData
from atma_sweep.results.store.records import Value

LIGHT = {"heading": "Glow", "better": "higher", "decimals": 1, "words": "Light."}


def sweep(*values: Value) -> SweepData:
    measured = {(v.cell_id, v.probe, v.metric, v.length): v for v in values}
    return SweepData(sweep="s", revision=1, cells=(), values=measured, references={})


def value(
    metric: str = "light", length: int = 0, *, probe: str = "glow", cell: str = "a", attempt: int = 1, **more: Any
) -> Value:
    about: dict[str, Any] = {"unit": "lux", "value": 1.0, "description": LIGHT} | more
    return Value(probe=probe, metric=metric, length=length, cell_id=cell, attempt_id=attempt, **about)


def headings(data: SweepData) -> list[str]:
    return [column.heading for column in complete_columns(data)][7:]


def test_a_heading_makes_a_column_before_mfu() -> None:
    assert headings(sweep()) == ["MFU"]
    data = sweep(value(), value("heat", description={"words": "Heat."}))
    assert headings(data) == ["Glow", "MFU"]
    column = complete_columns(data)[7]
    assert (column.direction, column.decimals, column.percent, column.unit) == (1, 1, False, "lux")


def test_over_lengths_it_stands_at_the_shortest_and_the_longest() -> None:
    assert headings(sweep(*(value(length=length) for length in (64, 2048, 128)))) == ["Glow@64", "Glow@2K", "MFU"]


def test_a_heading_that_is_taken_becomes_the_metric_s_full_name() -> None:
    loss = value("loss", probe="mine", description={"heading": "Val"})
    data = sweep(value(), loss, value("light", probe="other"))
    assert headings(data) == ["Glow", "mine.loss", "other.light", "MFU"]


def test_a_number_without_a_description_makes_no_column_and_has_no_direction() -> None:
    data = sweep(value("nats", description=None))
    assert headings(data) == ["MFU"]
    assert data.metric("glow", "nats").direction == 0
    assert data.metric("glow", "nats").unit == "lux"


def test_the_newest_description_counts_and_a_chance_that_differs_is_not_told() -> None:
    old = value(description=LIGHT | {"chance": 0.25, "words": "Old."})
    new = value(cell="b", attempt=2, description=LIGHT | {"chance": 0.25, "words": "New."})
    assert (
        sweep(new, old).metric("glow", "light").definition == "New. More is better. A trivial answer scores 0.25 lux."
    )
    other = value(cell="c", attempt=3, description=LIGHT | {"chance": 0.5})
    assert sweep(new, old, other).metric("glow", "light").chance is None


def test_a_probe_of_the_package_that_was_asked_for_beside_the_usual_ones_has_its_columns() -> None:
    flips = [
        Value(probe="flipflop", metric=f"{kind}_dense", length=0, cell_id="a", attempt_id=1, unit="fraction", value=0.5)
        for kind in ("exact", "error")
    ]
    assert headings(sweep(value(), *flips)) == ["FF dense", "Glow", "MFU"]
    assert complete_columns(sweep(*flips))[7].percent
