"""A small sweep with every kind of cell: done, running, diverged, never started, and numbers that could not be had."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import probed as probed_data
import pytest
import studied
from atma_sweep.reports.stats import importance
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import open_published
from atma_sweep.results.store.recorder import Recorder
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, Example, Measurement, Owner
from atma_sweep.results.store.store import Store, open_store
from swept import swept

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ME = Owner(name="ada", host="here", pid=1, started=0.0)


@pytest.fixture
def few_deals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importance with values dealt anew three times, not forty: for tests of how its figure looks, not of what it says."""
    monkeypatch.setattr(importance, "DEALT", dict.fromkeys(importance.DEALT, (3, 3)))


def cell(index: int, *, seed: int = 0, axes: dict[str, str] | None = None, **levels: str) -> CellRecord:
    words = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True)) | levels
    return CellRecord(
        id=f"{index:012x}", slug=f"slug-{index}", seed=seed, levels=words, config={}, axes=axes or {}, tokens=10
    )


def numbers(val: float, entropy: float = 7.4321) -> list[Measurement]:
    found = [
        Measurement(probe="val", metric="val_loss", value=val, unit="nats/token", n=11),
        Measurement(probe="corpus", metric="unigram_entropy", value=entropy, unit="nats/token"),
        Measurement(probe="corpus", metric="bigram_entropy", value=5.5, unit="nats/token"),
        Measurement(probe="throughput", metric="mfu_paper", reason="n/a: no peak FLOPs known for cpu"),
    ]
    for length in (128, 2048, 65536):
        found += [
            Measurement(probe="clean", metric="nats", length=length, value=val + length / 1e6, unit="nats/token"),
            Measurement(probe="needle", metric="digit_accuracy", length=length, value=0.9625, low=0.9, high=1.0, n=80),
        ]
        if length < 65536:
            found.append(Measurement(probe="junk", metric="nats", length=length, value=2.675, unit="nats/token"))
        else:
            found.append(Measurement(probe="junk", metric="nats", length=length, reason="oom: 3 GiB asked, 1 free"))
    return found


def record(store: Store, cell_id: str, state: str, measurements: list[Measurement]) -> None:
    attempt = store.start_attempt(cell_id, owner=ME, fence=1)
    Recorder(store, attempt.id, 1).measurements(measurements)
    if state != "running":
        store.finish_attempt(attempt.id, 1, state)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Chromium (and playwright)")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
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
    """An empty database, to be copied: making one takes longer than most tests."""
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
    """Both sweeps of printed numbers, in a temporary database that no test may change."""
    return open_published()


@pytest.fixture(scope="session")
def published_effects(published: Store) -> Table:
    """The table `effects` of printed-v2."""
    return make_table("effects", published, "printed-v2")


@pytest.fixture(scope="session")
def tables(shared: Path) -> dict[str, Any]:
    """Every printed number, as transcribed apart from the CSV that we ship."""
    found: dict[str, Any] = json.loads((shared / "paper" / "tables.json").read_text())
    return found


TRIALS = [(1, 1, 1, 1, 1), (0, 1, 0, 1, 0), (1, 0, 0, 0, 0), (0, 0, 0, 0, 0)]
"""What a cell of `replicated` with memory gets right of four trials of five digits; without memory, the third trial alone."""


@pytest.fixture
def replicated(tmp_path: Path, blank: Path) -> Store:
    """A sweep `twice` of two mixers, with and without memory, three seeds each, and every trial of the needle.

    Losses of seeds lie 0.01 around 3 without memory, 0.02 around 2 with it. Seed 2 of nope with memory has no first trial.
    """
    store = open_store(shutil.copy(blank, tmp_path / "twice.db"))
    levels = [(kind, memory, seed) for kind in ("polar", "nope") for memory in ("off", "on") for seed in (0, 1, 2)]
    cells = [cell(i + 1, attn_type=kind, memory=memory, seed=seed) for i, (kind, memory, seed) in enumerate(levels)]
    store.record_revision("twice", grid_text="x", grid_file="x.yaml", cells=cells)
    for one, (kind, memory, seed) in zip(cells, levels, strict=True):
        attempt = store.start_attempt(one.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        recorder = Recorder(store, attempt.id, 1)
        loss = 2 + 0.02 * (seed - 1) if memory == "on" else 3 + 0.01 * (seed - 1)
        recorder.measurements([Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token")])
        for length in (64, 128):
            digits = [TRIALS[(trial + 2) % 4] if memory == "on" else [int(trial == 2)] * 5 for trial in range(4)]
            if kind == "nope":
                digits = [[digit * (place < 3) for place, digit in enumerate(row)] for row in digits]
            about: dict[str, Any] = {"probe": "needle", "metric": "digit_accuracy", "length": length}
            gone = 1 if (kind, memory, seed) == ("nope", "on", 2) else 0
            right = sum(sum(row) for row in digits[gone:]) / (5 * (4 - gone))
            recorder.measurements([Measurement(**about, value=right, unit="fraction", n=5 * (4 - gone))])
            recorder.examples(
                [
                    Example(**about, item=trial, position=place, value=float(digit))
                    for trial, row in enumerate(digits)
                    for place, digit in enumerate(row)
                    if trial >= gone
                ]
            )
        store.finish_attempt(attempt.id, 1, "done")
    return store


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Callable[[str], Store]:
    """The store in which the figure of that name has something to show: `every`, `replicated` for what is about replicates,
    `probed` for the items of single probes, `rates` for an axis of numbers, `studies` for what is about studies."""

    def store_of(name: str) -> Store:
        rest = "replicated" if name in ("power", "seeds", "items") else "rates" if name == "response" else "every"
        rest = "studies" if name in ("study", *studied.FIGURES) else rest
        found: Store = request.getfixturevalue("probed" if name in probed_data.FIGURES else rest)
        return found

    return store_of


@pytest.fixture(scope="session")
def rates_file(blank: Path) -> Path:
    """The sweep of `swept`."""
    path = Path(shutil.copy(blank, blank.with_name("rates.db")))
    store = open_store(path)
    swept(store)
    store.close()
    return path


@pytest.fixture
def rates(tmp_path: Path, rates_file: Path) -> Store:
    """A copy of it."""
    return open_store(shutil.copy(rates_file, tmp_path / "rates.db"))


@pytest.fixture(scope="session")
def studies_file(blank: Path) -> Path:
    """The sweep `tuned`, a study of one objective, and the one launched last, `both`, a study of two."""
    path = Path(shutil.copy(blank, blank.with_name("studies.db")))
    store = open_store(path)
    studied.one(store)
    studied.two(store)
    store.close()
    return path


@pytest.fixture
def studies(tmp_path: Path, studies_file: Path) -> Store:
    """A copy of it."""
    return open_store(shutil.copy(studies_file, tmp_path / "studies.db"))


@pytest.fixture(scope="session")
def probed_file(blank: Path) -> Path:
    """A sweep `probed` of four cells, trained at 64 tokens, with the items of the probes that have figures of their own."""
    path = Path(shutil.copy(blank, blank.with_name("probed.db")))
    store = open_store(path)
    levels = [(kind, seed) for kind in ("fox", "nope") for seed in (0, 1)]
    cells = [
        replace(cell(i + 1, attn_type=kind, seed=seed), config={"train": {"seq_len": 64}})
        for i, (kind, seed) in enumerate(levels)
    ]
    store.record_revision("probed", grid_text="x", grid_file="x.yaml", cells=cells)
    for i, one in enumerate(cells):
        attempt = store.start_attempt(one.id, owner=ME, fence=1)
        probed_data.probe_items(Recorder(store, attempt.id, 1), 3 + i / 10, i / 4, lengths=(64, 128, 256))
        store.finish_attempt(attempt.id, 1, "done")
    store.close()
    return path


@pytest.fixture
def probed(tmp_path: Path, probed_file: Path) -> Store:
    """A copy of it."""
    return open_store(shutil.copy(probed_file, tmp_path / "probed.db"))


@pytest.fixture
def every(empty: Store, make: Any) -> Store:
    """A sweep `all` of six cells, with every kind of number and two ends that are no good."""
    cell, _ = make
    levels = [(kind, memory) for kind in ("polar", "nope", "a-mixer-of-a-long-name") for memory in ("off", "on")]
    cells = [cell(i + 1, attn_type=kind, memory=memory) for i, (kind, memory) in enumerate(levels)]
    empty.record_revision("all", grid_text="x", grid_file="x.yaml", cells=cells)
    for i, one in enumerate(cells):
        attempt = empty.start_attempt(one.id, owner=Owner(name="a", host=f"host-{i % 2}", pid=1, started=0.0), fence=1)
        recorder = Recorder(empty, attempt.id, 1)
        recorder.curve(
            [CurvePoint(step=s, tokens=s * 100, wall_s=s * 2.0, train_loss=9 - s / 9 + i / 7) for s in (1, 9, 30)]
        )
        found = [
            Measurement(probe="val", metric="val_loss", value=3 + i / 10),
            Measurement(probe="throughput", metric="tokens_per_s", value=1000.0 + 31 * (i % 4)),
        ]
        for length in (64, 128, 256):
            found += [
                Measurement(probe="needle", metric="digit_accuracy", length=length, value=(9 - i) / 10, n=80),
                Measurement(probe="clean", metric="nats", length=length, value=2 + i / length),
                Measurement(probe="junk", metric="nats", length=length, value=3 + i / length),
            ]
            names = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
            found += [
                Measurement(probe="state_norm", metric=name, length=length, value=(1 + place) * length**0.5)
                for place, name in enumerate(names)
            ]
        if one.levels["attn_type"] == "polar":
            slopes = (("beta", 0.2), ("beta_lowest", 0.1), ("beta_highest", 0.4))
            found += [Measurement(probe="count_map", metric=name, value=slope + i / 50) for name, slope in slopes]
        recorder.measurements(found)
        empty.finish_attempt(attempt.id, 1, "done")
    for i, end in enumerate(("failed", "diverged", "interrupted", "running")):
        attempt = empty.start_attempt(cells[i].id, owner=Owner(name="a", host="host-1", pid=1, started=0.0), fence=1)
        if end != "running":
            empty.finish_attempt(attempt.id, 1, end)
    return empty
