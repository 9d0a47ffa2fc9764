"""Tokens per second of writing, by texts at a time and tokens behind them, beside what reading the bytes would take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from ...model.cache import CacheFull
from ...model.decode import Paged, as_used
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
    uncompiled: float | None = None
    """Tokens/s without the compiler, still with CUDA graphs; None where the compiler took nothing."""
    eager: float | None = None
    """Without both."""
    step_ms: float | None = None
    host_ms: float | None = None
    """Of a step, the time until the host has asked the device for it. Where it is about `step_ms`, the host is the limit."""
    not_compiled: str | None = None
    """Why steps went without the compiler on a GPU."""
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
        model = as_used(network(cell.config, device).eval())  # once, or each size copies the weights
        for context in contexts:
            for texts in batches:
                tokens = context + 3 * (rounds + 1) * steps
                try:
                    paged = Paged(model, texts=texts, tokens=tokens, full_context=True, compiled=device.type == "cuda")
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

    def seconds(graphs: bool, compiled: bool) -> tuple[float, float]:
        """(of a step, of the host's part of it)."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            paged.step(slots, tokens_B, graphs=graphs, compiled=compiled, own=False)
        asked = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / steps, asked / steps

    ways = ((True, True), (True, False), (False, False))
    for way in ways:
        seconds(*way)
    spent = [[seconds(*way) for way in ways] for _ in range(rounds)]
    ours, uncompiled, eager = zip(*spent, strict=True)
    whole = [step for step, _ in ours]
    asked_for = device.type == "cuda" and paged.not_compiled is None
    step_bytes = paged.step_bytes(texts, context)
    return Row(
        cell=slug,
        texts=texts,
        context=context,
        tokens_per_s=texts / statistics.median(whole),
        low=texts / max(whole),
        high=texts / min(whole),
        roof=texts * limits.bytes_per_s / step_bytes,
        uncompiled=texts / statistics.median(step for step, _ in uncompiled) if asked_for else None,
        eager=texts / statistics.median(step for step, _ in eager),
        step_ms=1e3 * statistics.median(whole),
        host_ms=1e3 * statistics.median(host for _, host in ours),
        not_compiled=paged.not_compiled,
        step_bytes=step_bytes,
    )


def _said(row: Row) -> str:
    found = f"{row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s is not None else f"n/a: {row.unfit}"
    if row.not_compiled is not None:
        found += f", not compiled: {row.not_compiled}"
    return f"{row.cell}, {row.texts} texts, {row.context:,} tokens behind each: {found}"


def table(limits: Ceilings, rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        limits.line,
        "",
        "| cell | texts | tokens behind | tokens/s | range | of the roof | not compiled | without graphs | step (ms) | host (ms) | bytes a step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row.cell} | {row.texts} | {row.context:,} |"
        if row.tokens_per_s is None or row.roof is None:
            lines.append(f"{head} n/a ({row.unfit}) | | | | | | | |")
            continue
        share = row.tokens_per_s / row.roof
        uncompiled = "n/a" if row.uncompiled is None else f"{row.uncompiled:,.0f}"
        speeds = f"{row.tokens_per_s:,.0f} | {row.low:,.0f} to {row.high:,.0f} | {share:.0%} | {uncompiled} | {row.eager:,.0f}"
        lines.append(f"{head} {speeds} | {row.step_ms:.2f} | {row.host_ms:.2f} | {row.step_bytes:,} |")
    lines += [
        "",
        "Roof: each byte of weights, keys, values and states at the speed of the copy, and nothing else. Host: until a step is asked",
        "for; where that is about the step's time, the host is the limit.",
    ]
    lines += sorted({f"Not compiled, {row.cell}: {row.not_compiled}." for row in rows if row.not_compiled is not None})
    return "\n".join(lines)


def as_dict(limits: Ceilings, rows: Sequence[Row]) -> dict[str, object]:
    """For JSON."""
    return {"ceilings": limits._asdict(), "rows": [asdict(row) for row in rows]}
