"""Progress of a launch: bars on a terminal, else a line per finished attempt and one every 15 s at least."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ...results.console.streams import OutputClosed
from ...results.console.text import counted, sanitize_line, sanitize_text
from ...results.errors import WriteRefused
from ...results.failure_classes import PRUNED
from ...results.store.records import Attempt
from ..grid.cell import Cell
from ..host.signals import signals_blocked
from ..planning.planner import Plan, Task
from ..units import amount

LINE_S = 15.0
"""Seconds without output after which a launch without a terminal prints a summary line."""
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
        """Print like rich's console, with control characters and passwords removed from every string."""
        super().print(*(sanitize_text(item) if isinstance(item, str) else item for item in objects), **options)


def _escaped(text: str) -> str:
    """Return a name without control characters and with rich markup escaped."""
    return escape(sanitize_line(text))


class ProgressDisplay:
    """Listener of a supervisor that shows progress; used as a context manager around the launch."""

    def __init__(self, console: Console, total: int, *, line_s: float = LINE_S) -> None:
        """Create the bars without showing them; nothing is printed yet.

        Args:
            console: Console to draw on if it is a terminal, else to print lines on.
            total: Number of attempts expected; `set_total` changes it.
            line_s: Seconds without output after which a summary line is printed where there is no terminal; by default
                15.
        """
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._total_bar = self._bars.add_task("[bold]cells", total=total, note="")
        self._rows: dict[int, tuple[TaskID, Task]] = {}
        """Bar and task of each running attempt, by attempt id."""
        self._waiting: set[str] = set()
        self._done = 0
        self._total = total
        self._tokens_total = 0
        self._counts: Counter[str] = Counter()
        self._attempts: dict[int, Attempt] = {}
        """Last known record of each running attempt, by attempt id."""
        self._tokens: dict[str, int] = {}
        """Tokens trained so far, by cell id."""
        self._lock = threading.Lock()
        self._line_s = line_s
        self._printed_at = time.monotonic()
        self._stopped = threading.Event()
        self._reporter = threading.Thread(target=self._report_regularly, daemon=True)

    def __enter__(self) -> ProgressDisplay:
        """Show the bars, or start the thread that prints summaries where there is no terminal.

        Stop signals are blocked in the threads that this starts, so that they reach the main thread.
        """
        with signals_blocked():  # stop signals must reach the main thread, not the thread that draws
            self._bars.start()
            if not self.console.is_terminal:
                self._reporter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the summary thread, wait for its end, and remove the bars; exceptions pass through."""
        self._stopped.set()
        if self._reporter.is_alive():
            self._reporter.join()
        self._bars.stop()

    def _report_regularly(self) -> None:
        """Print a summary line whenever none was printed for `line_s` seconds, until the display is closed."""
        while not self._stopped.wait(max(0.0, self._printed_at + self._line_s - time.monotonic())):
            if time.monotonic() >= self._printed_at + self._line_s:
                self._print(escape(self.summary()))

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """Return one line of progress: cells by final state, running attempts by phase, tokens, and tokens per second.

        Tokens are those of training, over all cells that this display has seen. The rate is the sum over attempts in
        the phase "training", and is left out at 0. Safe to call from another thread.
        """
        with self._lock:
            counts, attempts, trained = dict(self._counts), list(self._attempts.values()), sum(self._tokens.values())
        failed = "".join(f", {count} {word}" for word, count in sorted(counts.items()) if word != "done")
        phases = Counter(attempt.phase or "starting" for attempt in attempts)
        running = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items())) or "none"
        total = f" of {amount(self._tokens_total)}" if self._tokens_total >= trained > 0 else ""
        rate = sum(attempt.tokens_per_s or 0.0 for attempt in attempts if attempt.phase == "training")
        return (
            f"cells: {counts.get('done', 0)} of {self._total} done{failed}; running: {running}; "
            f"{amount(trained)}{total} tokens trained" + (f", {rate:,.0f} tokens/s" if rate else "")
        )

    def set_total(self, total: int, tokens: int = 0) -> None:
        """Set the number of attempts to come, and raise that of the tokens that they train, which never falls."""
        self._total = total
        self._tokens_total = max(self._tokens_total, tokens)
        self._bars.update(self._total_bar, total=total)

    def started(self, task: Task, attempt: Attempt) -> None:
        """Add a bar for an attempt whose process is starting; prints nothing.

        The total is raised if there are more attempts than expected.
        """
        self._waiting.discard(task.cell.id)
        steps = task.cell.config.train.steps
        with self._lock:
            self._note_progress(task, attempt)
        self._rows[attempt.id] = self._bars.add_task(_escaped(task.cell.slug), total=steps, note="starting"), task
        self.set_total(max(self._total, self._done + len(self._rows)))  # a task source may add cells to the plan

    def running(self, attempts: Sequence[Attempt]) -> None:
        """Update the bars of these running attempts; attempts that `started` did not announce are ignored."""
        for attempt in attempts:
            if attempt.id in self._rows:
                bar, task = self._rows[attempt.id]
                self._bars.update(bar, completed=attempt.step, note=_progress_note(attempt))
                with self._lock:
                    self._note_progress(task, attempt)

    def ended(self, task: Task, attempt: Attempt) -> None:
        """Remove the attempt's bar and print a line with its final state, duration, cause and a hint to its log.

        Only done, diverged, failed and pruned attempts count towards the total; the cell of an interrupted one goes on.
        A failed attempt that is retried counts as well.
        """
        row = self._rows.pop(attempt.id, None)
        if row is not None:
            self._bars.remove_task(row[0])
        word = PRUNED if attempt.failure == PRUNED else attempt.state
        final = word in ("done", "diverged", "failed", PRUNED)
        self._done += final
        with self._lock:
            self._note_progress(task, attempt)
            self._attempts.pop(attempt.id, None)
            self._counts.update([word] * final)
        self._bars.update(self._total_bar, completed=self._done)
        colour = STATE_COLOURS.get(word, "white")
        cause = f": {_escaped(attempt.cause)}" if attempt.cause else ""
        hint = f"; atma-sweep logs {_escaped(task.cell.slug)}" if attempt.state == "failed" else ""
        seconds = (attempt.finished_at - attempt.started_at).total_seconds() if attempt.finished_at else 0.0
        self._print(
            f"[{self._done:>{len(str(self._total))}}/{self._total}] {_escaped(task.cell.slug)} "
            f"[{colour}]{word}[/{colour}] in {seconds:.0f} s{cause}{hint}"
        )

    def _note_progress(self, task: Task, attempt: Attempt) -> None:
        """Remember an attempt's record and, of a training, its tokens so far. The caller holds the lock."""
        self._attempts[attempt.id] = attempt
        if task.kind == "train":
            self._tokens[task.cell.id] = attempt.step * task.cell.config.train.batch_tokens

    def waiting(self, cell: Cell) -> None:
        """Print once per cell that another sweep trains it."""
        if cell.id not in self._waiting:
            self._waiting.add(cell.id)
            self._print(f"{_escaped(cell.slug)} is being trained by another sweep; waiting for its result")


def _progress_note(attempt: Attempt) -> str:
    """Return "loss N.NNN N tok/s" for an attempt in the phase "training" with a loss, else its phase.

    Without a speed the rate is left out and the text ends with a space.
    """
    if attempt.phase != "training" or attempt.loss is None:
        return attempt.phase
    rate = f"{attempt.tokens_per_s:,.0f} tok/s" if attempt.tokens_per_s else ""
    return f"loss {attempt.loss:.3f} {rate}"


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
