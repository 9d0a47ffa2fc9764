"""A folder of everything: what other programs read of it, and that --check finds one changed number in it."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from atma_sweep.cli import app
from atma_sweep.reports import sweep_data
from atma_sweep.reports.check import check_file, checkable_files
from atma_sweep.reports.render import rendered_files, trace_path
from atma_sweep.reports.report_folder import write_report_folder
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.store import open_store
from ordinary import TABLES
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def folder(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("all")
    write_report_folder(open_store(filled), "quick", out=out, figures=("needle",))
    return out


@pytest.mark.thorough
def test_gallery_shows_every_table_and_figure(folder: Path, store) -> None:
    """Links and pictures exist; tables without rows are listed with the reason instead of a picture."""
    page = (folder / "index.html").read_text()
    links = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert [link for link in links if not (folder / link).is_file()] == []
    tables = {name: json.loads((folder / name).read_text()) for name in set(links) if name.endswith(".json")}
    empty = [name for name, rows in tables.items() if not rows]
    assert page.count("<article") == len(tables) - len(empty) + 1, "one figure was made"
    assert page.count("<img") == 1
    cards, _, absent = page.partition("<details>")
    assert "contrasts.json" in empty
    assert all(name in absent and name not in cards for name in empty)
    assert re.search(r"<li>Declared contrasts: The grid declares no contrasts", absent)
    assert re.search(r'<th scope="colgroup" colspan="\d">[^<]+ \((nats/token|%)\)</th>', cards)


@pytest.mark.thorough
def test_gallery_fits_a_phone_in_both_color_schemes(folder: Path, browser) -> None:
    colors = []
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
        page.goto(f"file://{folder / 'index.html'}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert colors == ["rgb(255, 255, 255)", "rgb(22, 23, 27)"]


# the others take seconds each, and their cells are of the same kinds
@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in TABLES if name not in ("interactions", "anova", "compare")])
def test_csv_files_read_by_pandas_equal_the_tables(published, published_effects, tmp_path: Path, name: str) -> None:
    table = published_effects if name == "effects" else make_table(name, published, "printed-v2")
    path = tmp_path / "table.csv"
    for file, text in rendered_files(table, path, "csv").items():
        file.write_text(text)
    read = pd.read_csv(path)
    assert read.shape == (len(table.rows), len(table.columns))
    assert "atma-sweep-trace" not in path.read_text()
    trace = json.loads(trace_path(path).read_text())
    chances = trace.pop("p_best", {})
    assert trace == json.loads(json.dumps(table.trace))
    assert len(table.entries) == 0 or chances == {
        heading: [entry.p_best for entry in column]
        for heading, column in zip(table.columns[table.text_columns :], zip(*table.entries, strict=True), strict=True)
        if any(entry.p_best is not None for entry in column)
    }
    for column, heading in enumerate(read.columns):
        texts = [row[column] for row in table.rows]
        if texts and all(re.fullmatch(r"[+-]?\d+(\.\d+)?", text) for text in texts):
            assert read[heading].dtype.kind in "if"
            assert list(read[heading]) == [float(text) for text in texts]
        elif texts:
            as_text = pd.read_csv(path, dtype=str, keep_default_na=False)
            assert list(as_text.iloc[:, column]) == texts


@pytest.mark.thorough
def test_folder_is_checked_completely(folder: Path, filled: Path) -> None:
    result = CliRunner().invoke(app, ["report", "--check", str(folder), "--db", str(filled)])
    assert (result.exit_code, result.stderr) == (0, "")
    checked_names = [Path(line.removesuffix(": matches the database")).name for line in result.stdout.splitlines()]
    assert checked_names == [path.name for path in checkable_files(folder)]
    assert {"table-6.csv", "table-6.tex", "effects.html", "table-6.json", "figure-needle.svg"} <= set(checked_names)
    # neither what has no numbers of its own, nor traces by themselves
    assert not [name for name in checked_names if name.startswith(("index", "appendix", "dashboard"))]
    assert not [name for name in checked_names if name.endswith(".trace.json")]


def test_changed_number_of_a_csv_is_named(folder: Path, filled: Path, tmp_path: Path) -> None:
    for file in (folder / "table-6.csv", trace_path(folder / "table-6.csv"), folder / "table-1.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    trace_path(tmp_path / "table-1.csv").write_bytes(trace_path(folder / "table-1.csv").read_bytes())
    changed = tmp_path / "table-6.csv"
    changed.write_text(changed.read_text().replace("3.142", "3.141"))
    result = CliRunner().invoke(app, ["report", "--check", str(tmp_path), "--db", str(filled)])
    assert result.exit_code == 1
    assert "table-1.csv: matches the database" in result.stdout
    assert (
        "table-6.csv: row 2 (nope baseline off on off), Val: the file says 3.141, the database 3.142" in result.stdout
    )


def test_csv_without_trace_names_the_missing_file(store, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table = make_table("6", store, "quick")
    assert rendered_files(table, path, "csv", trace=False) == {path: rendered_files(table, path, "csv")[path]}
    path.write_text(rendered_files(table, path, "csv")[path])
    with pytest.raises(ReportError, match=r"^cannot check table\.csv: its trace file table\.csv\.trace"):
        check_file(path, store)
    trace_path(path).write_text("{")
    with pytest.raises(ReportError, match=r"table\.csv\.trace\.json: its trace cannot be read"):
        check_file(path, store)


@pytest.mark.thorough
def test_table_without_trace_removes_an_old_trace(filled: Path, tmp_path: Path) -> None:
    arguments = ["report", "--table", "6", "--out", str(tmp_path / "x.csv"), "--db", str(filled)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x.csv.trace.json"]
    assert CliRunner().invoke(app, [*arguments, "--no-trace"]).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_folder_without_tables_is_refused(folder: Path, store, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no table or figure in"):
        checkable_files(tmp_path)
    trace_path(tmp_path / "table-6.csv").write_bytes(trace_path(folder / "table-6.csv").read_bytes())
    (path,) = checkable_files(tmp_path)
    assert path == tmp_path / "table-6.csv"
    with pytest.raises(ReportError, match="cannot read"):
        check_file(path, store)


@pytest.mark.thorough
def test_folder_reads_the_sweep_once(store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a cell that finishes in between would be in some files only."""
    read = sweep_data._read_sweep_data
    sweeps_read: list[str] = []
    monkeypatch.setattr(
        sweep_data, "_read_sweep_data", lambda *arguments: (sweeps_read.append(arguments[1]), read(*arguments))[1]
    )
    write_report_folder(store, "quick", out=tmp_path / "all", formats=("csv",), figures=("needle",))
    # the published ones are read besides, to compare with
    assert [name for name in sweeps_read if name in (None, "quick")] == ["quick"]
