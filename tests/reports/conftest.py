"""A small sweep with every kind of cell: done, running, diverged, never started, and numbers that could not be had."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import probed as probed_data
import pytest
import studied
from atma_sweep.reports.stats import importance
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import open_published
from atma_sweep.results.store.records import CellRecord, Measurement
from atma_sweep.results.store.store import Store, open_store
from optional_data import optional_data
from sweeps import cell, fill_every, fill_probed, fill_replicated, numbers, record
from swept import swept

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def few_deals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute importance with three permutations instead of forty, for tests of the figure's appearance."""
    monkeypatch.setattr(importance, "PERMUTATION_RANGE", dict.fromkeys(importance.PERMUTATION_RANGE, (3, 3)))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Chromium: pip install -e '.[test]' && playwright install chromium"
    )
    if CHROMIUM is None:
        pytest.skip("needs Chromium: playwright install chromium")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def run() -> Callable[..., None]:
    return record


@pytest.fixture
def make() -> tuple[Callable[..., CellRecord], Callable[..., list[Measurement]]]:
    return cell, numbers


@pytest.fixture(scope="session")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of an empty database to copy, since creating one takes longer than most tests."""
    path = tmp_path_factory.mktemp("databases") / "blank.db"
    open_store(path, create=True).close()
    return path


@pytest.fixture(scope="session")
def filled(blank: Path) -> Path:
    path = Path(shutil.copy(blank, blank.with_name("filled.db")))
    opened = open_store(path)
    cells = [cell(4), cell(1, attn_type="nope"), cell(3, memory="off"), cell(2, reg_mode="weak"), cell(0, window="on")]
    opened.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells)
    record(opened, cells[0].id, "done", numbers(0.125))
    record(opened, cells[1].id, "done", numbers(3.14159)[:1])
    record(opened, cells[2].id, "running", numbers(1.0))
    record(opened, cells[3].id, "diverged", [])
    opened.close()
    return path


@pytest.fixture
def store(tmp_path: Path, filled: Path) -> Store:
    return open_store(shutil.copy(filled, tmp_path / "test.db"))


@pytest.fixture
def empty(tmp_path: Path, blank: Path) -> Store:
    return open_store(shutil.copy(blank, tmp_path / "empty.db"))


@pytest.fixture(scope="session")
def published() -> Store:
    """Return a temporary store with both printed sweeps, which no test may change."""
    return open_published()


@pytest.fixture(scope="session")
def published_effects(published: Store) -> Table:
    """Return the table `effects` of printed-v2."""
    return make_table("effects", published, "printed-v2")


@pytest.fixture(scope="session")
def tables() -> dict[str, Any]:
    """Return every printed number, transcribed independently of the shipped CSV files."""
    tables: dict[str, Any] = json.loads((optional_data("paper/tables.json")).read_text())
    return tables


@pytest.fixture
def replicated(tmp_path: Path, blank: Path) -> Store:
    """A sweep `twice` of two mixers, with and without memory, three seeds each, and every trial of the needle.

    Losses of seeds lie 0.01 around 3 without memory, 0.02 around 2 with it. Seed 2 of nope with memory has no first
    trial.
    """
    store = open_store(shutil.copy(blank, tmp_path / "twice.db"))
    fill_replicated(store)
    return store


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Callable[[str], Store]:
    """Return a function from a figure's name to a store in which that figure has data.

    The stores are `every`, `replicated` (replicates), `probed` (items of single probes), `rates` (a numeric axis),
    `studies` and `joint` (a study whose settings act together).
    """

    def store_of(name: str) -> Store:
        rest = "replicated" if name in ("power", "seeds", "items") else "rates" if name == "response" else "every"
        rest = "studies" if name in ("study", *studied.FIGURES) else rest
        rest = "joint" if name == "contours" else rest
        sweep_store: Store = request.getfixturevalue("probed" if name in probed_data.FIGURES else rest)
        return sweep_store

    return store_of


@pytest.fixture(scope="session")
def rates_file(blank: Path) -> Path:
    """Return the store of `swept`."""
    path = Path(shutil.copy(blank, blank.with_name("rates.db")))
    store = open_store(path)
    swept(store)
    store.close()
    return path


@pytest.fixture
def rates(tmp_path: Path, rates_file: Path) -> Store:
    """Return a copy of the store."""
    return open_store(shutil.copy(rates_file, tmp_path / "rates.db"))


@pytest.fixture(scope="session")
def studies_file(blank: Path) -> Path:
    """Return a store with the study `tuned` of one objective and, launched last, `both` of two."""
    path = Path(shutil.copy(blank, blank.with_name("studies.db")))
    store = open_store(path)
    studied.record_study(store)
    studied.two(store)
    store.close()
    return path


@pytest.fixture
def studies(tmp_path: Path, studies_file: Path) -> Store:
    """Return a copy of the store."""
    return open_store(shutil.copy(studies_file, tmp_path / "studies.db"))


@pytest.fixture
def joint(tmp_path: Path, blank: Path) -> Store:
    """Return a store with the study `joint`."""
    store = open_store(shutil.copy(blank, tmp_path / "joint.db"))
    studied.joint(store)
    return store


@pytest.fixture(scope="session")
def probed_file(blank: Path) -> Path:
    """Return a store with a sweep `probed`: four cells, trained at 64 tokens, with items of single probes."""
    path = Path(shutil.copy(blank, blank.with_name("probed.db")))
    store = open_store(path)
    fill_probed(store)
    store.close()
    return path


@pytest.fixture
def probed(tmp_path: Path, probed_file: Path) -> Store:
    """Return a copy of the store."""
    return open_store(shutil.copy(probed_file, tmp_path / "probed.db"))


@pytest.fixture
def every(empty: Store) -> Store:
    """Return a store with a sweep `all` of six cells, with every kind of number and two failed ends."""
    fill_every(empty)
    return empty
