"""Tests of what a paper takes from a figure: PGF, bare pictures, captions, widths, and lines that keep their x."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from atma_sweep.cli import app
from atma_sweep.reports.check import check_file
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions, millimetres
from atma_sweep.reports.figures.canvas.scales import tick_label
from atma_sweep.reports.figures.files import drawn, rendered
from atma_sweep.reports.figures.pgf import pgf_content
from atma_sweep.reports.render import style
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.results.paper import open_published
from atma_sweep.results.store.store import Store
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def published() -> Store:
    return open_published()


@pytest.mark.thorough
def test_pgf_has_texts_and_trace(published: Store, tmp_path: Path) -> None:
    """Braces are balanced, every text of the picture is there, and the file is checked like others."""
    figure_data = make_figure("needle", published, "printed-v2")
    code = rendered(figure_data, "pgf", look=FigureOptions(title=False, width_mm=89.0)).decode()
    body = re.sub(r"\\[{}]", "", code.partition("\n")[2])
    assert body.count("{") == body.count("}")
    assert code.count(r"\begin{pgfscope}") == code.count(r"\end{pgfscope}")
    for text in ("PoLAR", "with memory", r"digits recalled (\%)", "64K"):
        assert text in code
    assert re.search(r"\\pgfqpoint\{3\.5039\d*in\}", code), "89 mm"
    file = tmp_path / "needle.pgf"
    file.write_text(code)
    assert check_file(file, published) == []
    file.write_text(code.replace("PoLAR", "Polar"))
    assert len(check_file(file, published)) == 1


def test_pgf_refuses_raster_parts() -> None:
    with drawing.settings():
        figure = drawing.page(2.0, 2.0)
        figure.add_subplot().imshow([[0.0, 1.0]])
        drawing.finalize_layout(figure)
        with pytest.raises(ReportError, match="figure map has raster parts, which PGF cannot hold"):
            pgf_content(figure, None, "map")


@pytest.mark.thorough
def test_bare_figure_writes_its_caption_file(tmp_path: Path) -> None:
    out = tmp_path / "n.svg"
    arguments = ["report", "--figure", "needle", "--sweep", "printed-v2", "--bare", "--caption", "--width", "120"]
    assert CliRunner().invoke(app, [*arguments, "--out", str(out)]).exit_code == 0
    caption = (tmp_path / "n.txt").read_text()
    assert caption.startswith("Needle accuracy over context length. Share of planted digits")
    assert "Needle accuracy" not in re.sub(r"<(metadata|title)>.*?</\1>", "", out.read_text(), flags=re.DOTALL)
    assert float(re.search(r'width="([\d.]+)pt"', out.read_text())[1]) == pytest.approx(120 / 25.4 * 72, abs=0.1)  # type: ignore[index]


def test_width_without_unit_is_millimetres() -> None:
    assert [millimetres(text) for text in ("89", "120.5", "8.9cm")] == [89, 120.5, 89]


@pytest.mark.thorough
def test_lines_stand_at_their_lengths(published: Store) -> None:
    """Every point of every mean is at a measured length, with the mean of the cells there, computed by hand."""
    figure_data = make_figure("needle", published, "printed-v2")
    with drawing.settings():
        axes = drawn(figure_data).axes[0]
    frame = figure_data.frame
    rows = frame[(frame["panel"] == "polar")]
    wanted = {
        tuple(round(100 * float(group["value"].mean()), 6) for _, group in line.groupby("length"))
        for _, line in rows.groupby("line")
    }
    marked = [line for line in axes.lines if line.get_marker() in ("o", "s")]
    assert {tuple(round(float(y), 6) for y in line.get_ydata()) for line in marked} == wanted
    assert {tuple(line.get_xdata()) for line in marked} == {tuple(sorted(set(frame["length"])))}
    assert {line.get_color() for line in marked} == {style.MIXER_INKS["polar"]}
    hollow = [line for line in marked if line.get_markerfacecolor() == style.BACKGROUND]
    assert len(hollow) == 2
    assert {line.get_marker() for line in hollow} == {"o", "s"}


@pytest.mark.parametrize(
    ("number", "text"),
    [(16384, "16K"), (1 << 20, "1M"), (65536000, "65.5M"), (20000, "20K"), (12345, "12345"), (0.003, "0.003"), (-2, "−2"), (512, "512")],
)  # fmt: skip
def test_tick_labels_are_short(number: float, text: str) -> None:
    assert tick_label(number) == text
