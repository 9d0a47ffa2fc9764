"""Figure as SVG, PDF, PNG or PGF: the same bytes from the same data, with a trace that a program can read back.

The trace is one line of JSON: in SVG and PNG the description, in PDF the subject, in PGF the first line. Text stays text in SVG and PDF, not
outlines.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from ...results.console.text import choices_hint, sanitize_all, sanitize_line
from ...results.exchange.installed_parts import running_part
from ..sweep_data import ReportError
from . import FIGURES
from .canvas import drawing
from .canvas.base import FigureData
from .canvas.figure_options import FigureOptions
from .pgf import pgf_content, pgf_trace
from .redraw import drawing_versions

FORMATS = ("svg", "pdf", "png")
WRITABLE_FORMATS = (*FORMATS, "pgf")
"""Formats of a single figure; `--all` writes FORMATS."""
METADATA_KEYS = {"svg": "Description", "pdf": "Subject", "png": "Description"}
PNG_DPI = 300  # dots per inch of a PNG
TRACE = "atma-sweep-trace:"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
PDF_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)


def trace_text(figure_data: FigureData, look: FigureOptions) -> str:
    """Return the trace, the figure options and the versions of the drawing libraries, as one line of ASCII.

    It is "atma-sweep-trace:", a space and JSON. Keys: figure, sweep, revision, cells (attempt ids by cell id), sources,
    data (SHA-256 of the frame), lengths, options and only where set, look (`FigureOptions.as_json`) and drawn_with
    (versions of matplotlib and freetype).

    Raises:
        ReportError: The font of the options is not installed.
    """
    trace = {**figure_data.trace, "look": look.as_json(), "drawn_with": drawing_versions()}
    return f"{TRACE} {json.dumps(trace, separators=(',', ':'), ensure_ascii=True, allow_nan=False)}"


def rendered(
    figure_data: FigureData, format: str = "svg", *, look: FigureOptions | None = None, trace: bool = True
) -> bytes:
    """Return the picture as the content of a file of one format.

    Args:
        figure_data: The figure.
        format: "svg", "pdf", "png" or "pgf".
        look: Figure options; None: the defaults.
        trace: Whether the file carries the trace.

    Raises:
        ReportError: The format is unknown, or a font is missing.
    """
    return renderings(figure_data, [format], look=look, trace=trace)[format]


def renderings(
    figure_data: FigureData, formats: Sequence[str] = FORMATS, *, look: FigureOptions | None = None, trace: bool = True
) -> dict[str, bytes]:
    """Return the picture as file contents by format; it is drawn once, and nothing is written.

    The same data give the same bytes on machines with the same drawing libraries. A lock admits one thread at a time.

    Args:
        figure_data: The figure.
        formats: Formats among "svg", "pdf", "png" and "pgf"; by default all but the last. A PNG has 300 dots per inch.
        look: Figure options; None: the defaults.
        trace: Whether the files carry the trace.

    Raises:
        ReportError: A format is unknown, or this machine lacks the font.
    """
    for format in formats:
        if format not in WRITABLE_FORMATS:
            raise ReportError(f"figures cannot be written as {format!r}; {choices_hint(format, WRITABLE_FORMATS)}")
    look = look or FigureOptions()
    metadata: dict[str, dict[str, Any]] = {
        "svg": {"Title": sanitize_line(figure_data.title), "Creator": "atma-sweep", "Date": None},
        "pdf": {"Title": sanitize_line(figure_data.title), "Creator": "atma-sweep", "CreationDate": None},
        "png": {"Title": sanitize_line(figure_data.title), "Software": "atma-sweep"},
    }
    if trace:
        for format, metadata_key in METADATA_KEYS.items():
            metadata[format][metadata_key] = trace_text(figure_data, look)
    contents = {}
    with drawing.settings(look):
        figure = drawn(figure_data, look)
        for format in formats:
            if format == "pgf":
                contents[format] = pgf_content(
                    figure, trace_text(figure_data, look) if trace else None, figure_data.name
                )
                continue
            out = io.BytesIO()
            figure.savefig(out, format=format, metadata=metadata[format], dpi=PNG_DPI if format == "png" else 72)
            contents[format] = _with_families(out.getvalue(), look) if format == "svg" else out.getvalue()
    return contents


def drawn(figure_data: FigureData, look: FigureOptions | None = None) -> Any:
    """Return the matplotlib Figure with its final layout.

    Call it, and use the result, inside `drawing.settings(look)`.

    Args:
        figure_data: The figure; control characters and dollar signs in its texts are made safe here.
        look: Figure options; None: those of the surrounding `settings`.

    Raises:
        InstalledPartError: The figure is one of an installed package, and fails.
    """
    spec = FIGURES[figure_data.name]
    with running_part("figures", figure_data.name, spec.package):
        draw = spec.load(str(__package__)).draw
        figure = draw(_with_drawable_text(figure_data), look or drawing.current_options())
        # once: the layout takes longer than drawing, and every format then has the same one
        drawing.finalize_layout(figure)
    return figure


def _with_families(svg: bytes, look: FigureOptions) -> bytes:
    """Return the SVG with all fonts of the style named, for a reader's machine that lacks the font of the drawing.

    Args:
        svg: Content of the SVG, drawn with the font of `look`.
        look: Figure options.
    """
    fonts = dict.fromkeys((look.font_family(), *look.preset.fonts))
    families = ", ".join((*(f"'{font}'" for font in fonts), look.preset.fallback_fonts))
    return svg.replace(f"font-family: '{look.font_family()}'".encode(), f"font-family: {families}".encode())


def _drawable_text(text: str) -> str:
    # XML forbids control characters, and two dollar signs would start a formula in matplotlib
    return sanitize_line(text).replace("$", r"\$")


def _with_drawable_text(figure_data: FigureData) -> FigureData:
    """Return a copy of the figure with control characters removed and dollar signs escaped.

    This covers title, notes (with the glossary, which becomes one of them), draw options and the columns of the frame that are not numeric; the trace stays.
    """
    frame = figure_data.frame.copy(deep=False)
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            frame[name] = frame[name].map(lambda cell_value: sanitize_all(cell_value, _drawable_text))
    title, notes, draw_options = sanitize_all(
        (figure_data.title, figure_data.caption_notes(), dict(figure_data.draw_options)), _drawable_text
    )
    return replace(figure_data, title=title, notes=tuple(notes), glossary={}, frame=frame, draw_options=draw_options)


def read_trace(content: bytes, format: str) -> dict[str, Any]:
    """Return the trace that a rendering carries, as a dictionary.

    Keys: figure, sweep, revision, cells, sources, data, look, drawn_with and, where set, lengths, options and only;
    they are not checked here.

    Args:
        content: Content of the file.
        format: "svg", "pdf" or "png".

    Raises:
        ReportError: The format is unknown, or the file carries no readable trace of ours.
    """
    readers = {"svg": _svg_text, "pdf": _pdf_text, "png": _png_text, "pgf": pgf_trace}
    if format not in readers:
        raise ReportError(f"figures cannot be read from {format!r}; {choices_hint(format, FORMATS)}")
    try:
        text = readers[format](content)
        trace = json.loads(text.removeprefix(TRACE)) if text is not None and text.startswith(TRACE) else None
    except (ValueError, zlib.error):
        trace = None
    if not isinstance(trace, dict):
        raise ReportError(f"this {format} has no atma-sweep trace")
    return trace


def _svg_text(content: bytes) -> str | None:
    """Return the description of an SVG; None if it has none or is not XML."""
    try:
        return ElementTree.fromstring(content).findtext(f".//{DESCRIPTION}")
    except ElementTree.ParseError:
        return None


def _pdf_text(content: bytes) -> str | None:
    """Return the subject of a PDF as matplotlib writes it, unescaped; None if there is none.

    Raises:
        ValueError: It is not ASCII.
    """
    start = content.find(b"/Subject (")
    if start < 0:
        return None
    match = re.match(rb"/Subject \(((?:\\.|[^\\()])*)\)", content[start:], re.DOTALL)
    return PDF_ESCAPE.sub(rb"\1", match[1]).decode("ascii") if match else None


def _png_text(content: bytes) -> str | None:
    """Return the text of the first chunk named Description of a PNG, decompressed; None if it has none.

    Raises:
        zlib.error: The compressed text is damaged.
    """
    offset = 8
    while offset + 8 <= len(content):
        size, kind = int.from_bytes(content[offset : offset + 4], "big"), content[offset + 4 : offset + 8]
        data = content[offset + 8 : offset + 8 + size]
        if kind in (b"tEXt", b"zTXt") and data.startswith(b"Description\0"):
            text = data.partition(b"\0")[2]
            return (zlib.decompress(text[1:]) if kind == b"zTXt" else text).decode("latin-1")
        offset += 12 + size
    return None
