"""Progress display of text preparation, and helpers of the `data` commands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...results.console import terminal_table
from ...results.console.quantities import format_tokens
from ...results.console.text import counted
from ..config import HUB_PREFIX, DataConfig, Plugin
from ..data import corpora
from ..data.builtin.hub import HubDatasetConfig
from ..data.corpora import CorpusError
from ..data.prepare import PrepareProgress
from ..data.registry import CORPORA
from ..errors import SweepError
from ..grid import plugins, settings
from ..grid.grid import load_grid

LINE_SECONDS = 15.0
"""Seconds between two progress lines where there is no terminal."""


class PrepareInterrupted(SweepError):
    """Error after Ctrl-C while text was prepared."""

    exit_code = 130


class PrepareDisplay:
    """Progress callback of text preparation: a bar on a terminal, else a line every 15 s (LINE_SECONDS).

    A last line follows at the end.
    """

    def __init__(self, console: Console, corpus: str) -> None:
        """Create the display for the corpus named `corpus`; the bar appears with the first progress."""
        self.console, self.what = console, corpus
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
        self._last: PrepareProgress | None = None
        self._printed_at = time.monotonic()

    def __enter__(self) -> PrepareDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar and print the last progress with the duration; nothing is printed after an error.

        Raises:
            PrepareInterrupted: Ctrl-C ended the preparation; other errors pass through.
        """
        self._bar.stop()
        if kind is KeyboardInterrupt:
            raise PrepareInterrupted(f"{self.what}: stopped; run again to continue") from value
        if self._last is not None and kind is None:
            self._print_line(f"{self.what}: {_format_progress(self._last)} in {self._last.seconds:.0f} s")

    def __call__(self, progress: PrepareProgress) -> None:
        """Show progress: update the bar, or print a line if the last one is 15 s old (LINE_SECONDS).

        Args:
            progress: Current state; the last one is printed again at the end.
        """
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=None, note="")
        self._last = progress
        share = progress.share
        percent = f"{100 * share:.0f} %, " if share is not None else ""
        note = f"{progress.phase}: {percent}{_format_progress(progress)}"
        self._bar.update(self._task, total=1.0 if share is not None else None, completed=share or 0.0, note=note)
        if not self.console.is_terminal and time.monotonic() - self._printed_at > LINE_SECONDS:
            self._printed_at = time.monotonic()
            self._print_line(f"{self.what}: {note}")

    def _print_line(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False)


def _format_progress(progress: PrepareProgress) -> str:
    documents = f"{progress.documents:,} documents, " if progress.documents else ""
    return f"{documents}{format_tokens(progress.tokens)} tokens, {format_tokens(progress.rate)} tokens/s"


def grid_corpora(name: str, root: Path, max_cells: int | None = None) -> list[DataConfig]:
    """Return the configs of all corpora that a grid's cells need, in the order of first use, without duplicates.

    Nothing is downloaded or prepared.

    Args:
        name: Grid file, or name of a shipped grid.
        root: Folder of prepared corpora, which a grid may name.
        max_cells: Maximum number of cells the grid may have; None for the default limit.

    Raises:
        GridError: The grid is invalid or too large.
    """
    configs: list[DataConfig] = []

    def collect(data: DataConfig) -> str:
        configs.append(data)
        return corpora.provisional_fingerprint(data)

    load_grid(name, max_cells=max_cells).expand(collect, lambda corpus: corpora.find_prepared(corpus, root))
    return list(dict.fromkeys(configs))


def configs_to_prepare(
    grid: str | None,
    what: str | None,
    options: dict[str, Any],
    name: str | None,
    root: Path,
    max_cells: int | None = None,
    loaded_plugins: Sequence[Plugin] = (),
    dataset: Mapping[str, str | None] | None = None,
) -> list[DataConfig]:
    """Return the configs of the corpora to prepare: a grid's, else the one that `what` and the options describe.

    Args:
        grid: Grid file, or name of a shipped grid; None to use `what`.
        what: Name of a known corpus, or path of text or shards.
        options: Settings from the command line by field of DataConfig; None where not given.
        name: Name for the prepared corpus, only checked here; None for none.
        root: Folder of prepared corpora.
        max_cells: Maximum number of cells the grid may have; None for the default limit.
        loaded_plugins: Plugins that may define the corpus; a grid names its own.
        dataset: Options config, split and revision of a dataset of the hub; None where not given.

    Raises:
        CorpusError: A grid is combined with other options, one name is given for several corpora, or `what` is missing
            or unknown.
        GridError: The grid is invalid.
    """
    if grid is None:
        return [plugins.with_sources("data", parse_corpus(what, options, dataset), tuple(loaded_plugins))]
    if (
        what is not None
        or loaded_plugins
        or any(value is not None for value in (*options.values(), *(dataset or {}).values()))
    ):
        raise CorpusError(
            "--grid: the grid defines the corpora and their settings; give no other option than --name, or change the grid"
        )
    configs = grid_corpora(grid, root, max_cells)
    if name is not None and len(configs) > 1:
        raise CorpusError(f"--name {name}: the grid needs {len(configs)} corpora, and a name applies to one")
    return configs


def parse_heldout(word: str | None) -> str | None:
    """Return the value of --heldout: a known corpus's name or None unchanged, else an absolute path.

    That the path exists is not checked. Raises CorpusError for an invalid one.
    """
    if word is None or word in CORPORA:
        return word
    return str(resolve_path(word))


def resolve_path(word: str | Path) -> Path:
    """Return the absolute path. Raises CorpusError for an invalid one."""
    try:
        return settings.resolve_path(str(word))
    except ValueError as error:
        raise CorpusError(str(error)) from error


def parse_corpus(
    what: str | None, options: dict[str, Any], dataset: Mapping[str, str | None] | None = None
) -> DataConfig:
    """Return the config that `data prepare WHAT` describes: a known corpus, a dataset, or a path of text or shards.

    A known corpus has precedence over a path of that name. Its preset settings apply where an option is not given.

    Args:
        what: Name of a known corpus, or a path; a folder with .bin files and without .txt files, at any depth, holds
            shards.
        options: Settings from the command line by field of DataConfig; None where not given.
        dataset: Options config, split and revision of a dataset of the hub; None where not given.

    Raises:
        CorpusError: `what` is missing or neither of these, or a setting is invalid.
    """
    if what is None:
        raise CorpusError(f"nothing to prepare; give a path, one of {', '.join(CORPORA)}, or --grid GRID")
    chosen_settings = {name: value for name, value in options.items() if value is not None}
    chosen_dataset = {name: value for name, value in (dataset or {}).items() if value is not None}
    if what.startswith(HUB_PREFIX):
        try:
            hub = HubDatasetConfig(dataset=what.removeprefix(HUB_PREFIX), **chosen_dataset)
        except ValidationError as error:
            raise CorpusError(f"{what}: not a dataset of the hub; write {HUB_PREFIX}OWNER/NAME") from error
        preset = {"corpus": "hub", "settings": {"hub": hub.model_dump(mode="json")}}
        return _validated_config(preset | chosen_settings)
    if chosen_dataset:
        raise CorpusError(f"--{next(iter(chosen_dataset))}: {what} is no dataset of the hub ({HUB_PREFIX}OWNER/NAME)")
    if what in CORPORA:
        return _validated_config({"corpus": what, **CORPORA.load(what).preset} | chosen_settings)
    path = resolve_path(what)
    if not path.exists():
        raise CorpusError(f"{what}: not a file, a folder or a known corpus; known: {', '.join(CORPORA)}")
    shards = path.is_dir() and any(path.rglob("*.bin")) and not any(path.rglob("*.txt"))
    return _validated_config({"corpus": "shards" if shards else "files", "path": str(path)} | chosen_settings)


def _validated_config(settings: dict[str, Any]) -> DataConfig:
    """Return the config of these settings (field -> value).

    Raises:
        CorpusError: A value is invalid; the message names the option, the reason and the value of the first one.
    """
    try:
        return DataConfig.model_validate(settings)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        option = str(first_error["loc"][0]).removeprefix("train_").replace("_", "-")
        raise CorpusError(
            f"--{option}: {first_error['msg'].replace('Input should', 'must')}, got {first_error['input']!r}"
        ) from error


def corpora_table(rows: Sequence[dict[str, Any]], root: Path, width: int | None = None) -> list[str]:
    """Return the lines of `data list`: a heading and a line per corpus; a line about `root` if nothing is prepared.

    The columns are fingerprint (12 digits), name, corpus, tokenizer, train and validation (tokens), held out
    (documents) and size (MiB).

    Args:
        rows: Prepared corpora, as `corpora.listing` returns them.
        root: Folder of prepared corpora.
        width: Columns of the terminal, which lines must not exceed; None for no limit.
    """
    if not rows:
        return [f"no corpus is prepared in {root}; see atma-sweep data prepare --help"]
    head = ("fingerprint", "name", "corpus", "tokenizer", "train", "validation", "held out", "size")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row["fingerprint"][:12],
                ", ".join(row["names"]) or "-",
                row["corpus"] + (f" {row['path']}" if row["path"] else ""),
                row["tokenizer"],
                format_tokens(row["train_tokens"]),
                format_tokens(row["validation_tokens"]),
                counted(row["heldout_documents"], "document") + (f" of {row['heldout']}" if row["heldout"] else ""),
                f"{row['bytes'] / 2**20:,.0f} MiB",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    if width is not None and sum(widths) + 2 * (len(head) - 1) > width:
        return terminal_table.table_lines(head, lines[1:], len(head), width)
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
