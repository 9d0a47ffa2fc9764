"""Progress of a launch: a live view on a terminal, else a line per finished attempt and one every 15 s at least."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from ...results.console.progress import (
    RunningCell,
    SweepProgress,
    estimate_remaining_seconds,
    progress_lines,
    running_lines,
    visible_cells,
)
from ...results.console.quantities import format_duration, format_tokens
from ...results.console.streams import OutputClosed
from ...results.console.text import counted, fold, sanitize_line, sanitize_text
from ...results.errors import StoreError, WriteRefused
from ...results.failure_classes import PRUNED
from ...results.main_results import MainResult, main_results
from ...results.store.records import Attempt, MeasuredValue
from ..grid.cell import Cell
from ..host.signals import signals_blocked
from ..planning.planner import Plan, Task

LINE_S = 15.0
"""Seconds without output after which a launch without a terminal prints a summary line."""
RATE_SAMPLE = 20
"""Number of last finished trainings whose speed enters the estimated time."""
STATE_COLOURS = {"done": "green", "failed": "red", "diverged": "yellow", "interrupted": "yellow"}
"""Colour of each final state; white for any other."""


class BestEffortStream:
    """Text stream that ignores failed writes, such as to a closed terminal, an exited reader or a full disk.

    They must not end a launch. `write` returns the length of the text in any case. Every attribute other than `write`
    and `flush` is that of the wrapped stream.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, WriteRefused, OutputClosed):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, WriteRefused, OutputClosed):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class SafeConsole(Console):
    """Rich console that removes control characters and passwords from strings and ignores failed writes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.file = cast(IO[str], BestEffortStream(self.file))

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich's console, with control characters and passwords removed from every string.

        On a terminal, strings are folded to its width, between words.
        """
        width = self.width if self.is_terminal else None
        super().print(
            *(fold(sanitize_text(item), width) if isinstance(item, str) else item for item in objects), **options
        )


@dataclass
class _RunningAttempt:
    """A running attempt, and the training losses that its display has seen."""

    task: Task
    attempt: Attempt
    losses: list[float] = field(default_factory=list)

    @property
    def trained_tokens(self) -> int:
        """Training tokens so far; 0 for an attempt that does not train."""
        return self.attempt.step * self.task.cell.config.train.batch_tokens if self.task.kind == "train" else 0

    @property
    def rate(self) -> float | None:
        """Training tokens per second; None outside training."""
        return self.attempt.tokens_per_s if self.attempt.phase == "training" else None

    @property
    def remaining_tokens(self) -> int:
        """Training tokens to come."""
        train = self.task.cell.config.train
        return max(0, train.steps * train.batch_tokens - self.trained_tokens) if self.task.kind == "train" else 0

    def update(self, attempt: Attempt) -> None:
        """Take the newest record of the attempt, with its loss if it has trained on."""
        if attempt.loss is not None and (attempt.step != self.attempt.step or not self.losses):
            self.losses.append(attempt.loss)
        self.attempt = attempt

    def row(self) -> RunningCell:
        """Return the attempt as a row of the table of running cells."""
        attempt, rate = self.attempt, self.rate
        return RunningCell(
            slug=sanitize_line(self.task.cell.slug), phase=attempt.phase or "starting", step=attempt.step,
            steps_total=self.task.cell.config.train.steps, loss=attempt.loss, losses=self.losses, tokens_per_s=rate,
            ranks=self.task.cell.config.resources.n_ranks,
            remaining_s=self.remaining_tokens / rate if rate else None,
        )  # fmt: skip


class ProgressDisplay:
    """Listener of a supervisor that shows progress; used as a context manager around the launch.

    A terminal shows the bar of the sweep, its running cells and the best one, drawn once a second. Elsewhere a line is
    printed per finished attempt, and one after 15 s without output.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        *,
        name: str = "cells",
        results: Callable[[str], Iterable[MeasuredValue]] = lambda cell_id: (),
        line_s: float = LINE_S,
    ) -> None:
        """Create the display without showing it; nothing is printed yet.

        Args:
            console: Console to draw on if it is a terminal, else to print lines on.
            total: Number of attempts expected; `set_total` changes it.
            name: Name before the bar, that of the sweep.
            results: Returns the measurements of a cell by its id; called once per finished attempt.
            line_s: Seconds without output after which a summary line is printed where there is no terminal; by default
                15.
        """
        self.console, self._name, self._results = console, name, results
        self._running: dict[int, _RunningAttempt] = {}
        """Running attempts by id."""
        self._waiting: set[str] = set()
        self._done = 0
        self._total = total
        self._tokens_total = 0
        self._counts: Counter[str] = Counter()
        self._tokens: dict[str, int] = {}
        """Tokens trained so far, by cell id."""
        self._abandoned: dict[str, int] = {}
        """Tokens that will not be trained, by id of a failed, diverged or pruned cell."""
        self._rates: deque[float] = deque(maxlen=RATE_SAMPLE)
        """Tokens per second of the last finished trainings, start and probes included."""
        self._best: tuple[str, MainResult] | None = None
        """Slug and first main result of the best cell so far."""
        self._lock = threading.Lock()
        self._line_s = line_s
        self._printed_at = time.monotonic()
        self._stopped = threading.Event()
        self._reporter = threading.Thread(target=self._report_regularly, daemon=True)
        # the last one, since rich draws at once
        self._live = Live(get_renderable=self.screen_view, console=console, refresh_per_second=1, transient=True)

    def __enter__(self) -> ProgressDisplay:
        """Show the progress, or start the thread that prints summaries where there is no terminal.

        Stop signals are blocked in the threads that this starts, so that they reach the main thread.
        """
        with signals_blocked():  # stop signals must reach the main thread, not the thread that draws
            if self.console.is_terminal:
                self._live.start()
            else:
                self._reporter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread that draws or prints, and remove the bar; exceptions pass through."""
        self._stopped.set()
        if self._reporter.is_alive():
            self._reporter.join()
        self._live.stop()

    def _report_regularly(self) -> None:
        """Print a summary line whenever none was printed for `line_s` seconds, until the display is closed."""
        while not self._stopped.wait(max(0.0, self._printed_at + self._line_s - time.monotonic())):
            if time.monotonic() >= self._printed_at + self._line_s:
                self._print(self.summary())

    def _print(self, line: str, word: str = "") -> None:
        """Print a line, folded to a terminal, with its final state in its colour.

        Args:
            line: The line.
            word: Final state, which " in " follows; empty for none.
        """
        self._printed_at = time.monotonic()
        text = Text(fold(sanitize_line(line), self.console.width if self.console.is_terminal else None))
        start = text.plain.find(f" {word} in ") + 1
        if word and start:
            text.stylize(STATE_COLOURS.get(word, ""), start, start + len(word))
        self.console.print(text, highlight=False, soft_wrap=True)

    def progress(self) -> SweepProgress:
        """Return the progress of this launch over the cells and tokens that it has to work on; safe in any thread."""
        with self._lock:
            running, trained = list(self._running.values()), sum(self._tokens.values())
            tokens = self._tokens_total - sum(self._abandoned.values())
            rates = [entry.rate for entry in running if entry.rate]
            typical = statistics.median(self._rates) if self._rates else statistics.mean(rates) if rates else None
            done, total = self._done, self._total
        work = [(float(entry.remaining_tokens), entry.rate) for entry in running]
        waiting = max(0.0, tokens - trained - sum(tokens for tokens, _ in work))
        return SweepProgress(
            sweep=self._name, cells_done=done, cells=total, tokens_done=trained, tokens=max(tokens, trained),
            tokens_per_s=sum(rates) or None, remaining_s=estimate_remaining_seconds(work, waiting, typical),
        )  # fmt: skip

    def screen_view(self) -> RenderableType:
        """Return the bar, the running cells and the best cell, cut to the height of the terminal."""
        width, height = self.console.size
        with self._lock:
            rows, best = [entry.row() for entry in self._running.values()], self._best
        head = progress_lines(self.progress(), width)
        foot = fold(f"best so far: {best[0]}, {best[1].text}", width).split("\n") if best is not None else []
        cells = running_lines(rows, width)
        # the cursor needs a line
        shown = visible_cells(cells, height - len(head) - len(foot) - 1, ["dim", *[""] * len(rows)])
        return Group(
            *(Text(line, style="bold") for line in head),
            *(Text(line, style=style) for line, style in shown),
            *(Text(line, style="green") for line in foot),
        )

    def summary(self) -> str:
        """Return one line of progress: cells by final state, running attempts by phase, tokens, speed and time left.

        Tokens are those of training, over all cells that this display has seen. The rate is the sum over attempts in
        the phase "training", and is left out at 0. Safe to call from another thread.
        """
        progress = self.progress()
        with self._lock:
            counts, attempts = dict(self._counts), [entry.attempt for entry in self._running.values()]
        failed = "".join(f", {count} {word}" for word, count in sorted(counts.items()) if word != "done")
        phases = Counter(attempt.phase or "starting" for attempt in attempts)
        running = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items())) or "none"
        trained = progress.tokens_done
        total = f" of {format_tokens(progress.tokens)}" if progress.tokens > trained > 0 else ""
        remaining_s = progress.remaining_s
        return (
            f"cells: {counts.get('done', 0)} of {self._total} done{failed}; running: {running}; "
            f"{format_tokens(trained)}{total} tokens trained"
            + (f", {progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else "")
            + (f", about {format_duration(remaining_s)} left" if remaining_s and remaining_s >= 1 else "")
        )

    def set_total(self, total: int, tokens: int = 0) -> None:
        """Set the number of attempts to come, and raise that of the tokens that they train, which never falls."""
        self._total = total
        self._tokens_total = max(self._tokens_total, tokens)

    def started(self, task: Task, attempt: Attempt) -> None:
        """Add an attempt whose process is starting; prints nothing.

        The total is raised if there are more attempts than expected.
        """
        self._waiting.discard(task.cell.id)
        with self._lock:
            self._abandoned.pop(task.cell.id, None)
            self._running[attempt.id] = entry = _RunningAttempt(task, attempt)
            self._tokens[task.cell.id] = entry.trained_tokens
        self.set_total(max(self._total, self._done + len(self._running)))  # a task source may add cells to the plan

    def running(self, attempts: Sequence[Attempt]) -> None:
        """Take the records of these running attempts; attempts that `started` did not announce are ignored."""
        with self._lock:
            for attempt in attempts:
                entry = self._running.get(attempt.id)
                if entry is not None:
                    entry.update(attempt)
                    self._tokens[entry.task.cell.id] = entry.trained_tokens

    def ended(self, task: Task, attempt: Attempt) -> None:
        """Remove the attempt and print a line with its final state, duration, results or cause, and a hint to its log.

        Only done, diverged, failed and pruned attempts count towards the total; the cell of an interrupted one goes on.
        A failed attempt that is retried counts as well.
        """
        word = PRUNED if attempt.failure == PRUNED else attempt.state
        final = word in ("done", "diverged", "failed", PRUNED)
        seconds = (attempt.finished_at - attempt.started_at).total_seconds() if attempt.finished_at else 0.0
        entry = _RunningAttempt(task, attempt)
        with self._lock:
            self._running.pop(attempt.id, None)
            self._done += final
            self._counts.update([word] * final)
            self._tokens[task.cell.id] = entry.trained_tokens
            if final and word != "done":
                self._abandoned[task.cell.id] = entry.remaining_tokens
            if word == "done" and task.kind == "train" and attempt.number == 1 and seconds > 0:
                self._rates.append(entry.trained_tokens / seconds)
        results = self._main_results(task.cell) if word == "done" else []
        cause = f": {attempt.cause}" if attempt.cause else ""
        hint = f"; atma-sweep logs {task.cell.slug}" if attempt.state == "failed" else ""
        numbers = f": {', '.join(result.text for result in results)}" if results else ""
        counter = f"[{self._done:>{len(str(self._total))}}/{self._total}]"
        self._print(f"{counter} {task.cell.slug} {word} in {format_duration(seconds)}{numbers}{cause}{hint}", word)

    def _main_results(self, cell: Cell) -> list[MainResult]:
        """Return the main results of a cell that has ended, and remember the cell if it is the best so far.

        The best cell is that with the best first result, which is the validation loss unless none is measured. A
        database that does not answer gives no results.
        """
        try:
            results = main_results(self._results(cell.id))
        except (StoreError, DBAPIError):
            return []
        first, best = next(iter(results), None), self._best
        is_same_measure = first is not None and best is not None and first.name == best[1].name
        if first is not None and (best is None or (is_same_measure and first.is_better_than(best[1].value))):
            self._best = sanitize_line(cell.slug), first
        return results

    def waiting(self, cell: Cell) -> None:
        """Print once per cell that another sweep trains it."""
        if cell.id not in self._waiting:
            self._waiting.add(cell.id)
            self._print(f"{cell.slug} is being trained by another sweep; waiting for its result")


def training_tokens(plan: Plan) -> int:
    """Return the tokens that the steps of a plan's trainings amount to, which `plan.tokens` may exceed by a step each."""
    return sum(task.cell.config.train.steps * task.cell.config.train.batch_tokens for task in plan.training)


def describe_plan(plan: Plan, sweep: str, remarks: Sequence[str] = ()) -> list[str]:
    """Return a plan as lines for people: cells by standing, work and tokens, damaged weights, budget, disk.

    Standings are sorted by name: diverged, done, failed, interrupted, needs-eval, new, pruned, running, weights gone;
    those without cells are left out. The last three kinds of lines appear only where the plan has them. For a study the
    first line describes its trials.

    Args:
        plan: Plan of a launch.
        sweep: Name of the sweep.
        remarks: Lines to append.
    """
    counts = ", ".join(f"{count} {word}" for word, count in sorted(plan.counts.items()))
    lines = [
        f"{sweep}: {counted(len(plan.cells), 'cell')}: {counts}"
        if plan.study is None
        else f"{sweep}: {plan.study.describe()}"
    ]
    if plan.num_filtered_out:
        lines[0] += f"; {plan.num_filtered_out} more excluded by --only"
    lines.append(
        f"to train: {counted(len(plan.training), 'cell')}, {plan.tokens:,} tokens in total; to evaluate: {len(plan.evaluating)}"
    )
    n_weights_gone = plan.counts["weights gone"]
    if n_weights_gone:
        lines.append(
            f"measurements missing and weights gone: {counted(n_weights_gone, 'trained cell')}; --retrain trains them again"
        )
    lines += plan.damaged
    lines += plan.budget.describe() if plan.budget is not None else []
    lines += plan.disk.describe() if plan.disk is not None else []
    return [*lines, *remarks]
