"""Scaling table: speed-ups against hand-made timings, and a measurement by two real processes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.sweep.bench import scaling
from atma_sweep.sweep.errors import MachineError, SweepError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.training import flops


@pytest.fixture
def cell(cells: Callable[..., list[Cell]]) -> Cell:
    """Return a cell of eight micro-batches of 128 tokens per step."""
    return cells("set: {train.micro_batch: 1}\n")[0]


def test_speedup_refers_to_a_single_gpu(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: [1.0, 1.2, 0.9], 2: [0.5, 0.6, 0.4], 4: [0.25, 0.25, 0.25]}
    facts: dict[str, Any] = {"card": "NVIDIA H100", "optimizer": 0.0125, "first_step": 31.0, "peak_memory": 3 * 2**30}
    per_token = flops.training_flops(cell.config.model, cell.config.train.seq_len)
    assert per_token is not None
    facts["limit"] = 8192 * per_token
    monkeypatch.setattr(scaling, "_time_cell", lambda cell, size, *_: facts | {"seconds": seconds[size]})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    rows = scaling.run([cell], [1, 2, 4], tell=lambda line: None)
    assert [row.speedup for row in rows] == pytest.approx([1.0, 2.0, 4.0])
    lines = scaling.table(rows).splitlines()
    assert lines[0] == "card: NVIDIA H100"
    assert (
        lines[-1] == f"| {cell.slug} | 4 | 4,096 | 4,096 to 4,096 | 1,024 | 4.00 | 100.0% | 50.0% | 12.5 | 3.0 | 31.0 |"
    )
    with pytest.raises(MachineError, match="--gpus 8 needs as many GPUs, and this machine has 4"):
        scaling.run([cell], [8])
    with pytest.raises(SweepError, match=r"--gpus is 9, but .* has only 8 micro-batches"):
        scaling.run([cell], [9], kind="cpu")


@pytest.mark.parametrize("text", ["", "0,1", "two", "1;2", "-1"])
def test_counts_that_are_no_numbers_are_refused(text: str) -> None:
    assert scaling.parse_counts("4,1,2,1") == [1, 2, 4]
    with pytest.raises(SweepError, match="must be integers from 1 on"):
        scaling.parse_counts(text)


@pytest.mark.thorough
def test_two_processes_time_a_cell_together(cell: Cell) -> None:
    rows = scaling.run([cell], [1, 2], kind="cpu", rounds=2, tell=lambda line: None)
    assert [(row.gpus, row.card) for row in rows] == [(1, "CPU"), (2, "CPU")]
    assert all(0 < row.low <= row.tokens_per_s <= row.high and row.optimizer > 0 for row in rows)
