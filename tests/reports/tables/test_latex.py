"""Our LaTeX compiles, and every printed number comes out of it."""

import re
import shutil
import subprocess

import pytest
from atma_sweep.reports.render import render
from atma_sweep.reports.render.latex import PREAMBLE
from atma_sweep.reports.report_folder import write_report_folder
from atma_sweep.reports.tables import make_table
from atma_sweep.results import paper
from atma_sweep.results.console.text import tex_escaped
from atma_sweep.results.store.records import Measurement
from patience import PATIENCE_S

needs_pdflatex = pytest.mark.skipif(
    shutil.which("pdflatex") is None or shutil.which("pdftotext") is None,
    reason="needs pdflatex with siunitx, and pdftotext: apt-get install texlive-latex-extra texlive-science poppler-utils",
)
HOSTILE = 'a|b_{x}$\\input{/etc/passwd}%#&~^<>[bold]`*"ü–±→中\x1b'


def compiled(folder, *tables, document=None):
    """Compile tables (or a document) with pdflatex and return the text of the PDF, in the order of the page."""
    body = "\n\\clearpage\n".join(tables)
    head = "\\documentclass{article}\\usepackage[margin=1cm,landscape]{geometry}\n" + PREAMBLE
    text = document or f"{head}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"
    folder.mkdir(exist_ok=True)
    (folder / "document.tex").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "document.tex"],
        cwd=folder,
        capture_output=True,
        timeout=PATIENCE_S,
    )
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
        text = compiled(tmp_path, document=(tmp_path / "appendix.tex").read_text())
        assert "Interactions, sweep quick" in text
        assert "128.7 ZF" in text
        log = (tmp_path / "document.log").read_text(errors="replace")
        assert not re.findall(r"Overfull .hbox .* in alignment", log), "no table is wider than the page"


def test_number_columns_are_those_of_siunitx(published_effects):
    text = render(published_effects, "tex")
    spec = re.search(r"\\begin\{longtable\}\{@\{\}(.*)@\{\}\}", text)
    assert spec is not None
    assert spec[1].startswith("llllS[table-format=2.0]S[table-format=+2.3, print-implicit-plus]")


def test_a_wide_table_over_pages_gets_smaller_letters(published):
    """By its width in points at the size of footnotes and the next smaller one, against the line of whatever document it is in."""
    matches = re.findall(
        r"\\ifdim(\d+)pt>\\linewidth\\(\w+)\\fi", render(make_table("6", published, "printed-v2"), "tex")
    )
    (full, first), (smaller, second) = matches
    assert (first, second) == ("scriptsize", "tiny")
    assert float(smaller) == pytest.approx(float(full) * 7 / 8, abs=1)
    # 13 columns of at most 10 signs
    assert 300 < float(full) < 13 * (10 * 4.4 + 7)


def test_escapes_leave_no_sign_that_pdflatex_lacks():
    assert tex_escaped("中→é–±") == r"[U+4E2D][U+2192]é\textendash{}\textpm{}"


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
