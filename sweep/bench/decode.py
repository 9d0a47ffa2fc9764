"""Tokens per second of writing, by texts at a time and tokens behind them, beside what reading the bytes would take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from ...model.cache import CacheFull
from ...model.decode import Paged
from ..attempt.device import network
from ..grid.cell import Cell
from .ceilings import Ceilings, ceilings

BATCHES, CONTEXTS = (1, 8, 64, 512), (512, 4_096, 65_536)
STEPS = 32
"""Steps that are timed together."""


@dataclass
class Row:
    """One cell at one size. Times are of a step of all its texts."""

    cell: str
    texts: int
    context: int
    """Tokens behind each text when the first step is timed."""
    tokens_per_s: float | None
    """None where it does not fit, of which `unfit` says why."""
    low: float | None = None
    high: float | None = None
    roof: float | None = None
    """Tokens/s if each byte of weights, keys, values and states took its time of a copy, and nothing else any."""
    eager: float | None = None
    """Without CUDA graphs."""
    step_bytes: int = 0
    """Bytes that a step cannot but read or write."""
    unfit: str | None = None


def run(
    cells: Sequence[Cell],
    device: torch.device,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    *,
    rounds: int = 3,
    steps: int = STEPS,
    tell: Callable[[str], None] = print,
) -> tuple[Ceilings, list[Row]]:
    """Every cell with random weights, at every size; what the contexts hold does not matter to the time, so none is read in."""
    limits = ceilings(device) if device.type == "cuda" else Ceilings(1.0, 1.0)
    rows = []
    for cell in cells:
        model = network(cell.config, device).eval()
        for context in contexts:
            for texts in batches:
                tokens = context + 2 * (rounds + 2) * steps
                try:
                    paged = Paged(model, texts=texts, tokens=tokens, full_context=True)
                    rows.append(_timed(cell.slug, paged, texts, context, rounds, steps, limits))
                except torch.OutOfMemoryError:
                    rows.append(Row(cell.slug, texts, context, None, unfit="the GPU's memory"))
                except CacheFull as full:
                    rows.append(Row(cell.slug, texts, context, None, unfit=str(full)))
                paged = None  # type: ignore[assignment]  # its memory goes before the next one takes its own
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                tell(_said(rows[-1]))
    return limits, rows


def _timed(slug: str, paged: Paged, texts: int, context: int, rounds: int, steps: int, limits: Ceilings) -> Row:
    device = paged.model.device
    slot, _ = paged.begin(torch.zeros(1, dtype=torch.int64))  # makes the pools
    paged.close(slot)
    slots = [paged.book.open(context) for _ in range(texts)]
    tokens_B = torch.zeros(texts, dtype=torch.int64, device=device)

    def seconds(graphs: bool) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            paged.step(slots, tokens_B, graphs=graphs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / steps

    seconds(True)
    seconds(False)
    spent = [(seconds(True), seconds(False)) for _ in range(rounds)]
    replayed, eager = zip(*spent, strict=True)
    step_bytes = paged.step_bytes(texts, context)
    return Row(
        cell=slug,
        texts=texts,
        context=context,
        tokens_per_s=texts / statistics.median(replayed),
        low=texts / max(replayed),
        high=texts / min(replayed),
        roof=texts * limits.bytes_per_s / step_bytes,
        eager=texts / statistics.median(eager),
        step_bytes=step_bytes,
    )


def _said(row: Row) -> str:
    found = f"{row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s is not None else f"n/a: {row.unfit}"
    return f"{row.cell}, {row.texts} texts, {row.context:,} tokens behind each: {found}"


def table(limits: Ceilings, rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        limits.line,
        "",
        "| cell | texts | tokens behind | tokens/s | range | of the roof | without graphs | bytes a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row.cell} | {row.texts} | {row.context:,} |"
        if row.tokens_per_s is None or row.roof is None:
            lines.append(f"{head} n/a ({row.unfit}) | | | | |")
            continue
        share = row.tokens_per_s / row.roof
        lines.append(
            f"{head} {row.tokens_per_s:,.0f} | {row.low:,.0f} to {row.high:,.0f} | {share:.0%} | {row.eager:,.0f} | {row.step_bytes:,} |"
        )
    lines += ["", "Roof: each byte of weights, keys, values and states at the speed of the copy, and nothing else."]
    return "\n".join(lines)


def as_dict(limits: Ceilings, rows: Sequence[Row]) -> dict[str, object]:
    """For JSON."""
    return {"ceilings": limits._asdict(), "rows": [asdict(row) for row in rows]}
