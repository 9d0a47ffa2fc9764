"""Fixtures of the storms: number of kills (few for every change, many on request) and undisturbed reference curves."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..testing.bench import Bench, Curves
from ..testing.once import once
from .storm import CELLS, FEW, bench_in


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """Number of kills in each storm: `--kills`, else a few."""
    return int(request.config.getoption("--kills"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(bench_in(tmp_path / "stormy")) as bench:
        yield bench


@pytest.fixture
def small_bench(tmp_path: Path) -> Iterator[Bench]:
    """Bench with few cells."""
    with contextlib.closing(bench_in(tmp_path / "stormy", FEW)) as bench:
        yield bench


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Curves of the same grid without any disturbance."""

    def make(folder: Path) -> None:
        bench = bench_in(folder)
        bench.launch()
        bench.once(CELLS)

    folder = once(tmp_path_factory, "calm", make)
    return Bench(folder, copied=folder).curves()
