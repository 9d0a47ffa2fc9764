"""Attempts are killed with SIGKILL at random steps; what comes out equals an uninterrupted run to the last bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench import Bench, Curves
from patience import PATIENCE_S
from tiers import only_long

pytestmark = pytest.mark.slow
STEPS = 24
GRID = f"""
name: micro
extends: tiny
axes:
  attn_type: [rope]
include:
  - {{attn_type: polar, memory: on}}
  - {{attn_type: nope, window: on, distractor: on}}
  - {{attn_type: polar, window: on, distractor: on}}
  - {{attn_type: nope, reg_mode: weak}}
  - {{attn_type: polar, reg_mode: strong}}
  - {{attn_type: rope, reg_mode: discrete}}
  - {{attn_type: nope, reg_mode: zipfian}}
set:
  model: {{d_model: 16, n_layers: 3, n_heads: 2, n_kv_heads: 1, head_dim: 8, window_size: 8}}
  data: {{corpus: files, path: text, heldout_tokens: 400}}
  train: {{tokens: {STEPS * 128}, seq_len: 32, batch_tokens: 128, micro_batch: 2, regularizer_sketch: 8}}
  eval: {{probes: [val, clean, needle], lengths: [32, 64], documents: 2, needle_trials: 2}}
  eval.validate_every: 1
  eval.validation_tokens: 64
  checkpoint.every_steps: 3
"""
SLUGS = [
    "rope-baseline-d0-m0-w0-s0",
    "polar-baseline-d0-m1-w0-s0",
    "nope-baseline-d1-m0-w1-s0",
    "polar-baseline-d1-m0-w1-s0",
    "nope-weak-d0-m0-w0-s0",
    "polar-strong-d0-m0-w0-s0",
    "rope-discrete-d0-m0-w0-s0",
    "nope-zipfian-d0-m0-w0-s0",
]
OFTEN = SLUGS[1]
"""Killed as often as a launch tries a cell, so that it takes a second launch."""
NUMBERS = (
    "SELECT slug, m.probe, m.metric, m.length, m.value, m.n FROM measurement m JOIN attempt a ON a.id = attempt_id "
    "JOIN cell c ON c.id = cell_id WHERE a.state = 'done' AND probe IN ('val', 'clean', 'needle') "
    "AND metric <> 'peak_memory' ORDER BY 1, 2, 3, 4"
)
ITEMS = (
    "SELECT slug, e.probe, e.metric, e.length, e.item, e.position, e.value FROM example e JOIN attempt a "
    "ON a.id = attempt_id JOIN cell c ON c.id = cell_id WHERE a.state = 'done' ORDER BY 1, 2, 3, 4, 5, 6"
)
RUNNING = (
    "SELECT slug, a.number, a.pid, a.step FROM attempt a JOIN cell c ON c.id = cell_id "
    "WHERE a.state = 'running' AND phase = 'training'"
)
Rows = list[tuple[object, ...]]


@dataclass(frozen=True)
class Ended:
    """Return the results of a grid."""

    curves: Curves
    numbers: Rows
    items: Rows


def ended(bench: Bench) -> Ended:
    return Ended(bench.curves(), bench.sql(NUMBERS), bench.sql(ITEMS))


def prepared_bench(folder: Path) -> Bench:
    bench = Bench(folder)
    (folder / "micro.yaml").write_text(GRID)
    return bench


def kill_while_running(bench: Bench, launch: subprocess.Popen[str], plan: dict[str, list[int]]) -> Rows:
    """Kills each cell's attempts once they have made the next number of steps in its list; (slug, number, step) each."""
    killed: Rows = []
    while launch.poll() is None:
        for slug, number, pid, step in bench.sql(RUNNING):
            assert isinstance(pid, int)
            assert isinstance(step, int)
            remaining = plan[str(slug)]
            if remaining and step >= remaining[0] and (slug, number) not in [row[:2] for row in killed]:
                os.kill(pid, signal.SIGKILL)
                remaining.pop(0)
                killed.append((slug, number, step))
        time.sleep(0.005)
    return killed


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, subprocess.Popen[str]]]:
    """The same grid without interruption, on its way beside the other."""
    bench = prepared_bench(tmp_path_factory.mktemp("whole"))
    process = bench.start("launch", "micro.yaml", "--executor", "local")
    yield bench, process
    process.terminate()
    process.wait(timeout=PATIENCE_S)


@only_long
@pytest.mark.thorough
def test_random_kills_do_not_change_results(uninterrupted: tuple[Bench, subprocess.Popen[str]], tmp_path: Path) -> None:
    draw = random.Random(5)
    plan = {slug: sorted(draw.sample(range(1, STEPS - 8), 3 if slug == OFTEN else 1)) for slug in SLUGS}
    bench = prepared_bench(tmp_path)
    first = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait("SELECT 1 FROM attempt")
    killed = kill_while_running(bench, first, plan)
    out, _ = first.communicate(timeout=PATIENCE_S)
    # a cell that gains steps between its deaths is never given up
    assert first.returncode == 0, out
    assert plan == {slug: [] for slug in SLUGS}, "every kill was carried out"
    assert len(killed) == len(SLUGS) + 2
    causes = bench.sql("SELECT DISTINCT exit_code, cause FROM attempt WHERE state <> 'done'")
    assert causes == [(-signal.SIGKILL, "process killed by SIGKILL (out of memory, or killed by a user)")]
    bench.launch()
    bench.once(len(SLUGS))
    # kills after the first checkpoint were resumed from one, not begun anew
    late = [row for row in killed if isinstance(row[2], int) and row[2] > 4]
    assert len(bench.sql("SELECT 1 FROM event WHERE kind = 'resumed'")) >= len(late) > 0
    assert list((bench.folder / "atma-runs").glob("*/*/*checkpoint-*")) == []

    reference, process = uninterrupted
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    reference.once(len(SLUGS))
    expected, results = ended(reference), ended(bench)
    assert sorted(expected.curves) == sorted(SLUGS)
    for slug in SLUGS:
        assert [point[0] for point in expected.curves[slug]] == list(range(1, STEPS + 1))
        assert results.curves[slug] == expected.curves[slug], f"{slug} was killed after {killed}"
    assert len({tuple(curve) for curve in expected.curves.values()}) == len(SLUGS), "no two cells are alike"
    assert results.numbers == expected.numbers
    # val twice, clean at two lengths, needle with three metrics at two lengths and one without a needle
    assert len(expected.numbers) == len(SLUGS) * (2 + 2 + 2 * 4 + 1)
    assert results.items == expected.items
    assert len(expected.items) > 0
