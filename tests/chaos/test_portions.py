"""`.ci/gpu portion`: a sweep on machines that are empty afterwards, of which each gets what the one before brought home."""

from __future__ import annotations

import contextlib
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
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
    process = begun(bench, number, ATMA_FINISH_S=str(finish_s))
    out, _ = process.communicate(timeout=2 * PATIENCE_S)
    assert brought_home(bench, number)
    return process.returncode, out


def begun(bench: Bench, number: int, **settings: str) -> subprocess.Popen[str]:
    before, after = (bench.folder / f"portion-{index}" for index in (number - 1, number))
    before.mkdir(exist_ok=True)
    return subprocess.Popen(
        ["bash", str(SCRIPT), "portion", str(before), str(after), str(int(PATIENCE_S)), str(bench.folder / "micro.yaml")],
        env=os.environ | settings | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def brought_home(bench: Bench, number: int) -> bool:
    """Whether a portion has left its database; `bench` asks that one then."""
    packed = b"".join(path.read_bytes() for path in sorted((bench.folder / f"portion-{number}").glob("atma.db.xz.*")))
    if not packed:
        return False
    (bench.folder / "atma.db").write_bytes(lzma.decompress(packed))
    return True


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


@only_long
def test_of_a_machine_that_vanishes_the_last_minutes_are_lost_and_no_more(bench: Bench) -> None:
    process = begun(bench, 1, ATMA_HOME_S="1")
    deadline = time.monotonic() + PATIENCE_S
    while not brought_home(bench, 1) or not bench.sql("SELECT 1 FROM attempt WHERE state = 'done'"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()
    assert brought_home(bench, 1)
    first = bench.sql("SELECT cell_id, number FROM attempt WHERE state = 'done'")
    assert 1 <= len(first) < CELLS
    code, out = portion(bench, 2, finish_s=0)
    assert (code, f"before: {len(first)} cells trained, 0 of them twice" in out) == (0, True), out
    done = bench.sql("SELECT cell_id, number FROM attempt WHERE state = 'done'")
    assert done[: len(first)] == first
    assert len(done) == len({cell for cell, _ in done}) == CELLS


@pytest.mark.parametrize("words", [(), ("portion",), ("speed", "out"), ("dance",)])
def test_without_its_words_it_says_how(words: tuple[str, ...]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash .ci/gpu portion FROM TO SECONDS GRID" in done.stderr
