"""What the preparation of text shows, and the tables of the `data` commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...results.console import terminal_table
from ...results.console.text import counted
from ..config import DataConfig, Plugin
from ..data import corpora
from ..data.corpora import CorpusError
from ..data.prepare import Told
from ..data.registry import CORPORA
from ..errors import SweepError
from ..grid import plugins, settings
from ..grid.grid import load_grid
from ..units import amount

LINE_SECONDS = 15.0


class PrepareInterrupted(SweepError):
    """Ctrl-C while text is prepared."""

    exit_code = 130


class PrepareDisplay:
    """A Tell that draws: a bar on a terminal, a line now and then elsewhere, and one at the end."""

    def __init__(self, console: Console, what: str) -> None:
        self.console, self.what = console, what
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: Any = None
        self._last: Told | None = None
        self._said = time.monotonic()

    def __enter__(self) -> PrepareDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is KeyboardInterrupt:
            raise PrepareInterrupted(f"{self.what}: stopped; run again to go on where it stopped") from value
        if self._last is not None and kind is None:
            self._say(f"{self.what}: {_words(self._last)} in {self._last.seconds:.0f} s")

    def __call__(self, told: Told) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=told.wanted, note="")
        self._last = told
        self._bar.update(self._task, completed=told.tokens, note=f"{told.phase}: {_words(told)}")
        if not self.console.is_terminal and time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            self._say(f"{self.what}: {told.phase}: {_words(told)}")

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False)


def _words(told: Told) -> str:
    documents = f"{told.documents:,} documents, " if told.documents else ""
    return f"{documents}{amount(told.tokens)} tokens, {amount(told.rate)} tokens/s"


def of_grid(name: str, root: Path, most: int | None = None) -> list[DataConfig]:
    """Every corpus that a grid's cells need, of which there may be `most`; prepared ones lie under `root`."""
    found: list[DataConfig] = []

    def collect(data: DataConfig) -> str:
        found.append(data)
        return corpora.provisional_fingerprint(data)

    load_grid(name, most=most).expand(collect, lambda corpus: corpora.prepared(corpus, root))
    return list(dict.fromkeys(found))


def configs_to_prepare(
    grid: str | None,
    what: str | None,
    given: dict[str, Any],
    name: str | None,
    root: Path,
    most: int | None = None,
    loaded: Sequence[Plugin] = (),
) -> list[DataConfig]:
    """The configs that `data prepare` prepares: those of a grid, else the one that WHAT and the options mean.

    `loaded` are plugins that may define the corpus; a grid names its own.

    Raises CorpusError for both at once, and for one name for several corpora.
    """
    if grid is None:
        return [plugins.with_sources("data", wanted(what, given), tuple(loaded))]
    if what is not None or loaded or any(value is not None for value in given.values()):
        raise CorpusError("--grid: the grid says what is prepared and how; give nothing else but --name, or change it")
    found = of_grid(grid, root, most)
    if name is not None and len(found) > 1:
        raise CorpusError(f"--name {name}: the grid needs {len(found)} corpora, and a name is for one")
    return found


def lender(word: str | None) -> str | None:
    """A path as a full one, a corpus's name as it is. Raises CorpusError for what is no path."""
    if word is None or word in CORPORA:
        return word
    return str(full(word))


def full(word: str | Path) -> Path:
    """The whole path. Raises CorpusError for what is none."""
    try:
        return settings.resolved(str(word))
    except ValueError as error:
        raise CorpusError(str(error)) from error


def wanted(what: str | None, given: dict[str, Any]) -> DataConfig:
    """The config that `data prepare WHAT` means: a known corpus, or the path of text or shards.

    `given` are settings from the command line, None where nothing was said. Raises CorpusError for neither.
    """
    if what is None:
        raise CorpusError(f"say what to prepare: a path, or one of {', '.join(CORPORA)}; or --grid GRID")
    said = {name: value for name, value in given.items() if value is not None}
    if what in CORPORA:
        return _checked({"corpus": what, **CORPORA.load(what).preset} | said)
    path = full(what)
    if not path.exists():
        raise CorpusError(f"{what}: neither a file or folder nor a corpus; known are {', '.join(CORPORA)}")
    shards = path.is_dir() and any(path.rglob("*.bin")) and not any(path.rglob("*.txt"))
    return _checked({"corpus": "shards" if shards else "files", "path": str(path)} | said)


def _checked(settings: dict[str, Any]) -> DataConfig:
    try:
        return DataConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = str(first["loc"][0]).removeprefix("train_").replace("_", "-")
        raise CorpusError(
            f"--{option}: {first['msg'].replace('Input should', 'must')}, got {first['input']!r}"
        ) from error


def table(rows: Sequence[dict[str, Any]], root: Path, width: int | None = None) -> list[str]:
    """Lines of `data list`, none longer than a terminal of that width; `root` is where nothing is."""
    if not rows:
        return [f"nothing is prepared in {root}; atma-sweep data prepare --help"]
    head = ("fingerprint", "name", "corpus", "tokenizer", "train", "validation", "held out", "size")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row["fingerprint"][:12],
                ", ".join(row["names"]) or "-",
                row["corpus"] + (f" {row['path']}" if row["path"] else ""),
                row["tokenizer"],
                amount(row["train_tokens"]),
                amount(row["validation_tokens"]),
                counted(row["heldout_documents"], "document") + (f" of {row['heldout']}" if row["heldout"] else ""),
                f"{row['bytes'] / 2**20:,.0f} MiB",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    if width is not None and sum(widths) + 2 * (len(head) - 1) > width:
        return terminal_table.lines(head, lines[1:], len(head), width)
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
