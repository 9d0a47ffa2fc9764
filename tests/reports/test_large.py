"""Work that must not grow with the number of columns, families or cells: counted, since no test measures time."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports import table_builder
from atma_sweep.reports.dashboard.page import build_blocks
from atma_sweep.reports.result_columns import all_lengths, complete_columns
from atma_sweep.reports.stats.noise import best_probability
from atma_sweep.reports.stats.significance import paired_tests, sign_flip_test
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.results.store.store import Store, open_store
from sqlalchemy import event
from sweeps import table6
from synthetic import synthetic_sweep

SIZES = (12, 96)


@pytest.fixture(scope="module")
def stores(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Store]:
    """Sweeps of two seeds per configuration, by their number of cells."""
    folder = tmp_path_factory.mktemp("large")
    opened = {}
    for size in SIZES:
        opened[size] = open_store(shutil.copy(blank, folder / f"{size}.db"))
        synthetic_sweep(opened[size], size, 5, seeds=2)
    return opened


class CountedValues(dict[Any, Any]):
    """A mapping that counts its complete reads."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return super().__iter__()


def test_all_columns_read_the_values_once(stores: dict[int, Store]) -> None:
    data = load_sweep_data(stores[SIZES[0]])
    counted = CountedValues(data.values)
    object.__setattr__(data, "values", counted)
    for _ in range(10):
        complete_columns(data)
        complete_columns(data, over=all_lengths)
        data.requested_lengths()
    assert counted.reads == 1


def statements(store: Store, work: Any) -> list[str]:
    """Return the SQL statements of `work` without parameters, and without the reads of single curves."""
    texts: list[str] = []

    def listen(*arguments: Any) -> None:
        texts.append(arguments[2])

    event.listen(store.engine, "before_cursor_execute", listen)
    work(store)
    event.remove(store.engine, "before_cursor_execute", listen)
    return [re.sub(r"IN \([?, ]+\)", "IN (?)", text) for text in texts if "FROM curve_point" not in text]


@pytest.mark.thorough
@pytest.mark.parametrize("work", [build_blocks, table6], ids=["dashboard", "table 6"])
def test_statements_do_not_grow_with_the_cells(stores: dict[int, Store], work: Any) -> None:
    small, large = (statements(stores[size], work) for size in SIZES)
    assert small
    assert Counter(small) == Counter(large)


def test_dashboard_reads_provenances_once(stores: dict[int, Store]) -> None:
    """Each provenance holds a full config, so repeated reads would dominate a large page."""
    texts = [text for text in statements(stores[SIZES[0]], build_blocks) if "provenance.packages" in text]
    assert len(texts) == 1


def test_dashboard_makes_no_json_of_effects(stores: dict[int, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the table of failures is made into JSON, since the page shows tracebacks."""
    numbers: list[str] = []
    make = table_builder._json_rows

    def counted(trace: Any, *rest: Any) -> Any:
        numbers.append(trace["table"])
        return make(trace, *rest)

    monkeypatch.setattr(table_builder, "_json_rows", counted)
    monkeypatch.setattr(table_builder, "_trace", lambda *_: pytest.fail("a trace was made"))
    build_blocks(stores[SIZES[0]])
    assert numbers == ["failures"]


def test_rows_without_chances_are_the_same(stores: dict[int, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores[SIZES[1]]
    complete = table6(store, seeds=True)
    monkeypatch.setattr(best_probability, "_simulated_values", lambda *_: pytest.fail("numbers were drawn"))
    plain = table6(store, seeds=True, has_chances=False)
    assert (plain.rows, plain.best) == (complete.rows, complete.best)
    assert complete.best


def test_first_page_reuses_draws_of_table_6(stores: dict[int, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    best_probability._simulated_p_best.cache_clear()
    drawn = []
    draws = best_probability._simulated_values

    def counted(rivals: Any, *rest: Any) -> Any:
        drawn.append(tuple(rivals))
        return draws(rivals, *rest)

    monkeypatch.setattr(best_probability, "_simulated_values", counted)
    build_blocks(stores[SIZES[0]])
    assert drawn
    assert len(drawn) == len(set(drawn))


def test_families_of_equal_size_share_random_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(5)
    families = []
    for size, tests in ((20, 3), (24, 2), (20, 4), (9, 2)):
        samples = [draw.normal(0.3, 1, size) for _ in range(tests)]
        families.append((samples, [range(size)] * tests, [0.0] * tests))
    alone = [paired_tests.max_t_of_families([family])[0] for family in families]
    sizes: list[int] = []

    def counted(n: int, work: Any) -> list[Any]:
        sizes.append(n)
        return sign_flip_test.map_sign_blocks(n, work)

    monkeypatch.setattr(paired_tests, "map_sign_blocks", counted)
    assert paired_tests.max_t_of_families(families) == alone
    assert sizes == [20, 24]  # nine are few enough to count every flip


def test_random_signs_equal_their_bits() -> None:
    """The reference unpacks the bits of ten differences one by one."""
    chunk = next(sign_flip_test.random_sign_blocks(10))
    raw = np.random.default_rng((sign_flip_test.RANDOM_SEED, 10)).bytes(sign_flip_test.SIGN_BLOCK * 2)
    bits = [
        [raw[2 * row + column // 8] >> (7 - column % 8) & 1 for column in range(10)]
        for row in range(sign_flip_test.SIGN_BLOCK)
    ]
    assert chunk.dtype == float
    assert chunk.tolist() == [[-1.0 if bit else 1.0 for bit in row] for row in bits]


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("n", [9, 40, 1001])
def test_parts_of_random_signs_are_their_blocks(n: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts come in order whatever the number of threads, and together they are the blocks."""
    monkeypatch.setattr(sign_flip_test, "usable_cores", lambda: cores)
    parts = sign_flip_test.map_sign_blocks(n, lambda start, signs: (start, signs.astype(np.int8)))
    expected = np.concatenate([block.astype(np.int8) for block in sign_flip_test.random_sign_blocks(n)])
    assert [start for start, _ in parts] == [0, *np.cumsum([len(signs) for _, signs in parts])[:-1]]
    assert max(signs.size for _, signs in parts) <= sign_flip_test.MAX_PART_SIGNS
    assert np.array_equal(np.concatenate([signs for _, signs in parts]), expected)


@pytest.mark.parametrize(("method", "n"), [(sign_flip_test._sampled_test, 40), (sign_flip_test._enumerated_test, 8)])
def test_interval_ends_hold_no_view_of_draws(method: Any, n: int) -> None:
    """A view into all draws keeps ten megabytes for each of 64 samples."""
    _, low, high = method(np.random.default_rng(1).normal(size=(n, 3)))
    assert low.base is None
    assert high.base is None


def test_p_best_is_the_share_of_draws_won() -> None:
    """By definition the winners of a draw share one win."""
    rivals = [
        best_probability.Candidate(1.0, 0.5),
        best_probability.Candidate(1.2, 0.5, 6.0, ("a",)),
        best_probability.Candidate(5.0, 9.0, share=True),
    ]
    rivals.append(rivals[2])  # both are clipped at 1, so that draws tie
    shares = np.zeros(4)
    count = 0
    for drawn in best_probability._simulated_values(rivals):
        for row in drawn:
            winners = row == row.max()
            shares += winners / winners.sum()
            count += 1
    assert best_probability.simulate_p_best(rivals, 1) == pytest.approx(shares / count, abs=1e-12)
