"""Attempts of several ranks that lose one of them at any moment: every cell is trained once, with undisturbed numbers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tiers import long_form

from ..testing.bench import Bench, Curves
from .storm import A_STORM, FEW, TOKENS, Storm, finish_and_assert_invariants

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
ENDS_WITHIN_S = 20.0
"""Seconds after the death of a rank in which all ranks of its attempt must be gone."""


def ranked_bench(folder: Path, n_ranks: int) -> Bench:
    """Return a bench of two cells with four micro-batches per step, which three ranks divide unevenly."""
    folder.mkdir(exist_ok=True)
    bench = Bench(folder)
    bench.grid(tokens=TOKENS, more=f"resources: {{ranks: {n_ranks}}}\n")
    bench.edit("micro_batch: 2", "micro_batch: 1")
    return bench


def undisturbed(folder: Path, n_ranks: int) -> Curves:
    """Return the curves of the same sweep without any kill."""
    with contextlib.closing(ranked_bench(folder, n_ranks)) as bench:
        bench.run("launch", "micro.yaml", "--executor", "local")
        return bench.curves()


@pytest.mark.parametrize("n_ranks", [3, *long_form(2)])
def test_killed_ranks_cost_no_cell_and_no_number(tmp_path: Path, kills: int, n_ranks: int) -> None:
    """Sweeps follow each other until all kills are done: rank 0 or another, while it starts, trains, saves or probes."""
    reference = undisturbed(tmp_path / "calm", n_ranks)
    assert len(reference) == FEW
    done = sweeps = 0
    while done < kills and sweeps < kills:
        with contextlib.closing(ranked_bench(tmp_path / f"stormy{sweeps}", n_ranks)) as bench:
            targets = ("other rank",) * (2 * (n_ranks - 1)) + ("rank 0",)
            storm = Storm(
                bench,
                "local",
                seed=31 + 100 * n_ranks + 7 * kills + sweeps,
                kills=min(kills - done, A_STORM),
                targets=targets,
            )
            storm.run()
            finish_and_assert_invariants(bench, FEW, reference)
            causes = {str(cause) for (cause,) in bench.sql("SELECT cause FROM attempt WHERE failure = 'preempted'")}
            assert any("killed by SIGKILL" in cause for cause in causes) or not storm.counts
            print(
                f"{n_ranks} ranks, {storm}, moments {dict(storm.moments)}, gone within {storm.slowest_end_s:.1f} s",
                causes,
            )
            assert storm.slowest_end_s <= ENDS_WITHIN_S
        done, sweeps = done + storm.counts.total(), sweeps + 1
    assert done >= min(kills, 3)
