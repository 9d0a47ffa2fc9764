"""Estimates of the progress of a sweep and of its running cells, from the states of its cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ...results.console.progress import RunningCell, SweepProgress, estimate_remaining_seconds
from ...results.store.records import CellState

SPEED_SAMPLE = 20
"""Number of last finished cells whose speed enters the estimate."""


def sweep_progress(name: str, cells: Sequence[CellState], cells_done: int) -> SweepProgress:
    """Return the progress of a sweep over the training tokens of its cells.

    Failed and diverged cells count with no tokens. The speed is the sum over training cells. A waiting cell runs at the
    median rate of the last 20 cells finished at their first attempt, start and probes included, or else at the mean
    rate of running ones; the time left is as `estimate_remaining_seconds` estimates it.

    Args:
        name: Name of the sweep.
        cells: Its cells.
        cells_done: Number of cells that are done.
    """
    running = [cell for cell in cells if cell.state == "running"]
    rates = {cell.cell_id: cell.tokens_per_s for cell in running if cell.phase == "training" and cell.tokens_per_s}
    finished = sorted(
        (cell for cell in cells if cell.state == "done" and cell.kind == "train" and cell.attempt_number == 1),
        key=lambda cell: cell.finished_at or cell.started_at,  # type: ignore[arg-type, return-value]
    )
    finished_rates = [rate for rate in map(_overall_rate, finished[-SPEED_SAMPLE:]) if rate]
    typical = (
        statistics.median(finished_rates) if finished_rates else statistics.mean(rates.values()) if rates else None
    )
    remaining = {cell.cell_id: remaining_tokens(cell) for cell in cells}
    tokens = sum(cell.tokens_total for cell in cells if remaining[cell.cell_id] or not _is_abandoned(cell))
    work = [(remaining[cell.cell_id], rates.get(cell.cell_id)) for cell in running]
    waiting = sum(remaining[cell.cell_id] for cell in cells if cell.state != "running")
    return SweepProgress(
        sweep=name, cells_done=cells_done, cells=len(cells), tokens_done=tokens - sum(remaining.values()), tokens=tokens,
        tokens_per_s=sum(rates.values()) or None, remaining_s=estimate_remaining_seconds(work, waiting, typical),
    )  # fmt: skip


def _is_abandoned(cell: CellState) -> bool:
    """Return True for a failed or diverged cell without a finished training."""
    return cell.trained_attempt_id is None and cell.state in ("failed", "diverged")


def running_cell(cell: CellState, losses: Sequence[float], host: str = "", silent_s: float = 0.0) -> RunningCell:
    """Return a running cell as a row of the table of running cells.

    Args:
        cell: State of the cell.
        losses: Training losses of its attempt so far, oldest first.
        host: Host and GPU; empty to leave them out.
        silent_s: Age of its last heartbeat in seconds.
    """
    trains = cell.kind == "train"
    return RunningCell(
        slug=cell.slug, phase=(cell.phase if trains else cell.kind) or "starting", step=cell.step,
        steps_total=cell.steps_total, loss=cell.loss, losses=losses,
        tokens_per_s=cell.tokens_per_s if cell.phase == "training" else None, remaining_s=remaining_seconds(cell),
        host=host, silent_s=silent_s,
    )  # fmt: skip


def remaining_seconds(cell: CellState) -> float | None:
    """Return the remaining training time of a cell in seconds at its present speed, probes excluded.

    None unless the cell is running in the phase "training" with a known step, total and speed.
    """
    trains = cell.state == "running" and cell.phase == "training"
    if not trains or not cell.tokens_per_s or not cell.steps_total or cell.step is None:
        return None
    return cell.tokens_total * (1 - cell.step / cell.steps_total) / cell.tokens_per_s


def remaining_tokens(cell: CellState) -> float:
    """Return the number of tokens that a cell still has to train.

    Failed, diverged and trained cells have none, unless they train at present. An interrupted cell continues at its
    last step if it has a checkpoint; else, and for a cell without an attempt, it is all tokens of the cell.
    """
    is_training = cell.state == "running" and cell.kind == "train"
    if not is_training and (cell.trained_attempt_id is not None or cell.state in ("failed", "diverged")):
        return 0
    is_resumable = is_training or cell.checkpoint is not None
    if cell.kind != "train" or not is_resumable or not cell.steps_total or cell.step is None:
        return cell.tokens_total
    return round(cell.tokens_total * (1 - min(1.0, cell.step / cell.steps_total)))


def _overall_rate(cell: CellState) -> float | None:
    """Return the tokens per second of a finished cell over its full time, probes included; None if unknown.

    Without start or end it is the recorded training speed.
    """
    if cell.started_at is None or cell.finished_at is None:
        return cell.tokens_per_s
    seconds = (cell.finished_at - cell.started_at).total_seconds()
    return cell.tokens_total / seconds if seconds > 0 else cell.tokens_per_s
