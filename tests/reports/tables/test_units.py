"""Units of the numbers behind the tables: of a square, a ratio and a number without a unit, against those of the metrics."""

import csv
import io

import pytest
from atma_sweep.reports.number_format import squared
from atma_sweep.reports.render import render
from atma_sweep.reports.tables import make_table
from atma_sweep.results.metrics import METRICS
from atma_sweep.results.store.store import Store

BARE = {
    "p",
    "p corr",
    "p het",
    "p perm",
    "p Box",
    "p equiv",
    "I2",
    "F",
    "Omega sq",
    "Partial eta sq",
    "Deviance",
    "Odds ratio",
}
RATIOS = ("longest/shortest",)
TABLES = [
    ("printed-v2", name)
    for name in ("4", "6", "effects", "interactions", "power", "anova", "needle-model", "pareto", "compare")
]
TABLES += [("printed-tra", "flipflop"), ("printed-tra", "extrapolation"), ("printed-wall", "downstream")]


@pytest.mark.parametrize(
    ("unit", "square"), [("nats/token", "(nats/token)²"), ("fraction", "fraction²"), ("1", "1"), ("", "")]
)
def test_squared_units(unit: str, square: str) -> None:
    assert squared(unit) == square


@pytest.mark.thorough
@pytest.mark.parametrize(("sweep", "name"), TABLES)
def test_every_number_of_a_table_has_its_unit(published: Store, sweep: str, name: str) -> None:
    table = make_table(name, published, sweep)
    for row in table.entries:
        for entry in row:
            base = entry.heading.removesuffix(" 95% seeds").removesuffix(" 95% sequences")
            if base in BARE or base.startswith("P(front)") or base in RATIOS:
                assert entry.unit == "1", entry.heading
            elif entry.value is not None and (metric := METRICS.get((entry.probe, entry.metric))) is not None:
                assert entry.unit == metric.unit, (entry.heading, entry.metric)


@pytest.mark.thorough
def test_sums_of_squares_are_in_squared_units(published: Store) -> None:
    table = make_table("anova", published, "printed-v2")
    lines = list(csv.DictReader(io.StringIO(render(table, "csv"))))
    units = {"Val": "(nats/token)²", "Clean@64K": "(nats/token)²", "Ndl@64K": "fraction²", "MFU": "fraction²"}
    assert {line["Measure"]: line["Sum sq in"] for line in lines}.items() >= units.items()
    for line, row in zip(lines, table.entries, strict=True):
        by_heading = {entry.heading: entry.unit for entry in row}
        assert by_heading["Sum sq"] == line["Sum sq in"]
        assert {by_heading[name] for name in by_heading if name != "Sum sq"} == {"1"}
