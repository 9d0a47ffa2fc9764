"""Every registered table and figure can be made, written in every format and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from atma_sweep.cli import app
from atma_sweep.reports import figures, tables
from atma_sweep.reports.check import check_file, checkable_files
from atma_sweep.reports.figures import FIGURES, make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData, collected
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.render import SUFFIXES
from atma_sweep.reports.report_folder import write_report_folder
from atma_sweep.reports.report_spec import ReportSpec
from atma_sweep.reports.sweep_data import ReportError, SweepData
from atma_sweep.reports.table import Table
from atma_sweep.reports.table_builder import TableRow, build_table
from atma_sweep.reports.tables import TABLES, make_table
from atma_sweep.results.store.store import Store
from typer.testing import CliRunner

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"


@pytest.mark.parametrize(("listed", "maker"), [(TABLES, make_table), (FIGURES, make_figure)])
@pytest.mark.thorough
def test_lengths_option_needs_a_spec_that_accepts_it(
    every: Store, shown: Callable[[str], Store], listed: dict[str, ReportSpec], maker: Any
) -> None:
    refused = {}
    for name in listed:
        try:
            maker(name, shown(name) if listed is FIGURES or listed[name].study else every, lengths=[64])
        except ReportError as error:
            refused[name] = str(error)
    assert set(refused) == {name for name, line in listed.items() if "lengths" not in line.takes} != set()
    assert {why.partition(" has ")[2] for why in refused.values()} == {"no context lengths; remove --length"}


def test_help_and_docs_list_all_tables_and_figures() -> None:
    help_text = " ".join(CliRunner().invoke(app, ["report", "--help"]).stdout.split())
    page = PAGE.read_text()
    for name, line in [*TABLES.items(), *FIGURES.items()]:
        number = f"{line.number}: " if line.number else ""
        assert f"{name} ({number}{line.shows})" in help_text
        assert f"{name} ({number}{line.shows})" in page


def scratch_table(store: Store, data: SweepData) -> Table:
    lines = [TableRow(labels=(cell.slug,), cells=[cell]) for cell in data.cells]
    return build_table(data, "scratch", "Scratch", ("Cell",), lines)


def scratch_figure(store: Store, data: SweepData) -> FigureData:
    frame = pd.DataFrame({"seed": [cell.seed for cell in data.cells]})
    return collected(store, data, "scratch", "Scratch", frame, [(cell.cell_id, None) for cell in data.cells])


def draw_scratch(figure_data: FigureData, look: FigureOptions) -> Any:
    figure = drawing.page(2.0)
    (axes,) = drawing.panels(figure, [""])
    axes.plot(figure_data.frame["seed"])
    return drawing.finished(figure, figure_data.title, figure_data.notes, {})


@pytest.mark.thorough
def test_new_table_and_figure_need_a_file_and_an_entry(
    every: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, names in (
        (tables, {"scratch_table": scratch_table}),
        (figures, {"collect": scratch_figure, "draw": draw_scratch}),
    ):
        file = ModuleType(f"{package.__name__}.scratch")
        vars(file).update(names)
        monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(TABLES.own, "scratch", ReportSpec("scratch:scratch_table", "a scratch"))
    monkeypatch.setitem(FIGURES.own, "scratch", ReportSpec("scratch", "a scratch", number="9z", takes=()))
    for name in set(TABLES.own) - {"scratch"}:
        monkeypatch.delitem(TABLES.own, name)
    written = write_report_folder(every, out=tmp_path, figures=["9z"])
    assert written.skipped == {}
    assert {path.name for path in written.files} >= {f"scratch{ending}" for ending in SUFFIXES} | {"figure-scratch.pdf"}
    assert "Scratch, sweep all" in (tmp_path / "index.md").read_text()
    files = checkable_files(tmp_path)
    assert len(files) == len(SUFFIXES) + 3
    for file in files:
        assert check_file(file, every) == []
