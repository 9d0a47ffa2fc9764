"""Decoding speed in tokens per second, by batch size and context length, against the limit of memory bandwidth."""

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
from ...model.inference.decode import PagedDecoder, cast_for_decoding
from ...model.kv_cache import CacheFull
from ..attempt.device import build_network
from ..grid.cell import Cell
from . import single_token
from .ceilings import Ceilings, ceilings

BATCHES, CONTEXTS = (1, 8, 64, 512), (512, 4_096, 65_536)
STEPS = 32
"""Number of steps timed together."""
PAGES, EIGHT_BITS = "pages", "pages, 8-bit cache"
"""Attention of a step by the network's own paged kernels, over keys and values in 16 and in 8 bits."""


@dataclass
class DecodeRow:
    """Results of one cell at one batch size and context. Times are per step of all texts."""

    cell: str
    texts: int
    context: int
    """Tokens of each text before the first timed step."""
    tokens_per_s: float | None
    """None if it does not fit; `unfit` holds the reason."""
    low: float | None = None
    high: float | None = None
    """Smallest and largest tokens/s over the rounds; `tokens_per_s` is the median."""
    roof: float | None = None
    """Tokens/s if each byte of weights, keys, values and states took the time of a copy and nothing else took any."""
    uncompiled: float | None = None
    """Tokens/s without the compiler, but with CUDA graphs; None if nothing was compiled."""
    eager: float | None = None
    """Tokens/s without compiler and CUDA graphs."""
    step_ms: float | None = None
    host_ms: float | None = None
    """Time per step until the host has queued it; close to `step_ms`, the host is the limit."""
    not_compiled: str | None = None
    """Reason why steps were not compiled on a GPU."""
    step_bytes: int = 0
    """Fewest bytes that a step reads or writes."""
    unfit: str | None = None
    """Reason why it does not fit or cannot run; None if it was timed."""
    attention: str = PAGES
    """Softmax attention of a step: the network's own, or a backend of torch over dense keys."""


def run(
    cells: Sequence[Cell],
    device: torch.device,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    *,
    rounds: int = 3,
    steps: int = STEPS,
    dense: Mapping[str, SDPBackend] | None = None,
    fp8: bool = False,
    tell: Callable[[str], None] = print,
) -> tuple[Ceilings, list[DecodeRow]]:
    """Time decoding of every cell, with random weights, at every batch size and context length.

    The contents of a context do not affect the time, so no tokens are read in. A size that does not fit gets a row with
    `unfit` and without times.

    Args:
        cells: Cells to time.
        device: Device; limits are measured on CUDA only, elsewhere they are 1.0 and without meaning.
        batches: Numbers of texts.
        contexts: Tokens of each text before the first step.
        rounds: Timed rounds per size.
        steps: Steps per round.
        dense: Name -> backend of torch that is timed as well for networks of plain softmax attention; None for cuDNN
            and FlashAttention on a GPU.
        fp8: True also times every cell with keys and values in 8 bits; those of a cell without such a cache are
            `unfit`.
        tell: Called with a line per row.

    Returns:
        (Limits of the device, rows). Rows are ordered by cell, context, number of texts and kind of attention.
    """
    if dense is None:
        dense = single_token.DENSE if device.type == "cuda" else {}
    limits = ceilings(device) if device.type == "cuda" else Ceilings(1.0, 1.0)
    rows = []
    for cell in cells:
        model = cast_for_decoding(
            build_network(cell.config, device).eval()
        )  # before the loop, since each call copies the weights
        ways: list[tuple[str, SDPBackend | None]] = [(name, None) for name in (PAGES, EIGHT_BITS)[: 1 + fp8]]
        ways += dense.items() if single_token.takes_dense(model) else []
        for context, texts, (attention, backend) in itertools.product(contexts, batches, ways):
            rows.append(DecodeRow(cell.slug, texts, context, None, attention=attention))
            _fill_row(rows[-1], model, backend, rounds, steps, limits)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            tell(_progress_line(rows[-1]))
    return limits, rows


def _fill_row(
    row: DecodeRow, model: Backbone, backend: SDPBackend | None, rounds: int, steps: int, limits: Ceilings
) -> None:
    """Time the row's size and set its fields in place, or set `unfit` if it does not fit.

    Memory that does not suffice sets `unfit`, and so do a network without an 8-bit cache and any RuntimeError of a
    backend of torch; one of the network's own attention is raised.

    Args:
        row: Row with cell, size and attention set.
        model: The network, cast for decoding.
        backend: Backend of torch over dense keys; None for the network's own attention.
        rounds: Timed rounds.
        steps: Steps per round.
        limits: Limits of the device, for the roof.
    """
    tokens, on_gpu, fp8 = row.context + steps, model.device.type == "cuda", row.attention == EIGHT_BITS
    row.unfit = model.no_fp8_reason() if fp8 else None
    if row.unfit is not None:
        return
    try:
        with nullcontext() if backend is None else single_token.dense_network(row.context, backend):
            paged = PagedDecoder(model, texts=row.texts, tokens=tokens, full_context=True, compiled=on_gpu, fp8=fp8)
            _time_row(row, paged, rounds, steps, limits)
    except torch.OutOfMemoryError:
        row.unfit = "out of GPU memory"
    except CacheFull as full:
        row.unfit = str(full)
    except RuntimeError as error:
        if backend is None:
            raise
        row.unfit = str(error).splitlines()[0]


def _time_row(row: DecodeRow, paged: PagedDecoder, rounds: int, steps: int, limits: Ceilings) -> None:
    """Set the row's times, rates and bytes in place from timed steps, after an untimed round.

    Rates count the tokens of all texts per second: median, smallest and largest over the rounds. The network's own
    attention is timed compiled with CUDA graphs, with graphs alone, and with neither; torch's only in the first mode.
    """
    texts, context = row.texts, row.context
    device = paged.model.device
    slot, _ = paged.begin(torch.zeros(1, dtype=torch.int64))  # allocates the pools
    paged.close(slot)
    slots = [paged.allocator.allocate(context) for _ in range(texts)]
    tokens_B = torch.zeros(texts, dtype=torch.int64, device=device)

    def seconds(graphs: bool, compiled: bool) -> tuple[float, float]:
        """Return (seconds per step, seconds per step until the host had queued it), starting from `context` tokens."""
        paged.allocator.truncate(slots, context)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            paged.step(slots, tokens_B, graphs=graphs, compiled=compiled, copy_logits=False)
        queued = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / steps, queued / steps

    # torch's attention is timed in the fastest mode only
    ways = ((True, True), (True, False), (False, False))[: None if row.attention in (PAGES, EIGHT_BITS) else 1]
    for way in ways:
        seconds(*way)
    spent = [[seconds(*way) for way in ways] for _ in range(rounds)]
    fastest, *compared_modes = zip(*spent, strict=True)
    step_seconds = [step for step, _ in fastest]
    slower_speeds = [texts / statistics.median(step for step, _ in mode) for mode in compared_modes]
    is_compiled = device.type == "cuda" and paged.not_compiled is None
    row.step_bytes = paged.step_bytes(texts, context)
    row.tokens_per_s = texts / statistics.median(step_seconds)
    row.low, row.high = texts / max(step_seconds), texts / min(step_seconds)
    row.roof = texts * limits.bytes_per_s / row.step_bytes
    if slower_speeds:
        row.uncompiled, row.eager = slower_speeds[0] if is_compiled else None, slower_speeds[1]
    row.step_ms = 1e3 * statistics.median(step_seconds)
    row.host_ms = 1e3 * statistics.median(host for _, host in fastest)
    row.not_compiled = paged.not_compiled


def _progress_line(row: DecodeRow) -> str:
    """Return the row as a line of progress: cell, attention, size, tokens/s or the reason why it does not fit."""
    speed = f"{row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s is not None else f"n/a: {row.unfit}"
    if row.not_compiled is not None:
        speed += f", not compiled: {row.not_compiled}"
    return f"{row.cell}, {row.attention}, {row.texts} texts with {row.context:,} context tokens each: {speed}"


def table(limits: Ceilings, rows: Sequence[DecodeRow]) -> str:
    """Return the rows as a Markdown table, one line per row, with the limits above and notes below.

    A row that does not fit has the reason in place of its rate.
    """
    lines = [
        limits.line,
        "",
        "| cell | attention | texts | context tokens | tokens/s | range | of roofline | not compiled | without graphs | step (ms) | host (ms) | bytes per step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row.cell} | {row.attention} | {row.texts} | {row.context:,} |"
        if row.tokens_per_s is None or row.roof is None:
            lines.append(f"{head} n/a ({row.unfit}) | | | | | | | |")
            continue
        share = row.tokens_per_s / row.roof
        uncompiled, eager = ("n/a" if value is None else f"{value:,.0f}" for value in (row.uncompiled, row.eager))
        speeds = f"{row.tokens_per_s:,.0f} | {row.low:,.0f} to {row.high:,.0f} | {share:.0%} | {uncompiled} | {eager}"
        lines.append(f"{head} {speeds} | {row.step_ms:.2f} | {row.host_ms:.2f} | {row.step_bytes:,} |")
    lines += [
        "",
        "Roofline: each byte of weights, keys, values and states moved once at the measured copy speed. Host: time until a step is",
        "queued; where it is close to the step time, the host is the limit.",
    ]
    if any(row.attention not in (PAGES, EIGHT_BITS) for row in rows):
        lines += [
            "Attention without paging: torch's, over the contiguous keys of the context only, without those of "
            "generated tokens."
        ]
    lines += sorted({f"Not compiled, {row.cell}: {row.not_compiled}." for row in rows if row.not_compiled is not None})
    return "\n".join(lines)
