"""Published logs in the sweeps, compared with the logs' own figures and with the paper's tables."""

import csv
import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from atma_sweep.results import paper
from atma_sweep.results.names import PUBLISHED
from atma_sweep.results.paper import published_sweeps
from atma_sweep.results.store.records import AXES, Provenance
from atma_sweep.results.store.store import Store
from optional_data import optional_data

STEPS = [*range(0, 1876, 125), 1900]
CELLS = {"printed-v1": 100, "printed-v2": 120}
Levels = tuple[str, ...]


@pytest.fixture(scope="module")
def published() -> Store:
    return paper.open_published()


@pytest.fixture(scope="module", params=list(CELLS))
def sweep(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cells(published: Store, sweep: str) -> dict[str, Levels]:
    """By cell, its levels."""
    return {cell.cell_id: tuple(cell.levels[axis] for axis in AXES) for cell in published.cell_states(sweep)}


@pytest.fixture(scope="module")
def numbers(published: Store, sweep: str, cells: dict[str, Levels]) -> dict[tuple[Levels, str, str, int], float]:
    """By (levels, probe, metric, length): the number."""
    values = {(cells[v.cell_id], v.probe, v.metric, v.length): v.value for v in published.values(sweep)}
    return {key: value for key, value in values.items() if value is not None}


def logged(name: str) -> Iterator[tuple[Levels, dict[str, str]]]:
    with optional_data(f"paper/{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield tuple(row[axis] for axis in AXES), row


def single(number: str | float | None) -> np.float32:
    assert number is not None
    return np.float32(float(number))


def points(published: Store, cell: str) -> list[tuple[int, int, float, float | None, float | None, float | None]]:
    (attempt,) = published.attempts(cell)
    assert attempt.steps_total == attempt.step == 1900
    return [(p.step, p.tokens, p.wall_s, p.train_loss, p.val_loss, p.tokens_per_s) for p in published.curve(attempt.id)]


@pytest.mark.thorough
def test_curves_are_those_of_the_logs(published: Store, cells: dict[str, Levels]) -> None:
    rows = {(levels, int(row["step"])): row for levels, row in logged("logged-curves")}
    assert len(rows) == 2040
    for cell, levels in cells.items():
        curve = points(published, cell)
        assert [point[0] for point in curve] == STEPS
        for step, tokens, wall_s, train, val, speed in curve:
            row = rows[levels, step]
            assert (tokens, wall_s, train) == (step * 524_288, float(row["wall_s"]), None)
            assert single(val) == single(row["val_loss"])
            assert (speed or 0.0) == float(row["tokens_per_s"])


def test_numbers_of_a_run_are_those_of_the_logs(
    published: Store, cells: dict[str, Levels], numbers: dict[tuple[Levels, str, str, int], float]
) -> None:
    rows = dict(logged("logged-extra"))
    for levels in cells.values():
        row = rows[levels]
        for length in (2048, 4096, 8192, 16384, 32768, 65536):
            assert single(numbers[levels, "needle", "nats", length]) == single(row[f"needle_nats_{length}"])
        assert single(numbers[levels, "needle", "absent_nats", 2048]) == single(row["needle_absent_nats"])
        assert numbers[levels, "throughput", "train_seconds", 0] == float(row["train_seconds"])
        assert numbers[levels, "throughput", "mfu_paper", 0] == pytest.approx(float(row["mfu_percent"]) / 100, abs=1e-9)
        assert numbers[levels, "throughput", "parameters", 0] == int(row["parameters"])
        assert int(row["parameters"]) == paper.PARAMETERS[levels[0], levels[3]]
    attempts = [published.attempts(cell)[-1].id for cell in cells]
    provenances: dict[int, Provenance] = published.provenances(attempts)
    releases = {levels: row["torch"] for levels, row in rows.items()}
    for cell, attempt in zip(cells, attempts, strict=True):
        assert provenances[attempt].packages == {"torch": releases[cells[cell]]}
        assert provenances[attempt].host == "paper"


def test_every_cell_has_all_of_it(
    published: Store, sweep: str, cells: dict[str, Levels], numbers: dict[tuple[Levels, str, str, int], float]
) -> None:
    assert len(cells) == CELLS[sweep]
    counted = [(key[1], key[2]) for key in numbers if not key[1].startswith("table-")]
    assert {key: counted.count(key) / len(cells) for key in set(counted) if key[1] != "step_seconds"} == {
        ("val", "val_loss"): 1, ("clean", "nats"): 6, ("junk", "nats"): 6, ("needle", "digit_accuracy"): 6, ("needle", "nats"): 6,
        ("needle", "absent_nats"): 1, ("throughput", "mfu_paper"): 1, ("throughput", "train_seconds"): 1,
        ("throughput", "parameters"): 1,
    }  # fmt: skip
    assert sum(len(points(published, cell)) for cell in cells) == 17 * len(cells)


def test_what_is_printed_is_the_log_rounded(
    published: Store, cells: dict[str, Levels], numbers: dict[tuple[Levels, str, str, int], float]
) -> None:
    """Three decimals of the last validation loss, one of the MFU in percent; the curve ends with the training."""
    for cell, levels in cells.items():
        last = points(published, cell)[-1]
        assert numbers[levels, "val", "val_loss", 0] == numbers[levels, "table-6", "val.val_loss", 0]
        assert last[4] == pytest.approx(numbers[levels, "val", "val_loss", 0], abs=0.0005 + 1e-9)
        assert last[2] == numbers[levels, "throughput", "train_seconds", 0]
        printed = numbers[levels, "table-6", "throughput.mfu_paper", 0]
        assert numbers[levels, "throughput", "mfu_paper", 0] == pytest.approx(printed, abs=0.0005 + 1e-9)


def test_a_curve_agrees_with_itself(published: Store, cells: dict[str, Levels]) -> None:
    """The speed at a point is that since the point before; the time grows; an untrained model is as good as guessing."""
    for cell in cells:
        curve = points(published, cell)
        assert curve[0][:4] == (0, 0, 0.0, None)
        assert curve[0][4] == pytest.approx(np.log(50304), abs=1e-4)
        assert curve[0][5] is None
        for before, after in pairwise(curve):
            speed = (after[1] - before[1]) / (after[2] - before[2])
            assert after[5] == pytest.approx(speed, abs=0.07)


def test_both_versions_say_the_same_of_a_cell(published: Store) -> None:
    def values_of(sweep: str) -> dict[tuple[str, str, str, int], float | None]:
        slugs = {cell.cell_id: cell.slug for cell in published.cell_states(sweep)}
        return {
            (slugs[v.cell_id], v.probe, v.metric, v.length): v.value
            for v in published.values(sweep)
            if not v.probe.startswith("table-") and v.metric != "step_seconds"
        }

    first, second = values_of("printed-v1"), values_of("printed-v2")
    assert first == {key: second[key] for key in first}
    assert len(first) == 100 * 29


def test_complete_table_rounds_binary_numbers_of_the_logs() -> None:
    """So an MFU of 41.55 is printed as 41.5; docs/explanation/recipes.md says so."""
    runs = {tuple(row[axis] for axis in AXES): row for row in paper.rows("runs")}
    last = {tuple(row[axis] for axis in AXES): row for row in paper.rows("curves")}
    printed = {tuple(row[axis] for axis in AXES): row for row in paper.rows("complete-v2")}
    assert {key: (row["val_loss"], row["mfu"]) for key, row in printed.items()} == {
        key: (f"{float(last[key]['val_loss']):.3f}", f"{float(runs[key]['mfu']):.1f}") for key in runs
    }


def test_a_change_of_the_numbers_is_another_edition() -> None:
    """Databases that hold older numbers are known by it: where this fails, raise the edition and write both down here."""
    digests = [
        (sheet.name, sheet.cells, sheet.values, sheet.curves, sheet.torch)
        for sheet in map(published_sweeps.published_sweep, PUBLISHED)
    ]

    def digest(value: object) -> str:
        # a note is what somebody says of a cell of theirs
        return hashlib.sha256(repr(value).replace(", note=None", "").encode()).hexdigest()[:16]

    assert (published_sweeps.EDITION, digest(digests[:3])) == (2, "dbb0622e8acceaa5")
    editions = [published_sweeps.options_of(name)["edition"] for name in PUBLISHED[3:]]
    assert list(zip(editions, map(digest, digests[3:]), strict=True)) == [
        (2, "1a0833bbd09b09e9"), (2, "e2ff4285f2a09e28"), (3, "ede4efd885a5ec81"),
    ]  # fmt: skip
