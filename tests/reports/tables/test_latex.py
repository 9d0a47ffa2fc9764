"""Our LaTeX compiles, and every printed number comes out of it."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from atma_sweep.reports import report_folder
from atma_sweep.reports.render import render
from atma_sweep.reports.render.appendix import appendix_text
from atma_sweep.reports.render.column_heads import unit_text
from atma_sweep.reports.render.latex import PREAMBLE, needs_landscape
from atma_sweep.reports.render.latex import rows as latex_rows
from atma_sweep.reports.report_folder import write_report_folder
from atma_sweep.reports.table import Table, TableEntry
from atma_sweep.reports.tables import make_table
from atma_sweep.results import paper
from atma_sweep.results.console.text import tex_escaped
from atma_sweep.results.store.records import Measurement
from patience import PATIENCE_S

needs_pdflatex = pytest.mark.skipif(
    shutil.which("pdflatex") is None or shutil.which("pdftotext") is None,
    reason="needs pdflatex with siunitx, and pdftotext: apt-get install texlive-latex-extra texlive-science tex-gyre lmodern poppler-utils",
)
HOSTILE = 'a|b_{x}$\\input{/etc/passwd}%#&~^<>[bold]`*"ü–±→中\x1b'


def compiled(folder, *tables, document=None, runs=1):
    """Compile tables (or a document) with pdflatex and return the text of the PDF, in the order of the page."""
    body = "\n\\clearpage\n".join(tables)
    head = "\\documentclass{article}\\usepackage[margin=1cm,landscape]{geometry}\n" + PREAMBLE
    text = document or f"{head}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"
    folder.mkdir(exist_ok=True)
    (folder / "document.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "document.tex"]
    for _ in range(runs):
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE_S)
    log = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, log[-3000:]
    assert "Missing character" not in (folder / "document.log").read_text(errors="replace")
    pdf = subprocess.run(["pdftotext", "-layout", "document.pdf", "-"], cwd=folder, capture_output=True, check=True)
    text = pdf.stdout.decode()
    # pdftotext does not know the ligatures of these fonts
    for number, word in enumerate(("ff", "fi", "fl", "ffi", "ffl")):
        text = text.replace(chr(0x1B + number), word).replace(chr(0xFB00 + number), word)
    return text


@needs_pdflatex
class TestCompiled:
    @pytest.mark.thorough
    def test_the_complete_results_over_pages(self, published, tmp_path):
        text = compiled(tmp_path, render(make_table("6", published, "printed-v2"), "tex"))
        lines = [line.split() for line in text.split("\n")]
        expected = [list(row.values()) for row in paper.rows("complete-v2")]
        assert [line for line in lines if line[:1] and line[0] in ("polar", "nope", "rope")] == expected
        # the headings stand again on every page
        assert sum(line[:2] == ["Type", "Reg"] for line in lines) == text.count("\f") > 1

    @pytest.mark.thorough
    def test_latex_of_texts_seeds_and_hostile_names(self, tmp_path, empty, make, run, store):
        cell, _ = make
        database = empty
        cells = [cell(index, attn_type=HOSTILE, axes={HOSTILE: "1"}, seed=index) for index in range(3)]
        cells += [cell(3, axes={HOSTILE: "2"}), cell(4, memory=HOSTILE)]
        database.record_revision(HOSTILE, grid_text="x", grid_file="x", cells=cells)
        for record, value in zip(cells[:3], (1.0, 2.0, 4.0), strict=True):
            run(database, record.id, "done", [Measurement(probe="val", metric="val_loss", value=value)])
        run(database, cells[3].id, "done", [Measurement(probe="val", metric="val_loss", reason=HOSTILE)])
        tables = [make_table(name, database) for name in ("6", "1", "2", "4", "5", "failures", "provenance", "effects")]
        text = compiled(
            tmp_path / "tex", *(render(table, "tex") for table in (*tables, make_table("6", store, "quick")))
        )
        tokens = text.split()
        assert "2.333" in text
        assert "1.528" in text
        assert "needs-eval" in tokens
        assert "root:" not in text
        assert "[U+4E2D]" in text

    @pytest.mark.thorough
    def test_latex_of_complete_appendix(self, store, tmp_path):
        write_report_folder(store, "quick", out=tmp_path, formats=["tex"])
        text = compiled(tmp_path, document=(tmp_path / "appendix.tex").read_text(), runs=3)
        assert "Complete results. Sweep quick, revision 1" in " ".join(text.split())
        assert "128.7 ZF" in text
        assert not re.findall("Overfull.*", (tmp_path / "document.log").read_text(errors="replace"))

    @pytest.mark.thorough
    @pytest.mark.usefixtures("few_deals")
    def test_appendix_of_the_paper_has_sixteen_pages(self, published, tmp_path, monkeypatch):
        monkeypatch.setattr(report_folder, "FORMATS", ("pdf", "png"))  # what LaTeX and the index show
        write_report_folder(published, "printed-v2", out=tmp_path, formats=["tex"], reference="printed-v2")
        text = compiled(tmp_path, document=(tmp_path / "appendix.tex").read_text(), runs=3)
        log = (tmp_path / "document.log").read_text(errors="replace")
        assert not re.findall("Overfull.*|.*Warning.*", log)
        if tgtermes_is_installed():
            assert 10 < text.count("\f") <= 16
        info = subprocess.run(["pdfinfo", "-l", "-1", "document.pdf"], cwd=tmp_path, capture_output=True, check=True)
        sizes = re.findall(r"Page +\d+ size: +([\d.]+) x ([\d.]+)", info.stdout.decode())
        assert all(float(width) < float(height) for width, height in sizes), "every page is upright"
        assert "[U+" not in text  # a sign that LaTeX lacks
        # the numbers of the paper are those of the tables, and empty tables are named with their reason
        for number, title in ((1, "Attention alone"), (4, "Training throughput"), (6, "Complete results")):
            assert re.search(rf"Table {number}: {title}", text)
        assert re.search(r"Failures: No attempt failed, diverged or was interrupted\.", " ".join(text.split()))


def tgtermes_is_installed():
    """Return True if LaTeX has the font that the appendix is set in; otherwise it takes a wider one."""
    listing = subprocess.run(["kpsewhich", "tgtermes.sty"], capture_output=True)
    return listing.returncode == 0


def test_number_columns_are_those_of_siunitx(published_effects):
    text = render(published_effects, "tex")
    spec = re.search(r"\\begin\{longtable\}\{@\{\}(.*)@\{\}\}", text)
    assert spec is not None
    plus = "S[table-format=+2.3, print-implicit-plus]"
    assert spec[1].startswith(f"lllS[table-format=2.0]{plus}{plus}{plus}S[table-format=<1.4]")


def test_heads_of_complete_results_are_those_of_the_paper(published):
    """Clean, Junk and Ndl span the shortest and the longest length; units stand in a line of their own."""
    text = render(make_table("6", published, "printed-v2"), "tex")
    above, rules, labels, units = text.partition("\\toprule\n")[2].splitlines()[:4]
    assert re.findall(r"\\multicolumn\{2\}\{c\}\{(\w+)\}", above) == ["Clean", "Junk", "Ndl"]
    assert re.findall(r"\d+-\d+", rules) == ["7-8", "9-10", "11-12"]
    printed = ["Type", "Reg", "Dist", "Mem", "Win", "Val", *(["2K", "64K"] * 3), "MFU"]
    assert [cell.strip(" {}\\") for cell in labels.split("&")] == printed
    assert re.findall(r"\{(nats/token|\\%)\}", units) == ["nats/token"] + ["nats/token"] * 2 + ["\\%"] * 2
    assert text.count("\\cmidrule") == 2 * 3, "the headings stand again on every page"


def test_caption_names_data_units_and_interval(published_effects):
    caption = next(line for line in render(published_effects, "tex").splitlines() if line.startswith("\\caption"))
    assert caption.startswith("\\caption[{Effect of each factor, by matched pairs}]{\\textbf{Effect of each factor")
    for sentence in (
        "Sweep printed-v2, revision 1: 120 of 120 cells done.",
        "Differences in nats per token",
        "Low, High and p",
    ):
        assert caption.count(sentence) == 1
    below = render(published_effects, "tex").partition("\\end{longtable}")[2]
    assert "Low, High and p" not in below.split("atma-sweep-trace")[0]


def test_rows_of_a_rendering_read_back_as_the_table(published, published_effects):
    """Blocks of rows lose their first column on the page, not when read."""
    for table in (
        make_table("6", published, "printed-v2"),
        make_table("3", published, "printed-v2"),
        published_effects,
    ):
        read = latex_rows(render(table, "tex"))
        assert len(read) == len(table.rows) + 1
        assert {len(row) for row in read} == {len(table.columns)}
        for row, texts in zip(read[1:], table.rows, strict=True):
            tilde = [cell.replace(r"\textasciitilde{}", "~") for cell in row]
            plain = [re.sub(r"\\bfseries |^\{|\}$|\\(?=[_%])", "", cell) for cell in tilde]
            assert plain[0].startswith(texts[0])
            assert plain[1:] == list(texts[1:])


def test_a_wide_table_gets_smaller_letters(published):
    """LaTeX compares the width, in digits of its font and points of gaps, with the line of whatever document it is in."""
    matches = re.findall(
        r"\\ifdim\\dimexpr([\d.]+)\\fontcharwd\\font`\\0 \+0\.000\\linewidth\+(\d+)pt\\relax>"
        r"\\dimexpr\\linewidth\+1pt\\relax\\(\w+)\\fi",
        render(make_table("6", published, "printed-v2"), "tex"),
    )
    assert [size for *_, size in matches] == ["scriptsize", "tiny"]
    digits, gaps = float(matches[0][0]), int(matches[0][1])
    # 13 columns of at most 10 characters
    assert 45 < digits < 130
    assert gaps == 13 * 6


def wide(columns: int, width: int) -> Table:
    """Return a table of labels, the first of which has words of several lengths, and numbers of eight digits."""
    labels = ("some words of this label here"[:width], "short")
    entries = tuple(TableEntry(text="12345.678", value=12345.678) for _ in range(columns))
    return Table(
        number="wide",
        title="Wide",
        columns=("First", "Second", *(f"N{index}" for index in range(columns))),
        text_columns=2,
        rows=((*labels, *(entry.text for entry in entries)),) * 3,
        raw_of=tuple,
        trace_of=dict,
        notes=(),
        entries=(entries,) * 3,
    )


def test_a_table_lies_on_its_side_only_if_it_must():
    """At 3.5 pt a digit, 12 columns of 8.7 digits and a gap of 6 pt fill 437 of 520 pt; 14 columns with labels do not fit."""
    assert "}p{0." not in render(wide(10, 29), "tex", trace=False), "everything fits"
    assert not needs_landscape(wide(12, 29))
    assert "}p{0." in render(wide(12, 29), "tex", trace=False), "the first label takes two lines"
    assert needs_landscape(wide(16, 29))
    text = appendix_text("s", {"wide": wide(16, 29), "small": wide(2, 5)}, [], {"6": "no number"})
    assert re.findall(r"\\begin\{landscape\}(.*)\\end\{landscape\}", text) == [r"\setcounter{table}{0}\input{wide}"]
    assert r"\textbf{6}: no number." in text


def test_a_tall_table_runs_over_pages():
    """Twenty rows of 200 characters are five lines each, more than a page holds."""
    tall = replace(wide(1, 4), rows=(("word " * 40, "b", "1.0"),) * 20, entries=((TableEntry(text="1.0"),),) * 20)
    assert r"\begin{longtable}" in render(tall, "tex", trace=False)
    assert r"\begin{longtable}" not in render(replace(tall, rows=tall.rows[:5]), "tex", trace=False)


def test_units_of_shares_and_of_their_differences():
    def shares(*texts: str) -> list[TableEntry]:
        return [TableEntry(text=text, value=0.5, unit="fraction") for text in texts]

    assert unit_text(shares("50.0", "-9.2")) == "%"
    assert unit_text(shares("+50.0", "-9.2")) == "points"
    assert unit_text(shares("-50.0", "-9.2"), "+-") == "points"
    assert unit_text([*shares("50.0"), TableEntry(text="1", value=1.0, unit="s")]) == ""


def test_appendix_keeps_the_numbers_of_the_paper():
    """Without an empty Table 1, Table 2 is still 2, and named tables follow the numbered ones."""
    tables = {
        "1": replace(wide(1, 4), rows=(), entries=(), notes=("Nothing is measured.",)),
        "2": wide(1, 4),
        "x": wide(1, 4),
    }
    text = appendix_text("s", tables, [], {})
    assert re.findall(r"\{table\}\{(\d)\}\\input\{(.*)\}", text) == [("1", "table-2"), ("2", "x")]
    assert r"\textbf{Wide}: Nothing is measured." in text


def test_escapes_leave_no_sign_that_pdflatex_lacks():
    assert tex_escaped("中→é–±") == r"[U+4E2D][U+2192]é\textendash{}\textpm{}"
    assert tex_escaped("∝ √N") == r"\ensuremath{\propto} \ensuremath{\surd}N"


@pytest.mark.thorough
def test_a_folder_of_everything(store, tmp_path):
    written = write_report_folder(store, "quick", out=tmp_path / "all", reference="printed-v2")
    names = {path.name for path in written.files}
    assert {
        "index.md",
        "index.html",
        "appendix.tex",
        "table-6.csv",
        "effects.html",
        "failures.json",
        "dashboard.html",
    } <= names
    assert "compare" not in written.skipped
    assert all(path.stat().st_size for path in written.files)
    index = (tmp_path / "all" / "index.md").read_text()
    for link in re.findall(r"\]\((.*?)\)", index):
        assert link in names
