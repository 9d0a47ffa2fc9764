"""Sweeps from Python and notebooks, through the same functions as the command line.

    from atma_sweep import Sweep

    sweep = Sweep("quick")
    sweep.launch()
    sweep.table(6)                                   # .frame has its numbers
    sweep.figure("needle").save("needle.pdf", width="89mm")
    sweep.effects("val_loss")
    sweep.cell("polar-baseline-d0-m1-w0-s0").load_model().generate("def main(")

Importing this module loads nothing heavy; each method imports what it needs.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .results.arguments import FLAG, NUMBER, PATH, TEXT, check_argument

if TYPE_CHECKING:
    import pandas as pd

    from .reports.figures.canvas.base import FigureData
    from .reports.live.status import SweepStatus
    from .reports.table import Table
    from .results.store.frames import Frames
    from .results.store.store import Store
    from .sweep.attempt.trained_cells import LoadedModel
    from .sweep.commands.launch import LaunchOptions
    from .sweep.orchestrator.launch import LaunchOutcome
    from .sweep.planning.planner import Plan

EFFECT_COLUMNS = {"words": "label", "where": "stratum", "sure": "significant", "i2": "heterogeneity"}
"""Columns of `Sweep.effects` whose names are longer than in the frame of figure `effects`."""


class Sweep:
    """A sweep: its launch, its state and its results.

    Results are read anew at every call, so that a running sweep can be watched. Errors are those of the command line,
    subclasses of `atma_sweep.results.errors.UserError`; their message is one line that says what to do.
    """

    def __init__(
        self,
        sweep: str | Path | None = None,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        db: str | Path | None = None,
        runs: str | Path | None = None,
    ) -> None:
        """Name a sweep or its grid; nothing is read yet.

        Args:
            sweep: Name of a launched or built-in sweep ("printed-v2"), name of a shipped grid ("quick"), or path of a
                grid file (.yaml). None: the sweep that was launched last.
            name: Name of the sweep instead of the grid's own.
            settings: Settings of every cell of the grid by dotted key, such as {"train.tokens": 1e5}; they need `name`,
                as another grid is another sweep.
            db: Database file or URL; None: that of ATMA_DB, else atma.db in the working folder.
            runs: Folder of checkpoints and weights; None: the database's own.

        Raises:
            TypeError: An argument has another type.
        """
        check_argument("Sweep", "sweep", sweep, PATH, optional=True)
        check_argument("Sweep", "name", name, TEXT, optional=True)
        check_argument("Sweep", "db", db, PATH, optional=True)
        check_argument("Sweep", "runs", runs, PATH, optional=True)
        self._sweep = None if sweep is None else str(sweep)
        self._name, self._settings = name, dict(settings or {})
        self._db = None if db is None else str(db)
        self._runs = None if runs is None else Path(runs)

    @cached_property
    def name(self) -> str:
        """Name of the sweep; for a grid file the name that stands in it.

        Raises:
            GridError: The grid file is not valid.
            StoreError: No sweep was named, and there is no database or no sweep in it.
        """
        if self._name is not None:
            return self._name
        if self._sweep is None:
            return self._open().revision().sweep
        if Path(self._sweep).suffix in (".yaml", ".yml"):
            from .sweep.grid.grid import load_grid

            return load_grid(self._sweep).name
        return self._sweep

    def _open(self) -> Store:
        """Return the database, or a temporary one with the sweep if that is built in."""
        from .results.builtin_sweeps import open_store_with_builtins

        return open_store_with_builtins(self._db, None if self._sweep is self._name is None else self.name)

    # --- launch -----------------------------------------------------------------------------------------------------

    def _options(self, **chosen: Any) -> LaunchOptions:
        """Return the options of a launch of this sweep's grid, with the command's defaults where none are given.

        Raises:
            ValueError: The sweep has no grid to launch.
        """
        from .sweep.commands.launch import LaunchOptions
        from .sweep.executors.registry import DEFAULT_EXECUTOR, resolve_executor_name

        if self._sweep is None:
            raise ValueError("Sweep: name a grid to launch, such as Sweep('quick') or Sweep('my-grid.yaml')")
        executor = resolve_executor_name(chosen.pop("executor", None) or DEFAULT_EXECUTOR, chosen.get("address"))
        defaults: dict[str, Any] = {
            "name": self._name, "address": None, "detach": False, "retrain": False, "code": "new", "max_cells": None, "only": (),
        }  # fmt: skip
        return LaunchOptions(
            self._sweep,
            [f"{key}={_setting(value)}" for key, value in self._settings.items()],
            db=self._db,
            runs=self._runs,
            executor=executor,
            **{**defaults, **chosen},
        )

    def plan(self, *, only: Sequence[str] = ()) -> Plan:
        """Return what a launch would do now, as `launch --dry-run` shows it; nothing is written.

        Args:
            only: Selections of cells, such as ["memory=on"].

        Raises:
            GridError: The grid or a setting is not valid.
        """
        from .sweep.commands.launch import preview_launch
        from .sweep.orchestrator.display import SafeConsole

        return preview_launch(self._options(only=only), SafeConsole(quiet=True)).launch_plan

    def launch(
        self,
        *,
        only: Sequence[str] = (),
        executor: str | None = None,
        address: str | None = None,
        budget: float | None = None,
        prepare: bool = False,
        retrain: bool = False,
        quiet: bool = False,
    ) -> LaunchOutcome:
        """Train and evaluate every cell that is not done yet, and wait until all are; call again to continue.

        Args:
            only: Selections of cells to run now, such as ["attn_type=polar,nope", "memory=on"].
            executor: Name of the executor; None: the default, or Ray with an address.
            address: HOST:PORT of a Ray cluster.
            budget: Limit on the total cost of the grid's cells after this launch, in GPU-hours (core-hours without GPUs).
            prepare: Download and prepare missing text first.
            retrain: Train cells again that diverged or whose weights are gone.
            quiet: Print no progress.

        Returns:
            The number of cells by standing, and `finished`: True if every cell is done or has diverged.

        Raises:
            RequirementsMissing: This machine lacks something; its `refusal` lists all of it.
            GridError: The grid or a setting is not valid.
            UserError: What else `atma-sweep launch` refuses, such as a sweep that runs already.
            Interrupted: Ctrl-C; everything was saved.
            TypeError: An argument has another type.
        """
        from .sweep.commands.launch import launch_in_foreground, prepare_launch, preview_launch
        from .sweep.errors import SweepError
        from .sweep.orchestrator import requirements
        from .sweep.orchestrator.display import SafeConsole

        check_argument("launch", "budget", budget, NUMBER, optional=True)
        for name, flag in (("prepare", prepare), ("retrain", retrain), ("quiet", quiet)):
            check_argument("launch", name, flag, FLAG)
        options = self._options(
            only=only, executor=executor, address=address, prepare=prepare, retrain=retrain,
            budget=None if budget is None else f"{budget}h",
        )  # fmt: skip
        console = SafeConsole(quiet=quiet, soft_wrap=True)
        preview = preview_launch(options, console)
        lacking = requirements.lacks(preview.request, preview.launch_plan)
        request, store = prepare_launch(options, preview, lacking, console)
        outcome = launch_in_foreground(request, store, console)
        if outcome is None:
            raise SweepError(f"a study of the section tune of {self.name} is not finished; launch again to continue")
        return outcome

    # --- state and numbers ------------------------------------------------------------------------------------------

    def status(self) -> SweepStatus:
        """Return the progress: counts of cells, running cells with their speed, failures with their cause.

        Its `text()` is what `atma-sweep status` prints, `counts` the number of cells by standing.

        Raises:
            SweepUnknown, StoreError: The sweep cannot be read.
        """
        from .reports.live.status import sweep_statuses

        return sweep_statuses(self._open(), self.name).sweeps[0]

    @property
    def frames(self) -> Frames:
        """Tidy pandas frames of the newest revision; see `atma_sweep.results.store.frames` for columns and units.

        Raises:
            SweepUnknown, StoreError: The sweep cannot be read.
        """
        return self._open().frames(self.name)

    def cells(self) -> pd.DataFrame:
        """Return one row per cell with its axes and its progress, in the grid's order (`Frames.cells`)."""
        return self.frames.cells()

    def measurements(self) -> pd.DataFrame:
        """Return one row per measurement: cell, axes, probe, metric, length, value, unit, n (`Frames.measurements`)."""
        return self.frames.measurements()

    def curves(self) -> pd.DataFrame:
        """Return one row per point of every training curve (`Frames.curves`)."""
        return self.frames.curves()

    def table(self, name: str | int, *, only: Sequence[str] = (), **options: Any) -> SweepTable:
        """Return a table, as `atma-sweep report --table NAME` prints it; it shows itself in a notebook.

        Args:
            name: Name or number of the table: 6, "effects", "v2:8"; `atma-sweep report --list` lists them.
            only: Filters of cells, such as ["recipe=intended"].
            options: Options of the table, such as seeds=True, all_rows=True or lengths=[2048].

        Raises:
            ReportError: There is no such table, or the sweep lacks what it needs.
            SweepUnknown, StoreError: The sweep cannot be read.
            TypeError: The table does not take an option.
        """
        from .reports.tables import make_table

        return SweepTable(make_table(name, self._open(), self.name, only=list(only), **options))

    def figure(
        self, name: str | int, *, only: Sequence[str] = (), lengths: Sequence[int] = (), **options: Any
    ) -> SweepFigure:
        """Return a figure, as `atma-sweep report --figure NAME` draws it; it shows itself in a notebook.

        Args:
            name: Name or number of the figure: "needle", 1, "loss"; `atma-sweep report --list` lists them.
            only: Filters of cells, such as ["recipe=intended"].
            lengths: Context lengths in tokens to show beyond those of the launch.
            options: Options of the figure: by, log, against, compare, evaluator.

        Raises:
            ReportError: There is no such figure, it does not take an option, or the sweep lacks what it needs.
            SweepUnknown, StoreError: The sweep cannot be read.
        """
        from .reports.figures import make_figure

        return SweepFigure(
            make_figure(str(name), self._open(), self.name, lengths=list(lengths), options=options, only=list(only))
        )

    def effects(self, measure: str = "val_loss", *, only: Sequence[str] = ()) -> pd.DataFrame:
        """Return the effect of every level against every other, over matched pairs that agree in all other axes.

        The numbers of `atma-sweep report --table effects --all-rows`. One row per effect: `axis`, `level`, `reference`,
        `pairs` (number), `measure` (heading), `label`, `unit` ("points" for a share, whose values are then percentage
        points), `better` (1: more is better, -1: less, 0: neither), `stratum` (empty: the whole sweep), `mean`, `low`
        and `high` (95 % interval, NaN where unknown), `p` (corrected for the family), `significant`, `heterogeneity`
        (I², a fraction), `mixed` (True if it averages strata that differ) and `confirmatory` (declared by the grid).

        Args:
            measure: Metric ("val_loss", "digit_accuracy"), metric with its probe ("clean.nats"), or heading of a table
                ("Clean@4K"). A metric has the rows of each of its context lengths.
            only: Filters of cells, such as ["recipe=intended"].

        Raises:
            ReportError: The sweep has no such measure.
            SweepUnknown, StoreError: The sweep cannot be read.
            TypeError: An argument has another type.
        """
        import pandas as pd

        from .reports.cell_filter import filtered_cells
        from .reports.figures.comparisons.forest import effect_fields
        from .reports.stats.effects.effects import effects, measures
        from .reports.sweep_data import ReportError, load_sweep_data
        from .results.console.text import choices_hint

        check_argument("effects", "measure", measure, TEXT)
        with filtered_cells(self.name, list(only)):
            data = load_sweep_data(self._open(), self.name)
            available = measures(data)
            chosen = [
                column for column in available
                if measure in (column.metric, f"{column.probe}.{column.metric}", column.heading)
            ]  # fmt: skip
            if not chosen:
                names = list(dict.fromkeys([*(column.metric for column in available), *(c.heading for c in available)]))
                raise ReportError(f"sweep {self.name} has no measure {measure!r}; {choices_hint(measure, names)}")
            rows = [
                {"axis": effect.axis, "level": effect.level, "reference": effect.reference, "pairs": effect.pairs}
                | effect_fields(effect)
                for effect in effects(data, chosen)
            ]
        return pd.DataFrame(rows).rename(columns=EFFECT_COLUMNS)

    def cell(self, name: str) -> SweepCell:
        """Return a cell by its id or slug, with or without its seed, or by the beginning of either.

        Raises:
            CellUnknown: The sweep has no such cell.
            CellAmbiguous: Several cells match.
            SweepUnknown, StoreError: The sweep cannot be read.
            TypeError: The name is not text.
        """
        check_argument("cell", "name", name, TEXT)
        record = self._open().find_cell(name, self.name)
        return SweepCell(self, record.id, record.slug, record.config)

    def report(self, folder: str | Path) -> Path:
        """Write every table and figure, the dashboard and a LaTeX appendix, as `report --all --out FOLDER` does.

        Returns:
            The page to start at, index.html in the folder.

        Raises:
            ReportError: The sweep has no numbers.
            WriteRefused: The folder cannot be written.
        """
        from .reports.figures.canvas.figure_options import options_from_cli
        from .reports.report_folder import write_report_folder
        from .results.paper import SWEEPS

        check_argument("report", "folder", folder, PATH)
        look = options_from_cli(title=False)  # a title would repeat the caption
        write_report_folder(self._open(), self.name, out=Path(folder), reference=SWEEPS[-1], look=look)
        return Path(folder) / "index.html"

    def __repr__(self) -> str:
        """Return a line that says how to make the object again."""
        arguments = [*([] if self._sweep is None else [repr(self._sweep)]), *([f"db={self._db!r}"] if self._db else [])]
        return f"Sweep({', '.join(arguments)})"

    def _repr_html_(self) -> str:
        """Return the status for a notebook; for a sweep that cannot be read, what to do."""
        from .results.errors import UserError

        try:
            text = self.status().text()
        except UserError as error:
            text = f"{self!r}: {error}"
        return f"<pre>{html.escape(text)}</pre>"


@dataclass(frozen=True)
class SweepTable:
    """A table of a sweep; it shows itself in a notebook."""

    data: Table
    """Title, headings, rows as printed, notes, and the origin of every number."""

    @property
    def frame(self) -> pd.DataFrame:
        """Labels as printed and numbers unrounded (NaN for placeholders), below the table's headings.

        Units are the database's: shares are fractions.
        """
        return self.data.frame

    def render(self, format: str = "md") -> str:
        """Return the table as text: "terminal", "md", "csv", "tex", "html" or "json", as `report --format` does.

        Raises:
            ReportError: The format is unknown.
        """
        from .reports.render import render

        return render(self.data, format)

    def __str__(self) -> str:
        """Return the table as a terminal shows it."""
        return self.render("terminal")

    def _repr_html_(self) -> str:
        """Return the table with its notes, for a notebook."""
        from .reports.render.html_renderer import fragment

        return fragment(self.data, trace=False)


@dataclass(frozen=True)
class SweepFigure:
    """A figure of a sweep, not drawn yet; it shows itself in a notebook."""

    data: FigureData
    """Title, notes, tidy frame, and the origin of every number."""

    @property
    def frame(self) -> pd.DataFrame:
        """Tidy frame of the numbers that the figure shows."""
        return self.data.frame

    @property
    def caption(self) -> str:
        """Caption: title and notes as sentences."""
        from .reports.figures.canvas.base import caption

        return caption(self.data)

    def save(
        self, path: str | Path, *, style: str | None = None, width: str | None = None, title: bool | None = None
    ) -> Path:
        """Draw the figure into a file, as `report --figure NAME --out FILE` does, and return its path.

        Args:
            path: File whose suffix is .svg, .pdf, .png or .pgf; an existing one is replaced.
            style: Preset "paper", "nature", "neurips" or "screen", or a matplotlib style file; None: "paper".
            width: Width with its unit, such as "89mm"; None: that of the preset.
            title: Whether title and notes are in the picture; None: as the preset says.

        Raises:
            ReportError: The suffix or an option is not valid.
            WriteRefused: The file cannot be written.
        """
        from .reports.figures.canvas.figure_options import options_from_cli
        from .reports.figures.files import rendered
        from .results.console.output_files import write_file

        path = Path(path)
        look = options_from_cli(style, width, title)
        write_file(path, rendered(self.data, path.suffix.lstrip(".").lower(), look=look))
        return path

    def _repr_svg_(self) -> str:
        """Return the picture with its title, for a notebook."""
        from .reports.figures.files import rendered

        return rendered(self.data, "svg", trace=False).decode()


@dataclass(frozen=True)
class SweepCell:
    """A cell of a sweep: one model."""

    sweep: Sweep
    id: str
    slug: str
    config: Mapping[str, Any]
    """Stored config, nested by section: model, data, train, eval, resources, checkpoint, and seed."""

    def measurements(self) -> pd.DataFrame:
        """Return the cell's rows of `Sweep.measurements`."""
        return self._own(self.sweep.measurements())

    def curve(self) -> pd.DataFrame:
        """Return the cell's training curve, one row per validation."""
        return self._own(self.sweep.curves())

    def _own(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of this cell, numbered from 0."""
        return frame[frame["cell"] == self.id].reset_index(drop=True)

    def load_model(self, device: str = "cpu") -> LoadedModel:
        """Return the trained network with its tokenizer and config, as `atma_sweep.load` does.

        Args:
            device: "cpu" (float32) or "cuda" (bfloat16).

        Raises:
            NotTrained, WeightsGone, CellUnreadable, CheckpointError, CorpusError: It cannot be loaded.
            MachineError: There is no usable GPU, or the weights' location cannot be reached.
        """
        from .sweep.attempt.trained_cells import load

        return load(self.id, db=self.sweep._db, runs=self.sweep._runs, sweep=self.sweep.name, device=device)

    def _repr_html_(self) -> str:
        """Return what `atma-sweep show` prints, for a notebook."""
        from .reports.live.cell_details import cell_details

        return f"<pre>{html.escape(cell_details(self.sweep._open(), self.id, self.sweep.name).text())}</pre>"


def _setting(value: Any) -> str:
    """Return a setting as it is typed after the `=` of `--set`: JSON for what is no text."""
    import json

    return value if isinstance(value, str) else json.dumps(value)
