"""A figure that was changed by hand is no longer what is drawn, whatever its trace says."""

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.check import check_file
from atma_sweep.reports.figures import make_figure, redraw
from atma_sweep.reports.figures.files import FORMATS, read_trace, renderings
from atma_sweep.results.store.store import Store, open_store
from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def pictures(filled: Path) -> dict[str, bytes]:
    return renderings(make_figure("length", open_store(filled), "quick"), FORMATS)


@pytest.fixture
def problems(store: Store, tmp_path: Path) -> Callable[[bytes, str], list[str]]:
    def check(content: bytes, format: str) -> list[str]:
        path = tmp_path / f"figure.{format}"
        path.write_bytes(content)
        return check_file(path, store)

    return check


def replaced(content: bytes, old: str, new: str, count: int = 1) -> bytes:
    changed, n_changes = re.subn(old.encode(), new.encode(), content, count=count, flags=re.DOTALL)
    assert n_changes
    return changed


CHANGES = {
    "a point of a line": (r'(clip-path="url\(#[^"]*\)" )?(<g id="line2d_40">.*?<path d="M )(\d+)', r"\g<1>\g<2>1\g<3>"),
    "a colour": (r"stroke: #(?!000000|ffffff)([0-9a-f]{5})[0-9a-e]", r"stroke: #\g<1>f"),
    "a shifted group": (r'<g id="axes_1">', r'<g id="axes_1" transform="translate(0 3)">'),
    "a scaled picture": (r'viewBox="0 0 (\d+)', r'viewBox="0 9 \g<1>'),
    "a glyph of a word": (r"(<text [^>]*>)[^<]", r"\g<1>9"),
    "one element less": (r"<use [^>]*/>", ""),
    "one element more": (r"</svg>", r'<rect width="9" height="9"/></svg>'),
    "a style sheet": (r"<svg ", r'<?xml-stylesheet href="data:text/css,path{display:none}"?><svg '),
    "a style": (r"</style>", r"path{display:none}</style>"),
    "a link to another marker": (r'(<use xlink:href="#)m[0-9a-f]+', r"\g<1>m0000000000"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_by_hand_is_found(pictures: dict[str, bytes], problems: Any, what: str) -> None:
    assert problems(pictures["svg"], "svg") == []
    changed = replaced(pictures["svg"], *CHANGES[what])
    # neither the trace nor what is well-formed has suffered
    assert read_trace(changed, "svg") == read_trace(pictures["svg"], "svg")
    (line,) = problems(changed, "svg")
    assert line.startswith("figure.svg: the picture does not match the database: ")
    assert line.endswith("; draw it again with --figure length")


@pytest.mark.thorough
def test_invisible_changes_are_ignored(pictures: dict[str, bytes], problems: Any) -> None:
    svg = pictures["svg"]
    names = sorted(set(re.findall(rb'id="([mp][0-9a-f]{10})"', svg)))
    assert names
    for name in names:
        svg = svg.replace(name, name[::-1])
    assert problems(svg, "svg") == []
    nudged = re.sub(rb"(L \d+\.\d{4})\d\d", rb"\g<1>99", svg)
    assert nudged != svg
    assert problems(nudged, "svg") == []
    assert problems(svg.replace(b"<!-- ", b"<!-- x"), "svg") == []


@pytest.mark.thorough
def test_a_pdf_and_a_png_are_drawn_again_too(pictures: dict[str, bytes], problems: Any) -> None:
    pdf = pictures["pdf"]
    page, drawn, first = path_of(pdf)
    moved = zlib.compress(drawn.replace(first[0], b"\n%d%b" % (int(first[1]) + 2, first[2]), 1))
    (line,) = problems(pdf.replace(page, moved + b"\n"), "pdf")
    assert "the picture does not match the database: the content of object" in line
    # packed otherwise, it is the same picture
    assert problems(pdf.replace(page, zlib.compress(drawn, 1) + b"\n"), "pdf") == []
    assert problems(pictures["png"], "png") == []
    assert redraw.first_difference(repainted(pictures["png"]), pictures["png"], "png") == (
        "1 pixels have another colour, the first at column 7, row 5"
    )
    assert "the file cannot be read as png" in str(
        redraw.first_difference(b"x" + pictures["png"], pictures["png"], "png")
    )


def path_of(pdf: bytes) -> tuple[bytes, bytes, re.Match[bytes]]:
    """Return the stream of a PDF that draws lines, packed and unpacked, and a point of a line."""
    for page in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        drawn = zlib.decompressobj().decompress(page) if page.startswith(b"x") else b""
        first = re.search(rb"\n(\d+)(\.\d+ \d+\.\d+ l\n)", drawn)
        if first is not None:
            return page, drawn, first
    raise AssertionError("nothing is drawn")


def repainted(png: bytes) -> bytes:
    import io

    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    picture.putpixel((7, 5), (200, 0, 0, 255))
    out = io.BytesIO()
    picture.save(out, "png")
    return out.getvalue()


@pytest.mark.thorough
def test_dust_of_the_layouts_solver_changes_no_byte(
    pictures: dict[str, bytes], filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds in an order that depends on where objects lie in memory: in one of some renderings the last digits differ."""
    laid_out = Figure.draw_without_rendering

    def dusty(figure: Figure) -> None:
        laid_out(figure)
        for index, axes in enumerate(figure.axes):
            x, y, width, height = axes.get_position(original=True).bounds
            dust = 1e-15 * (index + 1)
            axes.set_position((x + dust, y - dust, width - dust, height + dust))

    monkeypatch.setattr(Figure, "draw_without_rendering", dusty)
    again = renderings(make_figure("length", open_store(filled), "quick"), FORMATS)
    assert {format: content == again[format] for format, content in pictures.items()} == dict.fromkeys(FORMATS, True)


@pytest.mark.thorough
def test_different_matplotlib_version_is_reported(pictures: dict[str, bytes], problems: Any) -> None:
    current_versions = read_trace(pictures["svg"], "svg")["drawn_with"]
    assert current_versions == redraw.drawing_versions()
    versions_text = json.dumps(current_versions, separators=(",", ":"))
    old_version_svg = pictures["svg"].replace(versions_text.encode(), b'{"matplotlib":"3.9.0","freetype":"2.6.1"}')
    assert old_version_svg != pictures["svg"]
    # the same picture is the same picture
    assert problems(old_version_svg, "svg") == []
    (line,) = problems(replaced(old_version_svg, *CHANGES["a colour"]), "svg")
    assert "it was drawn with matplotlib 3.9.0 and freetype 2.6.1, but matplotlib" in line
    assert "only the numbers could be compared, and they match" in line
    older = pictures["svg"].replace(b',"drawn_with":' + versions_text.encode(), b"")
    assert problems(older, "svg") == []
    (line,) = problems(replaced(older, *CHANGES["a colour"]), "svg")
    assert "it was drawn with an unknown version of matplotlib, but" in line
