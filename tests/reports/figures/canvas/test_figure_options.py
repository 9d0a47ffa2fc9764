"""A figure in the dress of a venue: its width in millimetres, letters that are letters, fonts inside, and the trace of it all."""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.cli import app
from atma_sweep.reports.check import check_file
from atma_sweep.reports.figures import FIGURES, make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.figure_options import (
    STYLE_PRESETS,
    FigureOptions,
    millimetres,
    options_from_cli,
    options_from_trace,
    read_style_file,
    with_highlight,
)
from atma_sweep.reports.figures.files import read_trace, rendered, renderings
from atma_sweep.reports.report_folder import write_report_folder
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.results.store.store import Store
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

MM = 72 / 25.4  # points


def report(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["report", *arguments])


def width_of(content: bytes, format: str) -> float:
    """Return the width of a picture in millimetres, as its file says."""
    if format == "svg":
        match = re.search(rb'<svg [^>]*?width="([\d.]+)pt"', content)
    else:
        match = re.search(rb"/MediaBox \[\s*0 0 ([\d.]+) ", content)
    assert match is not None
    return float(match[1]) / MM


class TestWidth:
    @pytest.mark.parametrize(
        ("text", "mm"),
        [("89mm", 89), ("8.9cm", 89), ("3.5in", 88.9), ("252pt", 88.9), ("183 mm", 183), (" 5.5IN", 139.7)],
    )
    def test_units(self, text: str, mm: float) -> None:
        assert millimetres(text) == pytest.approx(mm, abs=1e-3)

    @pytest.mark.parametrize("text", ["mm", "-89mm", "nan mm", "1e3mm", "8,9cm", "89px", "", "9" * 99 + "in", "3mm"])
    def test_invalid_width_is_refused_in_single_line(self, text: str) -> None:
        with pytest.raises(ReportError, match=r"^--width [^\n]*$"):
            millimetres(text)

    @given(st.text(max_size=12))
    def test_any_text_is_width_or_error(self, text: str) -> None:
        with contextlib.suppress(ReportError):
            assert 40 <= millimetres(text) <= 600

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("name", "width", "mm"),
        [("nature", None, 89), ("nature", "183mm", 183), ("neurips", None, 139.7), ("paper", "89mm", 89)],
    )
    def test_files_have_requested_width(self, every: Store, name: str, width: str | None, mm: float) -> None:
        look = options_from_cli(name, width)
        for format, content in renderings(make_figure("length", every), ["svg", "pdf"], look=look).items():
            assert width_of(content, format) == pytest.approx(mm, abs=0.1)


class TestLetters:
    @pytest.mark.thorough
    def test_svg_keeps_text_as_text(self, every: Store) -> None:
        svg = rendered(make_figure("pareto", every), look=options_from_cli("nature")).decode()
        texts = re.findall(r"<text [^>]*>([^<]+)</text>", svg)
        assert {"a", "b"} <= set(texts)
        assert any("tokens/s" in word for word in texts)
        assert "font-family: 'Arial', 'Helvetica'" in svg or ", 'Arial', 'Helvetica'" in svg
        # no letter is an outline: the only shapes that are used again are marks and ticks
        assert not re.search(r'<use xlink:href="#(?!m[0-9a-f]{10})', svg)

    @pytest.mark.thorough
    @pytest.mark.skipif(shutil.which("pdffonts") is None, reason="needs pdffonts: apt-get install poppler-utils")
    @pytest.mark.parametrize("name", ["nature", "neurips"])
    def test_fonts_are_inside_the_pdf(self, every: Store, tmp_path: Path, name: str) -> None:
        (tmp_path / "x.pdf").write_bytes(rendered(make_figure("length", every), "pdf", look=options_from_cli(name)))
        fonts = subprocess.run(["pdffonts", tmp_path / "x.pdf"], capture_output=True, text=True, check=True).stdout
        rows = fonts.splitlines()[2:]
        assert rows
        for row in rows:
            assert "Type 3" not in row
            assert re.search(r"(TrueType|CID \w+)\s.*\byes\s+yes\b", row), row
        if name == "neurips":
            assert "STIXGeneral" in fonts

    @pytest.mark.thorough
    def test_sizes_of_nature_are_five_to_eight_points(self, every: Store) -> None:
        svg = rendered(make_figure("needle", every), look=options_from_cli("nature")).decode()
        sizes = {float(size) for size in re.findall(r"<text [^>]*?(?:font-size: |font: (?:\w+ )?)([\d.]+)px", svg)}
        assert sizes
        assert all(5 <= size <= 7 for size in sizes - {8.0}), "eight is that of the panels' letters"

    @pytest.mark.thorough
    def test_screen_is_larger_than_paper(self, every: Store) -> None:
        figure_data = make_figure("needle", every)
        paper, screen = (rendered(figure_data, look=options_from_cli(name)) for name in ("paper", "screen"))
        assert width_of(screen, "svg") > width_of(paper, "svg")
        assert STYLE_PRESETS["screen"].text > STYLE_PRESETS["paper"].text


class TestNames:
    def test_levels_have_display_names(self) -> None:
        assert [drawing.level_label(level) for level in ("polar", "nope", "rope")] == ["PoLAR", "NoPE", "RoPE"]
        assert [drawing.level_label(level, "memory") for level in ("on", "off")] == ["with memory", "no memory"]

    def test_a_strangers_level_stands_as_it_is(self) -> None:
        assert drawing.level_label("my_mixer") == "my_mixer"
        assert drawing.level_label("0.3", "train.lr") == "lr 0.3"
        assert drawing.level_label("titans", "memory") == "memory titans"

    def test_diverging_map_ends_in_good_and_bad(self) -> None:
        from matplotlib.colors import to_hex

        ends = drawing.diverging()
        assert (to_hex(ends(1.0)), to_hex(ends(0.0))) == (drawing.GOOD, drawing.BAD)


class TestHighlight:
    def test_by_slug_id_and_levels(self, every: Store) -> None:
        data = load_sweep_data(every)
        ids = {cell.slug: cell.cell_id for cell in data.cells}

        def highlighted(*selectors: str) -> tuple[str, ...]:
            return with_highlight(FigureOptions(), data, selectors).highlight

        assert highlighted("slug-2") == (ids["slug-2"],)
        assert highlighted(ids["slug-2"]) == (ids["slug-2"],)
        polar = [cell.cell_id for cell in data.cells if cell.levels["attn_type"] == "polar"]
        assert highlighted("polar") == tuple(polar)
        assert highlighted("polar,memory=on") == (ids["slug-2"],)
        assert highlighted("slug-1", "slug-1", "slug-2") == (ids["slug-1"], ids["slug-2"])

    @pytest.mark.thorough
    @pytest.mark.parametrize("word", ["slug-22", "", ",", "memory=maybe", "on", "=", "pola\n"])
    def test_unknown_highlight_is_refused_with_hints(self, every: Store, word: str) -> None:
        with pytest.raises(ReportError) as error:
            with_highlight(FigureOptions(), load_sweep_data(every), [word])
        assert "no cell of sweep all" in str(error.value)
        assert "slug-" in str(error.value)

    def test_a_figure_without_cells_says_which_have_them(self, every: Store, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        result = report("--figure", "effects", "--db", "empty.db", "--highlight", "slug-1")
        assert isinstance(result.exception, ReportError)
        takers = str(result.exception).partition("figures that do: ")[2].split(", ")
        assert {"needle", "length", "loss", "pareto"} <= set(takers) <= set(FIGURES) - {"effects"}

    @pytest.mark.thorough
    def test_it_changes_the_picture(self, every: Store) -> None:
        for name in ("needle", "length", "loss", "pareto"):
            figure_data = make_figure(name, every)
            look = with_highlight(FigureOptions(), load_sweep_data(every), ["slug-3"])
            assert rendered(figure_data, look=look, trace=False) != rendered(figure_data, trace=False), name


class TestOwnStyle:
    @pytest.mark.thorough
    def test_a_file_of_settings(self, every: Store, tmp_path: Path) -> None:
        file = tmp_path / "mine.mplstyle"
        file.write_text('# mine\nfont.size: 6.25  # small\nxtick.labelsize: 5.25\naxes.labelcolor: "#112233"\n')
        look = options_from_cli(str(file))
        assert dict(look.own) == {"font.size": 6.25, "xtick.labelsize": 5.25, "axes.labelcolor": "#112233"}
        svg = rendered(make_figure("length", every), look=look)
        assert b"font-size: 5.25px" in svg
        assert read_trace(svg, "svg")["look"]["own"] == dict(look.own)

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("font.sise: 7", r"line 2: font\.sise cannot be set in a style file; did you mean font\.size\?"),
            ("font.size: large enough", r"line 2: .*font\.size"),
            ("font.size", "line 2: one setting per line expected"),
            ("text.usetex: True", "line 2: text.usetex cannot be set in a style file"),
            ("text.latex.preamble: x", "line 2: text.latex.preamble cannot be set"),
            ("backend: Qt5Agg", "line 2: backend cannot be set"),
            ("font.size: nan", "line 2: .*font.size"),
        ],
    )
    def test_invalid_style_file_is_refused_in_single_line(self, tmp_path: Path, line: str, why: str) -> None:
        file = tmp_path / "mine.mplstyle"
        file.write_text(f"\n{line}\n")
        with pytest.raises(ReportError, match=why) as error:
            read_style_file(file)
        assert "\n" not in str(error.value)

    def test_unknown_style_suggests_nearest(self) -> None:
        with pytest.raises(ReportError, match=r"unknown style 'natur'; .*did you mean nature\?; or a file that ends"):
            options_from_cli("natur")
        with pytest.raises(ReportError, match="cannot read the style"):
            options_from_cli("nothing.mplstyle")


class TestTrace:
    def test_a_look_is_read_back(self) -> None:
        look = FigureOptions(style="nature", width_mm=89.0, title=False, highlight=("a", "b"), own={"font.size": 7.0})
        stored = look.as_json()
        assert options_from_trace(json.loads(json.dumps(stored))) == FigureOptions(
            **{**vars(look), "font": stored["font"]}
        )
        assert options_from_trace(None) == FigureOptions()

    @pytest.mark.parametrize(
        "stored_options",
        [1, [], "x", {"style": "x"}, {"style": []}, {"width_mm": "x"}, {"width_mm": 1e9}, {"title": 1}, {"font": 3},
         {"own": {"text.usetex": True}}, {"own": 3}, {"own": {"font.size": []}}, {"highlight": 3}],
    )  # fmt: skip
    def test_invalid_stored_options_are_refused(self, stored_options: Any) -> None:
        with pytest.raises(ReportError, match=r"^the style options recorded in the file cannot be read[^\n]*$"):
            options_from_trace(stored_options)

    @pytest.mark.thorough
    def test_check_draws_it_again_as_it_was(self, every: Store, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = (
            "--figure",
            "length",
            "--db",
            "empty.db",
            "--style",
            "nature",
            "--width",
            "183mm",
            "--highlight",
            "slug-3",
        )
        result = report(*arguments, "--out", "x.svg")
        assert result.exit_code == 0
        assert result.stderr.startswith("caption: Loss over context length. ")
        assert check_file("x.svg", every) == []
        changed = Path("x.svg").read_text().replace('"width_mm":183.0', '"width_mm":89.0')
        Path("y.svg").write_text(changed)
        assert any("the picture does not match the database" in line for line in check_file("y.svg", every))
        Path("z.svg").write_text(changed.replace('"font":"', '"font":"No such '))
        (line,) = check_file("z.svg", every)
        assert "the figure can no longer be drawn: the font No such" in line

    @pytest.mark.thorough
    def test_no_title_means_none(self, every: Store) -> None:
        figure_data = make_figure("length", every)
        bare, titled = (
            rendered(figure_data, look=FigureOptions(title=on), trace=False).decode() for on in (False, True)
        )
        texts = [" ".join(re.findall(r"<text [^>]*>([^<]+)</text>", svg)) for svg in (bare, titled)]
        assert "Sweep all" in texts[1]
        assert "Sweep all" not in texts[0]
        assert figure_data.notes[0][:20] not in texts[0]


@pytest.mark.parametrize(
    "arguments", [("--style", "nature"), ("--width", "89mm"), ("--no-title",), ("--log",), ("--by", "seed")]
)
def test_a_look_needs_a_figure(arguments: tuple[str, ...]) -> None:
    result = report("--table", "6", *arguments)
    assert isinstance(result.exception, ReportError)
    assert str(result.exception) == f"{arguments[0]} applies to figures; add --figure NAME or --all"


def test_an_option_that_a_figure_does_not_take(every: Store, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = report("--figure", "needle", "--by", "memory", "--db", "empty.db")
    assert isinstance(result.exception, ReportError)
    assert str(result.exception) == "figure needle takes no --by; figures that do: loss, response"


@pytest.mark.thorough
def test_report_folder_shares_style_and_captions(every: Store, tmp_path: Path) -> None:
    write_report_folder(
        every, out=tmp_path, formats=["tex"], figures=("length",), look=options_from_cli("nature", title=False)
    )
    assert width_of((tmp_path / "figure-length.svg").read_bytes(), "svg") == pytest.approx(89, abs=0.1)
    document = (tmp_path / "appendix.tex").read_text()
    assert r"\label{fig:length}" in document
    figure_data = make_figure("length", every)
    assert (
        rf"\caption[{{{figure_data.title}}}]{{\textbf{{{figure_data.title}.}} {figure_data.notes[0].strip()}"
        in document
    )
    page = (tmp_path / "index.html").read_text()
    assert figure_data.title in page
    assert check_file(tmp_path / "figure-length.svg", every) == []
