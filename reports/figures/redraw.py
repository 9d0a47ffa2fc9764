"""Comparison of a written figure with a fresh drawing: paths, text and colours, ignoring metadata.

SVG: every element outside the metadata; ids that matplotlib derives from contents are compared by their order alone.
PDF: every object except the one that describes the file, with its streams unpacked. PNG: every pixel. PGF: every line that is no comment.
Coordinates may
differ by as much as the last digits of another machine do, which no reader can see.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from xml.etree import ElementTree

MAX_COORDINATE_DIFFERENCE = 0.01  # points that a coordinate may differ by: 1/7200 inch
MAX_COLOUR_DIFFERENCE = 8  # of 255, that a pixel's colour may differ by
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SVG_ID = re.compile(r"(?<=#)[\w-]+")
METADATA = "{http://www.w3.org/2000/svg}metadata"
PROCESSING = re.compile(rb"<\?.*?\?>|<!DOCTYPE[^>\[]*(?:\[.*?\])?[^>]*>", re.DOTALL)
PDF_OBJECT = re.compile(rb"(\d+) 0 obj\s(.*?)endobj", re.DOTALL)
PDF_STREAM = re.compile(rb"(.*?)stream\r?\n(.*)endstream", re.DOTALL)
MAX_SHOWN_CHARS = 60  # characters of a difference that are shown

Part = tuple[str, str]
"""Piece of a picture: its location, and its content."""


def drawing_versions() -> dict[str, str]:
    """Return the versions of the drawing libraries (matplotlib, freetype), as a figure's trace records them."""
    import matplotlib
    from matplotlib import ft2font

    return {"matplotlib": matplotlib.__version__, "freetype": ft2font.__freetype_version__}


def first_difference(written: bytes, drawn: bytes, format: str) -> str | None:
    """Return the first visible difference between two renderings as a sentence; None if a reader sees the same.

    A file that cannot be read gives a sentence, too. Coordinates may differ by 0.01 points, channels of pixels by 8 of
    255. `drawn` must be readable.

    Args:
        written: Content of the file.
        drawn: Content of a fresh drawing.
        format: "svg", "pdf", "png" or "pgf".
    """
    if written == drawn:
        return None
    if format == "png":
        return _png_difference(written, drawn)
    read = {"svg": _svg_parts, "pdf": _pdf_parts, "pgf": _pgf_parts}[format]
    try:
        parts = list(read(written))
    except (ElementTree.ParseError, zlib.error, UnicodeDecodeError) as error:
        return f"the file cannot be read as {format} ({error})"
    for old, new in zip_longest(parts, read(drawn)):
        if old is None:
            return f"{new[0]} is missing from the file"
        if new is None:
            return f"{old[0]} is only in the file"
        if old[0] != new[0]:
            return f"the file has {old[0]} where the new drawing has {new[0]}"
        mismatch = _first_mismatch(old[1], new[1])
        if mismatch is not None:
            return f"{old[0]}: the file has {mismatch[0]}, the new drawing {mismatch[1]}"
    return None


def _first_mismatch(old: str, new: str) -> tuple[str, str] | None:
    """Return the first (old, new) excerpts in which two texts differ; None if they are alike.

    Decimal numbers may differ by 0.01; integers and all other text must be equal.
    """
    if old == new:
        return None
    if NUMBER.split(old) != NUMBER.split(new):
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        start = max(0, at - MAX_SHOWN_CHARS // 2)
        return repr(old[start : start + MAX_SHOWN_CHARS]), repr(new[start : start + MAX_SHOWN_CHARS])
    for a, b in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
        if a != b and ("." not in a + b or abs(float(a) - float(b)) > MAX_COORDINATE_DIFFERENCE):
            return a, b
    return None


def _svg_parts(content: bytes) -> Iterator[Part]:
    """Yield the (location, content) parts of an SVG: the head of the file, then those of every element.

    Ids are replaced by their order of occurrence.

    Raises:
        ParseError: It is not XML.
    """
    # a style sheet or an entity outside the elements can change how they are displayed
    yield "the header of the file", repr(PROCESSING.findall(content))
    root = ElementTree.fromstring(content)
    names: dict[str, str] = {}
    for element in root.iter():
        if "id" in element.attrib:
            names.setdefault(element.attrib["id"], f"id{len(names)}")
    yield from _element_parts(root, names, "the picture")


def _element_parts(element: ElementTree.Element, names: dict[str, str], group: str) -> Iterator[Part]:
    """Yield the (location, content) parts of an element and, recursively, its children; none for metadata.

    The parts of an element are, in this order, its tag, each attribute (by name), its text, and for each child the
    child's parts and the text after it.

    Args:
        element: The element.
        names: Replacement of each id, by order of occurrence.
        group: Id of the surrounding group, which describes the location.
    """
    if element.tag == METADATA:
        return
    kind = element.tag.rpartition("}")[2]
    # the ids of matplotlib's groups say more than the kind of an element
    group = element.attrib.get("id", group) if kind == "g" else group
    location = f"{kind} of {group}"
    yield location, element.tag
    for name, value in sorted(element.attrib.items()):
        normalized = names[value] if name == "id" else SVG_ID.sub(lambda match: names.get(match[0], match[0]), value)
        yield f"{name.rpartition('}')[2]} of {location}", normalized
    yield f"text of {location}", (element.text or "").strip()
    for child in element:
        yield from _element_parts(child, names, group)
        yield f"text after {child.tag.rpartition('}')[2]} of {group}", (child.tail or "").strip()


def _pgf_parts(content: bytes) -> Iterator[Part]:
    """Yield the (location, content) of every line of PGF code except comments.

    Raises:
        UnicodeDecodeError: It is not UTF-8.
    """
    for number, line in enumerate(content.decode().splitlines(), 1):
        if not line.startswith("%"):
            yield f"line {number}", line


def _pdf_parts(content: bytes) -> Iterator[Part]:
    """Yield two (location, content) parts, head and unpacked stream, of every object of a PDF, in its order.

    The description of the file and stream lengths are left out.

    Raises:
        zlib.error: A stream is damaged.
    """
    for number, body in PDF_OBJECT.findall(content):
        # skipped: the description of the file, and stream lengths, which depend on the compression
        if b"/Producer" in body or body.strip().isdigit():
            continue
        match = PDF_STREAM.match(body)
        head, stream = (match[1], match[2].rstrip(b"\r\n")) if match else (body, b"")
        if b"/FlateDecode" in head:
            stream = zlib.decompressobj().decompress(stream)
        head = re.sub(rb"/Length \d+(?! 0 R)", b"", head)
        location = f"object {number.decode()}"
        yield f"the header of {location}", head.decode("latin-1")
        yield f"the content of {location}", stream.decode("latin-1")


def _png_difference(written: bytes, drawn: bytes) -> str | None:
    """Return the first difference between two PNGs as a sentence; None if no pixel differs visibly.

    It names a file that cannot be read, another size, or the number of differing pixels and the first of them. A pixel
    differs if a channel does by more than 8 of 255.
    """
    import numpy as np
    from matplotlib.image import imread

    try:
        old = imread(io.BytesIO(written), format="png")
    except (OSError, SyntaxError, ValueError) as error:
        return f"the file cannot be read as png ({error})"
    new = imread(io.BytesIO(drawn), format="png")
    if old.shape != new.shape:
        return f"the file has {old.shape[1]} x {old.shape[0]} pixels, the new drawing {new.shape[1]} x {new.shape[0]}"
    differs = (np.abs(old - new) > MAX_COLOUR_DIFFERENCE / 255).any(axis=-1)
    if not differs.any():
        return None
    y, x = np.argwhere(differs)[0]
    return f"{int(differs.sum())} pixels have another colour, the first at column {x}, row {y}"
