"""`.ci/gpu portion`: a sweep on machines that are empty afterwards, of which each gets what the one before brought home."""

from __future__ import annotations

import contextlib
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..helpers.bench import Bench
from ..helpers.patience import PATIENCE_S
from ..helpers.tiers import only_long

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
SCRIPT = Path(__file__).parents[2] / ".ci" / "gpu"
ATTEMPTS = "SELECT cell_id, number, state FROM attempt ORDER BY id"
CELLS = 4


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path)) as made:
        made.grid(tokens=128 * 300, seeds=CELLS // 2)
        made.in_turn()
        yield made


def portion(bench: Bench, number: int, *, finish_s: int) -> tuple[int, str]:
    """Exit code and output of a portion that goes on from the one before, whose database `bench` then asks."""
    before, after = (bench.folder / f"portion-{index}" for index in (number - 1, number))
    before.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", str(SCRIPT), "portion", str(before), str(after), str(int(PATIENCE_S)), str(bench.folder / "micro.yaml")],
        env=os.environ | {"ATMA_FINISH_S": str(finish_s), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    packed = b"".join(path.read_bytes() for path in sorted(after.glob("atma.db.xz.*")))
    (bench.folder / "atma.db").write_bytes(lzma.decompress(packed))
    return done.returncode, done.stdout


@only_long
def test_what_a_portion_brought_home_is_not_trained_again(bench: Bench) -> None:
    # asked at once: the cell that runs is the only one
    code, out = portion(bench, 1, finish_s=10**6)
    first = bench.sql(ATTEMPTS)
    assert (code, "no cell is started from here on" in out) == (143, True), out
    assert 1 <= len(first) < CELLS, out
    assert {state for _, _, state in first} == {"done"}, out
    code, out = portion(bench, 2, finish_s=0)
    assert (code, f"before: {len(first)} cells trained, 0 of them twice" in out) == (0, True), out
    every = bench.sql(ATTEMPTS)
    assert every[: len(first)] == first
    assert [(number, state) for _, number, state in every] == [(1, "done")] * CELLS
    bench.once(CELLS)
    # the weights of the first portion's cells are nowhere, and nobody asks for them
    assert not (bench.folder / "atma-runs").exists()
    assert "4 of 4 cells done" in bench.ask("report", "--table", "6")
    code, out = portion(bench, 3, finish_s=0)
    assert (code, bench.sql(ATTEMPTS)) == (0, every), out


@pytest.mark.parametrize("words", [(), ("portion",), ("speed", "out"), ("dance",)])
def test_without_its_words_it_says_how(words: tuple[str, ...]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash .ci/gpu portion FROM TO SECONDS GRID" in done.stderr
