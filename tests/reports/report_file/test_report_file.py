"""Tests of report files: `atma-sweep report --from report.yaml`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from atma_sweep.cli import app
from atma_sweep.reports.render import render
from atma_sweep.reports.report_file.schema import read_report_file
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.table import presented
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import open_published
from typer.testing import CliRunner

TEXT = """\
sweep: printed-v2
title: Supplement
width: 89
items:
  - table: 6
    columns: [Clean@64K, Val]
    caption: Two losses.
    notes: false
  - figure: needle
    caption: Needles
    only: [memory=on]
  - figure: needle
"""


def write(folder: Path, text: str = TEXT) -> Path:
    """Write a report file and return its path."""
    file = folder / "report.yaml"
    file.write_text(text)
    return file


@pytest.mark.thorough
def test_report_file_builds_the_appendix(tmp_path: Path) -> None:
    """The numbers are those of the entire table, by heading; the order of files is that of the items."""
    result = CliRunner().invoke(app, ["report", "--from", str(write(tmp_path))])
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "report"
    rows = list(csv.reader((folder / "table-6.csv").open()))
    complete = list(csv.reader(render(make_table("6", open_published(), "printed-v2"), "csv").splitlines()))
    at = [*range(5), complete[0].index("Clean@64K"), complete[0].index("Val")]
    assert rows == [[row[index] for index in at] for row in complete]
    document = (folder / "appendix.tex").read_text()
    order = [document.index(f"{{{name}}}") for name in ("table-6", "figure-needle.pdf", "figure-needle-2.pdf")]
    assert order == sorted(order)
    assert r"\textbf{Needles.}" in document
    tex = (folder / "table-6.tex").read_text()
    assert "Two losses." in tex
    assert "Two losses.." not in tex
    assert (folder / "index.md").read_text().startswith("# Supplement\n")


@pytest.mark.thorough
def test_files_of_a_report_file_match_the_database(tmp_path: Path) -> None:
    assert (
        CliRunner().invoke(app, ["report", "--from", str(write(tmp_path)), "--out", str(tmp_path / "x")]).exit_code == 0
    )
    checked = CliRunner().invoke(app, ["report", "--check", str(tmp_path / "x")])
    assert checked.exit_code == 0
    assert checked.stdout.count("matches the database") == 6
    table = tmp_path / "x" / "table-6.csv"
    table.write_text(table.read_text().replace("3.323", "3.324", 1))
    assert CliRunner().invoke(app, ["report", "--check", str(table)]).exit_code == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("    caption: Two", "    captoin: Two", ":7: items[0].captoin: unknown key; allowed: caption, "),
        ("width: 89", "width: [89]", ":3: width: input should be a valid number"),
        ("  - figure: needle\n    cap", "  - pic: needle\n    cap", ":9: items[1]: must have the key table or figure"),
        ("items:", "itemz:", ":1: items: is missing"),
        ("title: Supplement", "title: 'Supp", "not valid YAML"),
        ("[memory=on]", "memory=on", ":11: items[1].only: input should be a valid list"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in TEXT
    file = write(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(ReportError) as error:
        read_report_file(file)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[Clean@64K, Val]", "[Vall]", ":5: items[0]: table 6 has no column 'Vall'"),
        ("table: 6", "table: 66", ":5: items[0]: unknown table 66"),
        ("    only: [memory=on]", "    by: memory", ":9: items[1]: figure needle takes no --by"),
        ("    notes: false", "    all_rows: true", ":5: items[0]: table 6 takes no all_rows"),
    ],
)
def test_impossible_items_write_nothing(tmp_path: Path, old: str, new: str, problem: str) -> None:
    result = CliRunner().invoke(app, ["report", "--from", str(write(tmp_path, TEXT.replace(old, new, 1)))])
    assert isinstance(result.exception, ReportError)
    assert f"report.yaml{problem}" in str(result.exception)
    assert not (tmp_path / "report").exists()


def test_from_refuses_options_that_the_file_has(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", "--from", str(write(tmp_path)), "--width", "120"])
    assert str(result.exception).startswith("--width does not go with --from")


def test_presented_keeps_entries_with_their_texts() -> None:
    table = make_table("6", open_published(), "printed-v2")
    shown = presented(table, columns=["MFU", "Val"])
    assert shown.columns == (*table.columns[:5], "MFU", "Val")
    for row, entries in zip(shown.rows, shown.entries, strict=True):
        assert row[5:] == tuple(entry.text for entry in entries)
    assert presented(table) is table
    losses = presented(table, columns=["Val"], caption="Losses.")
    assert losses.title == "Table 6. Losses"
    assert any("MFU: by the paper's formula" in note for note in table.notes)
    assert not any("MFU" in note for note in losses.notes)
    assert any("Val, Clean and Junk: nats per token." in note for note in losses.notes)
    assert shown.trace["shown"] == {"columns": ["MFU", "Val"], "caption": None, "notes": True}
