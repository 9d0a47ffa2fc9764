"""Training speed of cells by the number of GPUs, which train a cell together: complete optimizer steps, random tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MachineError, SweepError
from ..grid.cell import Cell
from ..ranks.group import join
from ..ranks.spawned import MeasurementFailed, run_in_ranks
from ..training import flops


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """Training speed of one cell on one number of GPUs. Times in seconds, memory in bytes."""

    cell: str
    """Slug."""
    gpus: int
    card: str
    """Name of the GPU, or "CPU"."""
    tokens_per_s: float
    low: float
    high: float
    """Median, smallest and largest over the rounds, of all GPUs together."""
    speedup: float
    """Ratio of the speed to that on one GPU, or to the speed per GPU on the fewest GPUs of the run."""
    optimizer: float
    """Optimizers of one step with the exchange of weights, on the slowest GPU."""
    first_step: float
    """Building, compiling and the first optimizer step."""
    peak_memory: int
    """Largest peak of any GPU."""
    mfu: float | None
    """Ratio of the model's FLOP/s to the matrix products that the GPUs reach together; None if either is unknown."""

    @property
    def efficiency(self) -> float:
        """Speed-up per GPU; 1 is perfect."""
        return self.speedup / self.gpus


def parse_counts(text: str) -> list[int]:
    """Return the numbers of GPUs in a text such as "1,2,4", without repetitions and in ascending order.

    Raises:
        SweepError: The text has no number, or something that is no integer from 1 on.
    """
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise SweepError(f"--gpus {text!r} must be integers from 1 on, separated by commas, such as 1,2,4")
    return counts


def run(
    cells: Sequence[Cell],
    counts: Sequence[int],
    *,
    rounds: int = 3,
    steps: int = 2,
    kind: str = "cuda",
    tell: Callable[[str], None] = print,
) -> list[ScalingRow]:
    """Return a row per cell and number of GPUs; each is timed in processes of its own, one measurement at a time.

    Args:
        cells: Cells to time.
        counts: Numbers of GPUs, in ascending order.
        rounds: Timed rounds.
        steps: Optimizer steps per round and GPU, so that rounds of all numbers of GPUs take about as long.
        kind: "cuda", or "cpu" to time processes without GPUs.
        tell: Called with a line per measurement.

    Raises:
        MachineError: There are fewer GPUs, or a process fails.
        SweepError: A cell has fewer micro-batches per step than GPUs.
    """
    import torch

    if kind == "cuda" and torch.cuda.device_count() < counts[-1]:
        raise MachineError(f"--gpus {counts[-1]} needs as many GPUs, and this machine has {torch.cuda.device_count()}")
    for cell in cells:
        problem = cell.config.train.ranks_problem("--gpus", counts[-1])
        if problem is not None:
            raise SweepError(f"cell {cell.slug}: {problem}")
    rows: list[ScalingRow] = []
    for cell in cells:
        base: float | None = None
        for size in counts:
            timed = _time_cell(cell, size, kind, rounds, steps * size)
            tokens = cell.config.train.batch_tokens
            rate = tokens / statistics.median(timed["seconds"])
            base = base or rate / size
            low, high = tokens / max(timed["seconds"]), tokens / min(timed["seconds"])
            facts = {name: timed[name] for name in ("card", "optimizer", "first_step", "peak_memory")}
            model_flops = flops.training_flops(cell.config.model, cell.config.train.seq_len)
            rows.append(
                ScalingRow(
                    cell=cell.slug,
                    gpus=size,
                    tokens_per_s=rate,
                    low=low,
                    high=high,
                    speedup=rate / base,
                    **facts,
                    mfu=flops.mfu(model_flops, rate, timed["limit"]),
                )
            )
            tell(f"{cell.slug} on {size}: {rate:,.0f} tokens/s")
    return rows


def _time_cell(cell: Cell, size: int, kind: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return the timing of a cell by `size` processes: rank 0's, with the largest optimizer time and peak of all.

    `limit` is the sum of the matrix-product rates of all GPUs in FLOP/s, None without CUDA.

    Raises:
        MachineError: A process failed; the message has its error.
    """
    try:
        answers = run_in_ranks(size, _time_rank, cell, kind, rounds, steps)
    except MeasurementFailed as error:
        raise MachineError(f"cell {cell.slug} on {size} GPUs cannot be timed: {error}") from error
    largest = {name: max(answer[name] for answer in answers) for name in ("optimizer", "peak_memory")}
    limit = None if kind != "cuda" else sum(answer["limit"] for answer in answers)
    return answers[0] | largest | {"limit": limit}


def _time_rank(rank: int, size: int, address: str, cell: Cell, kind: str, rounds: int, steps: int) -> dict[str, Any]:
    """Train as one rank and return seconds (per step, of each round), optimizer, first_step, peak_memory, card, limit.

    The limit is this GPU's matrix-product rate in FLOP/s, measured first while the others measure theirs.
    """
    import torch

    from .ceilings import ceilings
    from .train import TimedCell

    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(max(1, cell.config.resources.cpus // size))  # as in an attempt
    if kind == "cuda":
        torch.cuda.set_device(device)
    ranks = join(rank, size, address, device)
    limit = None
    if kind == "cuda":
        ranks.barrier()
        limit = ceilings(device).flops
        torch.cuda.empty_cache()
    timed = TimedCell(cell, device, ranks)
    seconds = []
    for _ in range(rounds):
        ranks.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            timed.advance()
        timed.wait()
        seconds.append((time.perf_counter() - began) / steps)
    optimizer = statistics.median(timed.optimizer_seconds() for _ in range(3))
    card = torch.cuda.get_device_name(device) if kind == "cuda" else "CPU"
    ranks.barrier()
    return {
        "seconds": seconds, "optimizer": optimizer, "first_step": timed.first_step, "card": card, "peak_memory": timed.peak,
        "limit": limit,
    }  # fmt: skip


def table(rows: Sequence[ScalingRow]) -> str:
    """Return the rows as a Markdown table, a line per cell and number of GPUs."""
    lines = [
        f"card: {', '.join(dict.fromkeys(row.card for row in rows))}",
        "",
        "| cell | GPUs | tokens/s | range | per GPU | speed-up | efficiency | of matrix product | optimizers (ms) | peak GiB | first step (s) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.cell} | {row.gpus} | {row.tokens_per_s:,.0f} | {row.low:,.0f} to {row.high:,.0f} | "
        f"{row.tokens_per_s / row.gpus:,.0f} | {row.speedup:.2f} | {row.efficiency:.1%} | {'n/a' if row.mfu is None else f'{row.mfu:.1%}'} | {1e3 * row.optimizer:.1f} | "
        f"{row.peak_memory / 2**30:.1f} | {row.first_step:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)
