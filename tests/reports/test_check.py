"""A written table is checked against the database, cell by cell, and a figure by what it was drawn from."""

import re
from pathlib import Path

import pytest
from atma_sweep.cli import app
from atma_sweep.reports.check import check_file
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.files import FORMATS as PICTURES
from atma_sweep.reports.figures.files import rendered
from atma_sweep.reports.render import FORMATS, render, rendered_files, trace_path
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.records import Measurement
from tiers import every_nth
from typer.testing import CliRunner

FILES = [format for format in FORMATS if format != "terminal"]


@pytest.fixture
def written(store, tmp_path):
    def write(format, name="6", change=None, **options):
        path = tmp_path / f"table.{format}"
        for file, text in rendered_files(make_table(name, store, "quick", **options), path, format).items():
            file.write_text(change(text) if change and file == path else text)
        return path

    return write


@pytest.fixture
def drawn(store, tmp_path):
    def draw(name="length", format="svg"):
        path = tmp_path / f"{name}.{format}"
        path.write_bytes(rendered(make_figure(name, store, "quick"), format))
        return path

    return draw


class TestFigures:
    @pytest.mark.thorough
    @pytest.mark.parametrize("format", PICTURES)
    def test_figure_changed_number_is_named(self, store, run, make, drawn, format):
        _, numbers = make
        path = drawn(format=format)
        assert check_file(path, store) == []
        run(store, f"{4:012x}", "done", numbers(0.5))
        first, *more_problems = check_file(path, store)
        assert first == f"{path.name}: its numbers differ from the database; draw it again with --figure length"
        assert [
            line
            for line in more_problems
            if line.startswith(f"{path.name}: cell {4:012x}: the file's numbers come from")
        ]

    @pytest.mark.parametrize("name", every_nth(["needle", "timeline"], 2))
    def test_figure_ignores_unshown_numbers(self, store, run, make, drawn, name):
        path = drawn(name=name)
        run(store, f"{4:012x}", "done", [Measurement(probe="clean", metric="nats", length=777, value=1.0)])
        # a further attempt is a bar of its own in the timeline alone
        assert bool(check_file(path, store)) == (name == "timeline")

    @pytest.mark.thorough
    def test_figure_new_cell_is_named(self, store, run, drawn):
        path = drawn("needle")
        more = Measurement(probe="needle", metric="digit_accuracy", length=128, value=0.5, n=80)
        run(store, f"{2:012x}", "done", [more])
        assert "its numbers differ from the database" in check_file(path, store)[0]

    @pytest.mark.thorough
    def test_figure_older_revision_is_drawn_again(self, store, make, drawn):
        cell, _ = make
        path = drawn()
        store.record_revision("quick", grid_text="y", grid_file="x.yaml", cells=[cell(1, attn_type="nope")])
        assert check_file(path, store) == []

    def test_figure_changed_commit_is_named(self, store, drawn):
        path = drawn()
        path.write_text(path.read_text().replace('"commit":null', '"commit":"c0ffee"'))
        (line,) = check_file(path, store)
        assert "the recorded commit or GPU differs" in line

    @pytest.mark.thorough
    def test_figure_without_trace_is_refused(self, store, drawn, tmp_path):
        path = tmp_path / "bare.svg"
        path.write_bytes(rendered(make_figure("length", store, "quick"), "svg", trace=False))
        with pytest.raises(ReportError, match=r"bare.svg has no trace"):
            check_file(path, store)
        path = drawn()
        path.write_text(path.read_text().replace('{"figure"', '{"figure'))
        with pytest.raises(ReportError, match="has no trace"):
            check_file(path, store)
        path = drawn()
        path.write_text(path.read_text().replace('"data":', '"dato":'))
        with pytest.raises(ReportError, match="its trace cannot be read"):
            check_file(path, store)

    def test_figure_that_cannot_be_drawn(self, store, drawn):
        path = drawn()
        path.write_text(path.read_text().replace('"sweep":"quick"', '"sweep":"gone"'))
        (line,) = check_file(path, store)
        assert "the figure can no longer be built" in line

    @pytest.mark.thorough
    def test_check_command_exit_codes(self, store, run, make, drawn, written, tmp_path):
        files = [drawn(), written("csv")]
        arguments = [
            "report",
            "--db",
            str(tmp_path / "test.db"),
            *(word for file in files for word in ("--check", str(file))),
        ]
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, result.stdout.count("matches the database")) == (0, 2)
        run(store, f"{4:012x}", "done", make[1](0.5))
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert "length.svg: its numbers differ from the database" in result.stdout


@pytest.mark.parametrize("format", FILES)
class TestEveryFormat:
    @pytest.mark.thorough
    def test_unchanged_table_has_no_problem(self, store, written, format):
        assert check_file(written(format), store) == []
        assert check_file(written(format, name="4"), store) == []
        assert check_file(written(format, seeds=True), store) == []

    def test_a_changed_number_is_named(self, store, written, format):
        path = written(format, change=lambda text: re.sub(r"\b3\.142\b", "3.141", text))
        (line,) = check_file(path, store)
        assert "row 2 (nope baseline off on off), Val: the file says" in line
        assert "3.141" in line
        assert "3.142" in line

    def test_changed_database_is_named(self, store, run, make, written, format):
        _, numbers = make
        path = written(format)
        run(store, f"{4:012x}", "done", numbers(0.5)[:1])
        lines = check_file(path, store)
        assert [line for line in lines if "row 1 (polar baseline off on off), Val" in line]
        assert all("row" in line for line in lines)

    def test_equal_number_of_a_new_attempt_is_named(self, store, run, make, written, format):
        _, numbers = make
        path = written(format)
        run(store, f"{1:012x}", "done", numbers(3.14159)[:1])
        assert check_file(path, store) != []

    def test_removed_row_is_named(self, store, written, format):
        gone = {
            "md": lambda text: re.sub(r"\| nope .*\n", "", text),
            "csv": lambda text: re.sub(r"nope,.*\n", "", text),
            "tex": lambda text: re.sub(r"\{nope\} .*\n", "", text),
            "html": lambda text: re.sub(r"<tr><th scope=\"row\">nope.*\n", "", text),
            "json": None,
        }[format]
        if gone is not None:
            lines = check_file(written(format, change=gone), store)
            assert any("row 5 (polar baseline off on on) is missing from the file" in line for line in lines)


def test_changed_note_is_named(store, written):
    path = written("md", change=lambda text: text.replace("2 of 5 cells", "5 of 5 cells"))
    (line,) = check_file(path, store)
    assert "5 of 5 cells" in line


def test_older_revision_is_rebuilt(store, make, written):
    cell, _ = make
    path = written("csv")
    store.record_revision("quick", grid_text="y", grid_file="x.yaml", cells=[cell(1, attn_type="nope")])
    assert check_file(path, store) == []


def test_foreign_files_are_refused(store, written, tmp_path):
    with pytest.raises(ReportError, match="has no trace"):
        check_file(written("md", change=lambda text: text.split("<!--")[0]), store)
    with pytest.raises(ReportError, match="cannot be read"):
        check_file(written("md", change=lambda text: text.replace('{"table"', '{"table')), store)
    with pytest.raises(ReportError, match="only files ending in"):
        check_file(tmp_path / "table.docx", store)
    with pytest.raises(ReportError, match="cannot read"):
        check_file(tmp_path / "none.csv", store)
    (tmp_path / "empty.json").write_text("[]\n")
    with pytest.raises(ReportError, match="has no row"):
        check_file(tmp_path / "empty.json", store)
    csv_file = written("csv")
    trace_path(csv_file).write_text(trace_path(csv_file).read_text().replace('"sweep": "quick"', '"sweep": "gone"'))
    assert "can no longer be built" in check_file(csv_file, store)[0]


@pytest.mark.thorough
def test_published_tables_are_unchanged(published, tmp_path):
    for name in ("2", "6", "open-weight", "budgets"):
        path = tmp_path / f"{name}.tex"
        path.write_text(render(make_table(name, published, "printed-v2"), "tex"))
        assert check_file(path, published) == []
    path.write_text(path.read_text().replace("128.7 ZF", "128.8 ZF"))
    assert "128.8 ZF" in check_file(path, published)[0]


@pytest.mark.thorough
def test_readme_figure_is_unchanged(published):
    assert check_file(Path(__file__).parents[2] / "docs" / "images" / "needle.svg", published) == []
