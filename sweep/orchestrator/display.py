"""Progress of a launch: bars on a terminal; elsewhere a line per finished attempt, and one every 15 s at least."""

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
from ...results.console.text import counted, plain, sanitize_text
from ...results.errors import WriteRefused
from ...results.failure_classes import PRUNED
from ...results.store.records import Attempt
from ..grid.cell import Cell
from ..host.signals import held
from ..planning.planner import Plan, Task
from ..units import amount

LINE_S = 15.0
"""Seconds without a line after which a launch that does not draw says how far it is."""
COLOURS = {"done": "green", "failed": "red", "diverged": "yellow", "interrupted": "yellow"}


class BestEffortStream:
    """A text stream that takes what it is given, even when its terminal is gone, its reader has left or its disk is full:
    what a launch says is no reason to end it."""

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
    """A console whose lines may hold text from outside, and that nobody need read."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.file = cast(IO[str], BestEffortStream(self.file))

    def print(self, *objects: Any, **how: Any) -> None:
        """As rich's, without what steers a terminal and without passwords."""
        super().print(*(sanitize_text(one) if isinstance(one, str) else one for one in objects), **how)


def _word(text: str) -> str:
    """A name among words that hold markup."""
    return escape(plain(text))


class ProgressDisplay:
    """A supervisor's Listener that draws."""

    def __init__(self, console: Console, total: int, *, line_s: float = LINE_S) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._all = self._bars.add_task("[bold]cells", total=total, note="")
        self._rows: dict[int, tuple[TaskID, Task]] = {}
        """By attempt: its bar, and what it does."""
        self._waiting: set[str] = set()
        self._done = 0
        self._total = total
        self._tokens_total = 0
        self._ends: Counter[str] = Counter()
        self._attempts: dict[int, Attempt] = {}
        """Those that run, as they stood last."""
        self._tokens: dict[str, int] = {}
        """Trained so far, by cell."""
        self._lock = threading.Lock()
        self._line_s = line_s
        self._printed_at = time.monotonic()
        self._over = threading.Event()
        self._reporter = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> ProgressDisplay:
        with held():  # a request to stop is the main thread's to hear, not that of the thread which draws
            self._bars.start()
            if not self.console.is_terminal:
                self._reporter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._reporter.is_alive():
            self._reporter.join()
        self._bars.stop()

    def _report(self) -> None:
        """Print a line whenever none was printed for a while, whatever the supervisor waits for meanwhile."""
        while not self._over.wait(max(0.0, self._printed_at + self._line_s - time.monotonic())):
            if time.monotonic() >= self._printed_at + self._line_s:
                self._print(escape(self.summary()))

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """Return how far the launch is: cells by how they ended, attempts by phase, tokens, and tokens per second."""
        with self._lock:
            ends, attempts, trained = dict(self._ends), list(self._attempts.values()), sum(self._tokens.values())
        failed = "".join(f", {count} {word}" for word, count in sorted(ends.items()) if word != "done")
        phases = Counter(attempt.phase or "starting" for attempt in attempts)
        running = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items())) or "none"
        total = f" of {amount(self._tokens_total)}" if self._tokens_total >= trained > 0 else ""
        rate = sum(attempt.tokens_per_s or 0.0 for attempt in attempts if attempt.phase == "training")
        return (
            f"cells: {ends.get('done', 0)} of {self._total} done{failed}; running: {running}; "
            f"{amount(trained)}{total} tokens trained" + (f", {rate:,.0f} tokens/s" if rate else "")
        )

    def expect(self, total: int, tokens: int = 0) -> None:
        """Set how many attempts are to come, and how many tokens they train."""
        self._total = total
        self._tokens_total = max(self._tokens_total, tokens)
        self._bars.update(self._all, total=total)

    def started(self, task: Task, attempt: Attempt) -> None:
        """An attempt's process is starting."""
        self._waiting.discard(task.cell.id)
        steps = task.cell.config.train.steps
        with self._lock:
            self._note_progress(task, attempt)
        self._rows[attempt.id] = self._bars.add_task(_word(task.cell.slug), total=steps, note="starting"), task
        self.expect(max(self._total, self._done + len(self._rows)))  # more than was planned, where cells are added

    def running(self, attempts: Sequence[Attempt]) -> None:
        """The attempts of this supervisor as they stand."""
        for attempt in attempts:
            if attempt.id in self._rows:
                bar, task = self._rows[attempt.id]
                self._bars.update(bar, completed=attempt.step, note=_note(attempt))
                with self._lock:
                    self._note_progress(task, attempt)

    def ended(self, task: Task, attempt: Attempt) -> None:
        """An attempt has ended, however it did."""
        row = self._rows.pop(attempt.id, None)
        if row is not None:
            self._bars.remove_task(row[0])
        word = PRUNED if attempt.failure == PRUNED else attempt.state
        final = word in ("done", "diverged", "failed", PRUNED)
        self._done += final
        with self._lock:
            self._note_progress(task, attempt)
            self._attempts.pop(attempt.id, None)
            self._ends.update([word] * final)
        self._bars.update(self._all, completed=self._done)
        colour = COLOURS.get(word, "white")
        cause = f": {_word(attempt.cause)}" if attempt.cause else ""
        hint = f"; atma-sweep logs {_word(task.cell.slug)}" if attempt.state == "failed" else ""
        seconds = (attempt.finished_at - attempt.started_at).total_seconds() if attempt.finished_at else 0.0
        self._print(
            f"[{self._done:>{len(str(self._total))}}/{self._total}] {_word(task.cell.slug)} "
            f"[{colour}]{word}[/{colour}] in {seconds:.0f} s{cause}{hint}"
        )

    def _note_progress(self, task: Task, attempt: Attempt) -> None:
        self._attempts[attempt.id] = attempt
        if task.kind == "train":
            self._tokens[task.cell.id] = attempt.step * task.cell.config.train.batch_tokens

    def waiting(self, cell: Cell) -> None:
        """A cell is being trained by another sweep."""
        if cell.id not in self._waiting:
            self._waiting.add(cell.id)
            self._print(f"{_word(cell.slug)} is being trained by another sweep; waiting for its result")


def _note(attempt: Attempt) -> str:
    if attempt.phase != "training" or attempt.loss is None:
        return attempt.phase
    rate = f"{attempt.tokens_per_s:,.0f} tok/s" if attempt.tokens_per_s else ""
    return f"loss {attempt.loss:.3f} {rate}"


def describe_plan(plan: Plan, sweep: str, remarks: Sequence[str] = ()) -> list[str]:
    """The plan as lines: counts, tokens, budget, disk, and `remarks` last."""
    words = ", ".join(f"{count} {word}" for word, count in sorted(plan.counts.items()))
    lines = [
        f"{sweep}: {counted(len(plan.cells), 'cell')}: {words}"
        if plan.study is None
        else f"{sweep}: {plan.study.describe()}"
    ]
    if plan.left_out:
        lines[0] += f"; {plan.left_out} more left out by --only"
    lines.append(
        f"to train: {counted(len(plan.training), 'cell')}, {plan.tokens:,} tokens in all; to evaluate: {len(plan.evaluating)}"
    )
    gone = plan.counts["weights gone"]
    if gone:
        lines.append(
            f"a measurement is missing and the weights are gone: {counted(gone, 'trained cell')}; --retrain trains again"
        )
    lines += plan.damaged
    lines += plan.budget.describe() if plan.budget is not None else []
    lines += plan.disk.describe() if plan.disk is not None else []
    return [*lines, *remarks]
