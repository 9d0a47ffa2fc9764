"""Launches of cells on several ranks that fail, stop and continue on another number: one end per attempt, with its cause."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import Bench
from factories import ended

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
PLUGIN = """
import os, signal, sys, time
from atma_sweep.sweep.training import loop
train_step = loop.Trainer.train_step

def fail(seed):
    import torch
    if seed == 0: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    if seed == 1: raise ValueError("broken on one rank")
    if seed == 2: os._exit(7)
    if seed == 3: time.sleep(3600)

def failing_step(self, step):
    if step == 5: fail(self.seed)
    return train_step(self, step)

if "--rank" in sys.argv and sys.argv[sys.argv.index("--rank") + 1] == "1":
    loop.Trainer.train_step = failing_step
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def grid(bench: Bench, n_ranks: int, *, seeds: str = "1", more: str = "", tokens: int = 128 * 12) -> None:
    """Write a grid of NoPE cells with four micro-batches per step."""
    bench.grid(tokens=tokens, more=f"resources: {{ranks: {n_ranks}{more}}}\n")
    bench.edit("[nope, polar]", "[nope]")
    bench.edit("micro_batch: 2", "micro_batch: 1")
    bench.edit("seeds: 1", f"seeds: {seeds}")


def test_fault_of_another_rank_is_the_end_of_its_attempt(bench: Bench) -> None:
    """Out of memory, an error in code, and a silent exit on rank 1 of 2, while rank 0 waits for its gradients."""
    grid(bench, 2, seeds="[0, 1, 2]")
    (bench.folder / "faults.py").write_text(PLUGIN)
    path = bench.folder / "micro.yaml"
    path.write_text(path.read_text() + "plugins: [faults.py]\n")
    out = ended(bench.start("launch", "micro.yaml", "--executor", "local"), 1)
    rows = bench.sql(
        "SELECT c.seed, a.state, a.failure, a.cause, a.traceback FROM attempt a JOIN cell c ON c.id = cell_id ORDER BY c.seed"
    )
    assert [row[:3] for row in rows] == [(0, "failed", "cuda_oom"), (1, "failed", "code"), (2, "failed", "code")], out
    assert [str(row[3]).split(": ")[0] for row in rows] == ["rank 1 of 2"] * 3
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB" in str(rows[0][3])
    assert str(rows[1][3]).endswith("ValueError: broken on one rank (faults.py:9)")
    assert 'raise ValueError("broken on one rank")' in str(rows[1][4])
    assert "ended with exit code 7" in str(rows[2][3])
    bench.gone()


def test_hanging_rank_ends_its_attempt_with_the_stacks_of_all(bench: Bench) -> None:
    # two processes import torch on a busy machine before the first step; that must not be the hang
    grid(bench, 2, seeds="[3]", more=", hang_minutes: 0.75")
    (bench.folder / "faults.py").write_text(PLUGIN)
    path = bench.folder / "micro.yaml"
    path.write_text(path.read_text() + "plugins: [faults.py]\n")
    launch = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait("SELECT 1 FROM attempt WHERE failure = 'hang'", launch)
    launch.send_signal(signal.SIGTERM)
    launch.communicate()
    folder = bench.folder / "atma-runs" / str(bench.sql("SELECT run_dir FROM attempt ORDER BY id")[0][0])
    assert "in fail" in (folder / "rank-1.log").read_text()
    assert "train_step" in (folder / "log.txt").read_text()
    bench.gone()


def test_stopped_cell_continues_on_another_number_of_ranks(bench: Bench) -> None:
    """Begun on two ranks, continued on three, ended on one: the curve is that of one rank up to the order of sums."""
    grid(bench, 2, tokens=128 * 160)
    for n_ranks in (2, 3):
        launch = bench.start("launch", "micro.yaml", "--executor", "local")
        bench.wait(f"SELECT 1 FROM attempt WHERE number = {n_ranks - 1} AND step > 3", launch)
        launch.send_signal(signal.SIGTERM)
        launch.communicate()
        assert launch.returncode == 143
        bench.gone()
        bench.edit(f"ranks: {n_ranks}", f"ranks: {4 - n_ranks if n_ranks == 3 else 3}")
    ended(bench.start("launch", "micro.yaml", "--executor", "local"))
    attempts = bench.sql("SELECT state, failure FROM attempt ORDER BY number")
    assert attempts == [("interrupted", None), ("interrupted", None), ("done", None)]
    assert len(bench.sql("SELECT 1 FROM event WHERE kind = 'resumed'")) == 2
    (curve,) = bench.curves().values()
    plain = Bench(bench.folder / "plain", copied=bench.folder)
    plain.folder.mkdir()
    (plain.folder / "micro.yaml").write_text((bench.folder / "micro.yaml").read_text())
    ended(plain.start("launch", "micro.yaml", "--executor", "local"))
    (reference,) = plain.curves().values()
    assert [row[0] for row in curve] == [row[0] for row in reference]
    assert [row[3] for row in curve] == pytest.approx([row[3] for row in reference], abs=1e-3)
