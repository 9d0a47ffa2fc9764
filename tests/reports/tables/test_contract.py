"""The contract of every table, of sweeps that give it much, little or nothing to say: numbers, formats, trace, and why there is nothing."""

import itertools
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import studied
from atma_sweep.reports.check import check_file
from atma_sweep.reports.render import FORMATS, RENDERERS, SUFFIXES, render, rendered_files
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import TABLES, make_table
from atma_sweep.results.console.text import csv_field
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner
from atma_sweep.results.store.store import Store, open_store
from sweeps import fill_every
from tiers import every_nth

LENGTHS = (128, 256)
REASON = re.compile(r"\bno\b|\bnot\b|\bnone\b|nothing|\b0\b|neither|needs|lack|every attempt", re.IGNORECASE)
"""What is in a note that says why there is nothing."""
TRAIN = {"loss_reduction": "sum", "seq_len": 128, "schedule": "linear", "tokens": 10, "batch_tokens": 5}


def numbers(value: float) -> list[Measurement]:
    """Return measurements of every number that tables show; the higher `value`, the worse."""
    measurements = [
        Measurement(probe="val", metric="val_loss", value=value, unit="nats/token"),
        Measurement(probe="throughput", metric="tokens_per_s", value=1000 / value),
        Measurement(probe="throughput", metric="mfu_paper", value=0.3 / value),
        Measurement(probe="throughput", metric="parameters", value=1000.0),
        Measurement(probe="throughput", metric="train_seconds", value=7.0 * value),
    ]
    for length in LENGTHS:
        share = round(40 * min(1.0, 1 / value)) / 40
        measurements += [
            Measurement(probe="clean", metric="nats", length=length, value=value + 1 / length, unit="nats/token"),
            Measurement(probe="junk", metric="nats", length=length, value=value + 2 / length, unit="nats/token"),
            Measurement(probe="needle", metric="digit_accuracy", length=length, value=share, n=40, unit="fraction"),
            Measurement(probe="needle", metric="exact_accuracy", length=length, value=share, n=8, unit="fraction"),
        ]
    return measurements


def single_cell() -> Iterator[tuple[tuple[str, ...], int, float | None]]:
    yield ("polar", "baseline", "off", "on", "off"), 0, 2.0


def no_pairs() -> Iterator[tuple[tuple[str, ...], int, float | None]]:
    yield ("polar", "baseline", "off", "on", "off"), 0, 2.0
    yield ("nope", "weak", "on", "off", "on"), 1, 2.5


def factorial(seeds: int = 1) -> Iterator[tuple[tuple[str, ...], int]]:
    for mixer, mode, memory in itertools.product(("polar", "nope"), ("baseline", "weak"), ("off", "on")):
        for seed in range(seeds):
            yield (mixer, mode, "off", memory, "off"), seed


def all_diverged() -> Iterator[tuple[tuple[str, ...], int, float | None]]:
    for levels, seed in factorial():
        yield levels, seed, None


def holes() -> Iterator[tuple[tuple[str, ...], int, float | None]]:
    """Seeds that diverged here and there; one configuration lost all of them, one has one."""
    for index, (levels, seed) in enumerate(factorial(3)):
        yield levels, seed, None if index % 5 == 3 or index < 3 or index in (6, 7) else 2 + (index * 7 % 11) / 10


def constant() -> Iterator[tuple[tuple[str, ...], int, float | None]]:
    for levels, seed in factorial(2):
        yield levels, seed, 2.0


def nothing_measured() -> Iterator[tuple[tuple[str, ...], int, float | None]]:
    for levels, seed in factorial():
        yield levels, seed, math.nan


def single_seed() -> Iterator[tuple[tuple[str, ...], int, float | None]]:
    for index, (levels, seed) in enumerate(factorial()):
        yield levels, seed, 2 + (index * 5 % 8) / 10


SWEEPS = {
    "one-cell": single_cell, "no-pairs": no_pairs, "all-diverged": all_diverged, "holes": holes, "constant": constant,
    "nothing-measured": nothing_measured, "one-seed": single_seed,
}  # fmt: skip
"""By name: (levels, seed, value) of every cell, None for one that diverged and NaN for one that never began."""
CASES = [
    (name, sweep)
    for name, line in TABLES.items()
    for sweep in (["tuned"] if line.study else [*SWEEPS, "all"])
]  # fmt: skip
BORROWED = ("open-weight", "budgets", "compare")
"""Tables that show cells of a published sweep beside those of the one asked for."""


@pytest.fixture(scope="module")
def bad(blank: Path) -> Store:
    store = open_store(Path(shutil.copy(blank, blank.with_name("bad.db"))))
    owner = Owner(name="ada", host="here", pid=1, started=0.0)
    requested = {"requested": [[probe, length] for probe in ("clean", "junk", "needle") for length in LENGTHS]}
    for sweep_index, (name, listed) in enumerate(SWEEPS.items()):
        cells, values = [], []
        for index, (levels, seed, value) in enumerate(listed()):
            levels_by_axis = dict(zip(AXES, levels, strict=True))
            config = {
                "train": TRAIN | {"regularizer": levels_by_axis["reg_mode"]},
                "model": {"attn_type": levels_by_axis["attn_type"]},
            }
            slug = f"{'-'.join(levels)}-s{seed}"
            cells.append(CellRecord(id=f"{sweep_index * 100 + index + 1000:012x}", slug=slug, seed=seed, levels=levels_by_axis, config=config, axes={}, tokens=10))  # fmt: skip
            values.append(value)
        store.record_revision(name, grid_text="x", grid_file="x", cells=cells, options=requested)
        for cell, value in zip(cells, values, strict=True):
            if value is not None and math.isnan(value):
                continue
            attempt = store.start_attempt(cell.id, owner=owner, fence=1)
            if value is not None:
                DatabaseRecorder(store, attempt.id, 1).measurements(numbers(value))
            store.finish_attempt(attempt.id, 1, "diverged" if value is None else "done")
    fill_every(store)
    trials = studied.trials_at_random(studied.SEARCH, 40, ends=studied.ENDS, first_cell=9001)
    studied.record(store, "tuned", studied.SEARCH, trials)
    return store


# those of every run go through all sweeps in turn
@pytest.mark.parametrize(("name", "sweep"), every_nth(CASES, 28))
def test_a_table_keeps_its_contract(bad: Store, name: str, sweep: str, capfd: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table, again = table_or_none(bad, name, sweep), table_or_none(bad, name, sweep)
        if table is None or again is None:
            return
        texts = {format: render(table, format) for format in FORMATS}
    assert capfd.readouterr().err == ""
    assert table.number == name, "the name under which the trace finds it again"
    for row in table.rows:
        assert all(row), "nothing is left blank"
        assert not any(re.search(r"\b(nan|none|inf)\b", text, re.IGNORECASE) for text in row[1:]), row
    if not table.rows:
        assert any(REASON.search(note) for note in table.notes), table.notes
    assert all(note in " ".join(texts["terminal"].split()) for note in table.notes)
    assert {format: render(again, format) for format in FORMATS} == texts, "the same bytes every time"
    cells = {cell.cell_id for cell in bad.cell_states(sweep)}
    assert name in BORROWED or table.trace["cells"].keys() <= cells
    # the other formats escape words and pad numbers
    assert RENDERERS["json"].rows(texts["json"]) == [list(row) for row in table.rows]
    assert RENDERERS["csv"].rows(texts["csv"])[1:] == [list(map(csv_field, row)) for row in table.rows]
    for ending, format in SUFFIXES.items():
        rows = RENDERERS[format].rows(texts[format])[format != "json" :]
        assert [digits(row[table.text_columns :]) for row in rows] == [
            digits(row[table.text_columns :]) for row in table.rows
        ]
        for file, text in rendered_files(table, tmp_path / f"x{ending}", format).items():
            file.write_text(text)
        if table.rows or format != "json":
            assert check_file(tmp_path / f"x{ending}", bad) == []


def digits(row: Sequence[str]) -> list[list[str]]:
    """Return the digits of every number of a row, without the marks of a format around them."""
    return [re.findall(r"\d+(?:\.\d+)?", text) for text in row]


def table_or_none(store: Store, name: str, sweep: str) -> Table | None:
    """Return the table; None if it was refused in one line because it has nothing to show."""
    try:
        return make_table(name, store, sweep)
    except ReportError as error:
        text = str(error)
    assert name == "compare", text
    assert re.fullmatch(r"sweeps .* have no number of a common configuration; .*", text)
    return None
