"""Prices of cells over several GPUs: extrapolated from one, then measured; durations by GPUs per cell against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.planning import cost_estimate, render
from atma_sweep.sweep.planning.speed_model import (
    Calibration,
    SpeedTable,
    TargetMachine,
    rank_speedup,
    save_calibrations,
)
from factories import record_sweep
from sqlalchemy import text

from .test_cost_estimate import billed, record_training

Cells = Callable[..., list[Cell]]
GRID = """
axes: {train.tokens: [153600, 307200]}
set:
  train: {micro_batch: 1}
  eval: {probes: [val, clean], lengths: [128, 256]}
resources: {gpus: %s}
"""
"""150 or 300 steps of 1,024 tokens in eight micro-batches."""


def test_rank_speedup_counts_micro_batches_of_the_slowest_rank(cells: Cells) -> None:
    """Eight micro-batches on 3 GPUs take as long as three on one: 8 / 3 of the speed, times the assumption."""
    ratios = {n: rank_speedup(cells(GRID % n)[0].config).likely for n in (0.5, 1, 2, 3, 4, 8)}
    assert ratios == pytest.approx({0.5: 1, 1: 1, 2: 1.94, 3: 8 / 3 * 0.97, 4: 3.88, 8: 7.76})


def test_speed_of_several_gpus_is_assumed_until_it_is_measured(store: Store, cells: Cells) -> None:
    single, four = cells(GRID % 1)[0], cells(GRID % 4)[0]
    record_sweep(store, [single], "g")
    record_training(store, single, gpu="NVIDIA H200")

    def speeds() -> Any:
        return SpeedTable(TargetMachine("NVIDIA H200"), store.training_timings(), []).lookup(four.config)

    assumed = speeds()["measured"]
    assert assumed.token.likely == pytest.approx(1e-4 / 3.88, rel=1e-3)
    assert assumed.assumed_ranks == 4
    record_training(store, four, gpu="NVIDIA H200", slow=0.3)
    measured = speeds()["measured"]
    assert measured.token.likely == pytest.approx(0.3e-4, rel=1e-3)
    assert measured.assumed_ranks == 0
    # the FLOP/s per GPU that four GPUs reached are no reference for twice the speed on one
    wider = cells((GRID % 1).replace("micro_batch: 1", "micro_batch: 2"))[0]
    table = SpeedTable(TargetMachine("NVIDIA H200"), store.training_timings(), [])
    by_flops = table.lookup(wider.config)["FLOPs"].token.likely
    assert by_flops == pytest.approx(1e-4, rel=0.2)


def test_plan_lists_the_durations_by_gpus_per_cell(cells: Cells, tmp_path: Path) -> None:
    """Calibrated: 0.1 s per step on one GPU; two cells of 150 and 300 steps on four GPUs."""
    for cell in cells(GRID % 1)[:1]:
        key = SpeedTable(TargetMachine("H200"), [], []).speed_classes.key(cell.config)
        numbers = {
            "step_s": 0.1,
            "low_s": 0.1,
            "high_s": 0.1,
            "start_s": 0.0,
            "compile_s": 0.0,
            "validation_token_s": 0.0,
        }
        save_calibrations(tmp_path, [Calibration(like=key, device="H200", slug=cell.slug, **numbers)])
    bill = billed(None, cells(GRID % 2), tmp_path, gpus=4)
    assert [(choice.gpus, choice.is_planned) for choice in bill.choices] == [(1, False), (2, True), (4, False)]
    expected = [30, 30 / 1.94, 45 / 3.88]
    assert [choice.finish_s for choice in bill.choices] == pytest.approx(expected, rel=1e-6)
    assert [3600 * choice.hours for choice in bill.choices] == pytest.approx([45, 45 / 0.97, 45 / 0.97], rel=1e-6)
    assert bill.finish.likely == pytest.approx(30 / 1.94)
    lines = list(render.price_lines(bill, list_all=False))
    start = next(index for index, line in enumerate(lines) if "several GPUs per cell" in line)
    assert lines[start] == (
        "  several GPUs per cell: assumed 97% (85% to 100%) of N times the speed of one GPU where no attempt on N was measured"
    )
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["1", "2", "4"]
    assert lines[start + 2].endswith("(this plan)")
    assert lines[start + 4] == "    -> --set resources.gpus=4 ends earlier"
    assert cost_estimate.as_json(bill)["gpus_per_cell"][1]["is_planned"] is True
    assert not billed(None, cells(GRID % 1), tmp_path, gpus=1).choices
    assert not billed(None, cells(GRID % 0.5), tmp_path, gpus=4).choices


def test_makespan_never_waits_for_gpus_that_it_lacks() -> None:
    """Four GPUs for a cell in a plan of two: the cell counts with four; small cells beside large ones fill the rest."""
    assert cost_estimate.makespan([(10.0, Resources(gpus=4))], 2) == 10.0
    work = [(10.0, Resources(gpus=2)), (4.0, Resources(gpus=1)), (6.0, Resources(gpus=1)), (3.0, Resources(gpus=2))]
    assert cost_estimate.makespan(work, 4) == 10.0
    assert cost_estimate.makespan(work, 2) == 19.0


def test_hours_of_a_budget_count_the_gpus_of_each_attempt(store: Store, cells: Cells) -> None:
    """An attempt on four GPUs and one on two, 30.688 and 24.544 s long; the cell asks for eight now."""
    (cell,) = [cell for cell in cells(GRID % 8) if cell.config.train.tokens == 153600]
    record_sweep(store, [cell], "g")
    for count, slow in ((4, 1.0), (2, 0.6)):
        record_training(store, cell, gpu="NVIDIA H200", slow=slow)
        attempt = store.attempts(cell.id)[-1].id
        store.write(
            lambda session, n=count, i=attempt: session.execute(
                text("UPDATE provenance SET gpu_count = :n WHERE attempt_id = :i"), {"n": n, "i": i}
            )
        )
    spent = cost_estimate.hours_spent(store, [cell])
    assert 3600 * spent == pytest.approx(4 * 30.688 + 2 * 24.544, abs=0.01)
