"""Tokens per second of writing, by texts at a time and tokens behind them, beside what reading the bytes would take."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from ...model.backbone import Backbone
from ...model.inference.decode import PagedDecoder, as_used
from ...model.kv_cache import CacheFull
from ..attempt.device import network
from ..grid.cell import Cell
from . import single_token
from .ceilings import Ceilings, ceilings

BATCHES, CONTEXTS = (1, 8, 64, 512), (512, 4_096, 65_536)
STEPS = 32
"""Steps that are timed together."""
PAGES = "pages"
"""Attention of a step by the network's own kernels."""


@dataclass
class DecodeRow:
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
    attention: str = PAGES
    """By what softmax attention of a step is worked out: as the network does, or over dense keys by torch's."""


def run(
    cells: Sequence[Cell],
    device: torch.device,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    *,
    rounds: int = 3,
    steps: int = STEPS,
    dense: Mapping[str, SDPBackend] | None = None,
    tell: Callable[[str], None] = print,
) -> tuple[Ceilings, list[DecodeRow]]:
    """Every cell with random weights, at every size; what the contexts hold does not matter to the time, so none is read in.

    A network of softmax attention is timed again with that of each of `dense` (None: cuDNN's and FlashAttention's on a GPU).
    """
    if dense is None:
        dense = single_token.DENSE if device.type == "cuda" else {}
    limits = ceilings(device) if device.type == "cuda" else Ceilings(1.0, 1.0)
    rows = []
    for cell in cells:
        model = as_used(network(cell.config, device).eval())  # once, or each size copies the weights
        ways: list[tuple[str, SDPBackend | None]] = [(PAGES, None)]
        ways += dense.items() if single_token.takes_dense(model) else []
        for context, texts, (attention, backend) in itertools.product(contexts, batches, ways):
            rows.append(DecodeRow(cell.slug, texts, context, None, attention=attention))
            _fill(rows[-1], model, backend, rounds, steps, limits)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            tell(_said(rows[-1]))
    return limits, rows


def _fill(
    row: DecodeRow, model: Backbone, backend: SDPBackend | None, rounds: int, steps: int, limits: Ceilings
) -> None:
    """Times the row's size with the network's own attention or that of `backend`, or says why it does not fit."""
    tokens, on_gpu = row.context + steps, model.device.type == "cuda"
    try:
        with nullcontext() if backend is None else single_token.dense_network(row.context, backend):
            paged = PagedDecoder(model, texts=row.texts, tokens=tokens, full_context=True, compiled=on_gpu)
            _time(row, paged, rounds, steps, limits)
    except torch.OutOfMemoryError:
        row.unfit = "the GPU's memory"
    except CacheFull as full:
        row.unfit = str(full)
    except RuntimeError as error:
        if backend is None:
            raise
        row.unfit = str(error).splitlines()[0]


def _time(row: DecodeRow, paged: PagedDecoder, rounds: int, steps: int, limits: Ceilings) -> None:
    """Fills the row in."""
    texts, context = row.texts, row.context
    device = paged.model.device
    slot, _ = paged.begin(torch.zeros(1, dtype=torch.int64))  # makes the pools
    paged.close(slot)
    slots = [paged.book.open(context) for _ in range(texts)]
    tokens_B = torch.zeros(texts, dtype=torch.int64, device=device)

    def seconds(graphs: bool, compiled: bool) -> tuple[float, float]:
        """(of a step, of the host's part of it), from `context` tokens on."""
        paged.book.shorten(slots, context)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            paged.step(slots, tokens_B, graphs=graphs, compiled=compiled, own=False)
        asked = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / steps, asked / steps

    # what others' attention takes is asked of the fastest way alone
    ways = ((True, True), (True, False), (False, False))[: None if row.attention == PAGES else 1]
    for way in ways:
        seconds(*way)
    spent = [[seconds(*way) for way in ways] for _ in range(rounds)]
    ours, *others = zip(*spent, strict=True)
    whole = [step for step, _ in ours]
    slower = [texts / statistics.median(step for step, _ in other) for other in others]
    asked_for = device.type == "cuda" and paged.not_compiled is None
    row.step_bytes = paged.step_bytes(texts, context)
    row.tokens_per_s = texts / statistics.median(whole)
    row.low, row.high = texts / max(whole), texts / min(whole)
    row.roof = texts * limits.bytes_per_s / row.step_bytes
    if slower:
        row.uncompiled, row.eager = slower[0] if asked_for else None, slower[1]
    row.step_ms = 1e3 * statistics.median(whole)
    row.host_ms = 1e3 * statistics.median(host for _, host in ours)
    row.not_compiled = paged.not_compiled


def _said(row: DecodeRow) -> str:
    found = f"{row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s is not None else f"n/a: {row.unfit}"
    if row.not_compiled is not None:
        found += f", not compiled: {row.not_compiled}"
    return f"{row.cell}, {row.attention}, {row.texts} texts, {row.context:,} tokens behind each: {found}"


def table(limits: Ceilings, rows: Sequence[DecodeRow]) -> str:
    """Markdown."""
    lines = [
        limits.line,
        "",
        "| cell | attention | texts | tokens behind | tokens/s | range | of the roof | not compiled | without graphs | step (ms) | host (ms) | bytes a step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row.cell} | {row.attention} | {row.texts} | {row.context:,} |"
        if row.tokens_per_s is None or row.roof is None:
            lines.append(f"{head} n/a ({row.unfit}) | | | | | | | |")
            continue
        share = row.tokens_per_s / row.roof
        uncompiled, eager = ("n/a" if found is None else f"{found:,.0f}" for found in (row.uncompiled, row.eager))
        speeds = f"{row.tokens_per_s:,.0f} | {row.low:,.0f} to {row.high:,.0f} | {share:.0%} | {uncompiled} | {eager}"
        lines.append(f"{head} {speeds} | {row.step_ms:.2f} | {row.host_ms:.2f} | {row.step_bytes:,} |")
    lines += [
        "",
        "Roof: each byte of weights, keys, values and states at the speed of the copy, and nothing else. Host: until a step is asked",
        "for; where that is about the step's time, the host is the limit.",
    ]
    if any(row.attention != PAGES for row in rows):
        lines += [
            "Attention other than in pages: torch's, over keys that lie in one piece, without those of the tokens written meanwhile."
        ]
    lines += sorted({f"Not compiled, {row.cell}: {row.not_compiled}." for row in rows if row.not_compiled is not None})
    return "\n".join(lines)
