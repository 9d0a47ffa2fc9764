"""Progress of a sweep as lines of text, which `launch`, `status` and `status --watch` share.

A line never exceeds the width, and no word is broken: a bar shrinks, and columns become sentences below the name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .quantities import format_duration, format_tokens
from .text import counted, fold

SPARKS = "▁▂▃▄▅▆▇█"
"""Characters of a sparkline, from the lowest value to the highest."""
SPARK_WIDTH = 16
"""Characters of a sparkline in a table."""
MIN_BAR, MAX_BAR = 10, 40
"""Limits on the characters of a bar."""
LATE_HEARTBEAT_S = 60.0
"""Age of a heartbeat, in seconds, from which it is shown."""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Progress of a sweep; `tokens_done` of `tokens` training tokens, over all cells."""

    sweep: str
    cells_done: int
    cells: int
    tokens_done: float
    tokens: float
    tokens_per_s: float | None = None
    """Sum over the cells that train now; None without any."""
    remaining_s: float | None = None
    """Estimate to the end of the sweep; None if unknown."""

    @property
    def fraction(self) -> float:
        """Share of the training tokens that are done, from 0 to 1; the share of cells where no tokens are to train."""
        done, total = (self.tokens_done, self.tokens) if self.tokens else (self.cells_done, self.cells)
        return min(1.0, max(0.0, done / total)) if total else 0.0


@dataclass(frozen=True, kw_only=True)
class RunningCell:
    """A running attempt of a cell."""

    slug: str
    phase: str
    """Phase such as "training"; the kind of an attempt that does not train."""
    step: int | None = None
    steps_total: int | None = None
    loss: float | None = None
    losses: Sequence[float] = ()
    """Training losses so far, oldest first."""
    tokens_per_s: float | None = None
    """Training speed of the cell, all of its GPUs together."""
    ranks: int = 1
    """GPUs, or processes without GPUs, that train the cell together."""
    remaining_s: float | None = None
    """Seconds of training to come."""
    host: str = ""
    """Host and GPU; empty where that goes without saying."""
    silent_s: float = 0.0
    """Age of the last heartbeat in seconds."""
    is_stale: bool = False
    """True if the heartbeat is so old that the attempt counts as dead."""

    @property
    def is_late(self) -> bool:
        """True from 60 s without a heartbeat: a long probe, a compilation, or a failure."""
        return self.silent_s >= LATE_HEARTBEAT_S

    @property
    def step_text(self) -> str:
        """Progress of a training, such as 5/100, or the phase."""
        trains = self.phase == "training" and self.step is not None
        return f"{self.step:,}/{f'{self.steps_total:,}' if self.steps_total else '?'}" if trains else self.phase

    @property
    def rate_text(self) -> str:
        """Training speed such as 1,200, with several GPUs such as "4,800 (4 x 1,200)"; empty if unknown."""
        if not self.tokens_per_s:
            return ""
        each = f" ({self.ranks} x {self.tokens_per_s / self.ranks:,.0f})" if self.ranks > 1 else ""
        return f"{self.tokens_per_s:,.0f}{each}"

    def columns(self) -> list[str]:
        """Return the texts below COLUMN_HEADINGS; unknown ones are empty."""
        return [
            self.step_text,
            f"{self.loss:.3f}" if self.loss is not None else "",
            sparkline(self.losses, SPARK_WIDTH),
            self.rate_text,
            format_duration(self.remaining_s) if self.remaining_s is not None else "",
            self.host,
            f"{format_duration(self.silent_s)} ago{' (dead?)' if self.is_stale else ''}" if self.is_late else "",
        ]


COLUMN_HEADINGS = ("step", "loss", "", "tokens/s", "time left", "machine", "heartbeat")
SPARK_COLUMN = 2
_PHRASES = ("{}", "loss {}", "{}", "{} tokens/s", "{} left", "{}", "heartbeat {}")
"""Texts of the columns in a sentence, where a terminal is too narrow for a table."""


def estimate_remaining_seconds(
    running: Sequence[tuple[float, float | None]], tokens_waiting: float, typical_rate: float | None
) -> float | None:
    """Return the estimated seconds until a sweep ends; None if no cell runs or no speed is known.

    The remaining work, in seconds of one worker, is divided by the number of cells that run now. It takes at least as
    long as the slowest running cell.

    Args:
        running: (training tokens to come, tokens per second or None) of each running cell.
        tokens_waiting: training tokens of the cells that do not run yet.
        typical_rate: tokens per second of a cell from its start to its end, probes included; None if unknown.
    """
    if not running or typical_rate is None:
        return None
    running_s = [tokens / (rate or typical_rate) for tokens, rate in running]
    return max((sum(running_s) + tokens_waiting / typical_rate) / len(running), *running_s)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as one line of at most `width` block characters, the first value on the left.

    The lowest value is the lowest block, the highest the highest, on a linear scale; equal values are all the lowest.
    More values than characters are averaged in consecutive groups of nearly equal size. Empty without values.
    """
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round(top * (mean - low) / span) if span > 0 else 0] for mean in means)


def bar(fraction: float, width: int) -> str:
    """Return a bar of `width` characters, thick for the share that is done; it is full only at 1."""
    done = int(fraction * width)
    return "━" * done + "─" * (width - done)


def progress_lines(progress: SweepProgress, width: int | None) -> list[str]:
    """Return the bar of a sweep with its share of tokens, cells, tokens, speed and time left.

    It is one line where a bar of 10 characters (MIN_BAR) fits beside the text, else the bar stands on a line of its
    own. Unknown facts are left out, and the time left where only probes run, whose time is not estimated.

    Args:
        progress: the progress.
        width: characters per line; None for no limit.
    """
    parts = [f"{progress.cells_done:,} of {counted(progress.cells, 'cell')}"]
    if progress.tokens:
        parts.append(f"{format_tokens(progress.tokens_done)} of {format_tokens(progress.tokens)} tokens")
    if progress.tokens_per_s:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.remaining_s is not None and progress.remaining_s >= 1:
        parts.append(f"about {format_duration(progress.remaining_s)} left")
    percent, facts = f"{int(100 * progress.fraction):3d} %", ", ".join(parts)
    free = MAX_BAR if width is None else width - len(progress.sweep) - len(percent) - len(facts) - 5
    if free >= MIN_BAR:
        return [f"{progress.sweep} {bar(progress.fraction, min(free, MAX_BAR))} {percent}  {facts}"]
    assert width is not None
    free = max(1, width - len(progress.sweep) - len(percent) - 2)
    first = f"{progress.sweep} {bar(progress.fraction, min(free, MAX_BAR))} {percent}"
    return [first, *fold(f"  {facts}", width).split("\n")]


def running_lines(cells: Sequence[RunningCell], width: int | None) -> list[list[str]]:
    """Return the lines of each running cell: first those of the headings, then those of each cell.

    Every cell has one line in a table if this fits the width; else there are no headings, and every cell has its slug
    and below it a sentence. Columns without any text are left out. Empty without cells.

    Args:
        cells: the running cells.
        width: characters per line; None for no limit.
    """
    if not cells:
        return []
    texts = [cell.columns() for cell in cells]
    shown = [c for c in range(len(COLUMN_HEADINGS)) if any(row[c] for row in texts)]
    rows = [("cell", *(COLUMN_HEADINGS[c] for c in shown))]
    rows += [(cell.slug, *(row[c] for c in shown)) for cell, row in zip(cells, texts, strict=True)]
    # a sparkline grows, and must not move the columns on its right
    widths = [
        max(SPARK_WIDTH if c == SPARK_COLUMN else 0, *map(len, column))
        for c, column in zip((-1, *shown), zip(*rows, strict=True), strict=True)
    ]
    if width is None or sum(widths) + 2 * len(shown) <= width:
        text_columns = {0, *(i for i, c in enumerate(shown, 1) if COLUMN_HEADINGS[c] in ("", "machine"))}
        return [
            ["  ".join(f"{text:{'<' if i in text_columns else '>'}{widths[i]}}" for i, text in enumerate(row)).rstrip()]
            for row in rows
        ]
    sentences = (
        f"{'step ' if '/' in row[0] else ''}"
        + ", ".join(phrase.format(text) for phrase, text in zip(_PHRASES, row, strict=True) if text)
        for row in texts
    )
    return [
        [],
        *([cell.slug, *fold(f"  {text}", width).split("\n")] for cell, text in zip(cells, sentences, strict=True)),
    ]


def visible_cells(cells: Sequence[Sequence[str]], height: int, styles: Sequence[str]) -> list[tuple[str, str]]:
    """Return the lines of running cells that fit a number of lines, each with its style.

    If some cells do not fit, the last line gives their number. Nothing is returned for a height of 0.

    Args:
        cells: lines of each cell, those of the headings first, as `running_lines` returns them.
        height: maximum number of lines.
        styles: style of the headings and of each cell.
    """
    lines: list[tuple[str, str]] = []
    for index, (cell, style) in enumerate(zip(cells, styles, strict=False)):
        rest = len(cells) - index
        # the line of hidden cells must fit unless this is the last cell
        if len(lines) + len(cell) + (rest > 1) > height:
            return [*lines, (f"and {rest - (not index)} more running", "")] if len(lines) < height else lines
        lines += [(line, style) for line in cell]
    return lines
