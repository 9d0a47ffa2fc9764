"""How long the storms are: a short form for every change, a long one by command. And what they are compared with."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..testing.bench import Bench, Curves
from ..testing.once import once
from .storm import CELLS, FEW, bench_in


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """Kills in each storm: `--kills`, else a few."""
    return int(request.config.getoption("--kills"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(bench_in(tmp_path / "stormy")) as made:
        yield made


@pytest.fixture
def small_bench(tmp_path: Path) -> Iterator[Bench]:
    """One of few cells."""
    with contextlib.closing(bench_in(tmp_path / "stormy", FEW)) as made:
        yield made


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Curves of the same grid, undisturbed."""

    def make(folder: Path) -> None:
        made = bench_in(folder)
        made.launch()
        made.once(CELLS)

    folder = once(tmp_path_factory, "calm", make)
    return Bench(folder, copied=folder).curves()
