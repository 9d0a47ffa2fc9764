"""Whether a written figure shows what is drawn now: its paths, its words and its colours, not what it says of itself.

SVG: every element outside the metadata; ids that matplotlib makes of contents are told apart by their order alone. PDF: every
object but the one that describes the file, its streams unpacked. PNG: every dot. Coordinates may differ by as little as another
machine's last digits do, and no reader can see.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from xml.etree import ElementTree

MAX_COORDINATE_DIFFERENCE = 0.01  # points that a coordinate may be off, 1/7200 inch
MAX_COLOUR_DIFFERENCE = 8  # of 255: how much a dot's colour may be off
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SVG_ID = re.compile(r"(?<=#)[\w-]+")
METADATA = "{http://www.w3.org/2000/svg}metadata"
PROCESSING = re.compile(rb"<\?.*?\?>|<!DOCTYPE[^>\[]*(?:\[.*?\])?[^>]*>", re.DOTALL)
PDF_OBJECT = re.compile(rb"(\d+) 0 obj\s(.*?)endobj", re.DOTALL)
PDF_STREAM = re.compile(rb"(.*?)stream\r?\n(.*)endstream", re.DOTALL)
MAX_SHOWN_CHARS = 60  # characters of a difference

Part = tuple[str, str]
"""A piece of a picture: where it stands, and what stands there."""


def versions() -> dict[str, str]:
    """What draws here, as a figure's trace says it."""
    import matplotlib
    from matplotlib import ft2font

    return {"matplotlib": matplotlib.__version__, "freetype": ft2font.__freetype_version__}


def difference(written: bytes, drawn: bytes, format: str) -> str | None:
    """The first thing that `written` shows otherwise than `drawn`, in words; None where a reader sees the same."""
    if written == drawn:
        return None
    if format == "png":
        return _png_difference(written, drawn)
    read = {"svg": _svg_parts, "pdf": _pdf_parts}[format]
    try:
        parts = list(read(written))
    except (ElementTree.ParseError, zlib.error) as error:
        return f"it cannot be read as {format} ({error})"
    for old, new in zip_longest(parts, read(drawn)):
        if old is None:
            return f"{new[0]} is missing from the file"
        if new is None:
            return f"{old[0]} is in the file alone"
        if old[0] != new[0]:
            return f"the file has {old[0]} where {new[0]} is drawn now"
        mismatch = _first_mismatch(old[1], new[1])
        if mismatch is not None:
            return f"{old[0]}: the file has {mismatch[0]}, drawn now is {mismatch[1]}"
    return None


def _first_mismatch(old: str, new: str) -> tuple[str, str] | None:
    """Where two texts part, numbers with decimals only if they are not close; None where they are alike."""
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
    # what stands beside the elements may change how they look: a style sheet, an entity
    yield "the head of the file", repr(PROCESSING.findall(content))
    root = ElementTree.fromstring(content)
    names: dict[str, str] = {}
    for element in root.iter():
        if "id" in element.attrib:
            names.setdefault(element.attrib["id"], f"id{len(names)}")
    yield from _element_parts(root, names, "the picture")


def _element_parts(element: ElementTree.Element, names: dict[str, str], group: str) -> Iterator[Part]:
    if element.tag == METADATA:
        return
    kind = element.tag.rpartition("}")[2]
    # matplotlib's own names say more than the kind of an element does
    group = element.attrib.get("id", group) if kind == "g" else group
    location = f"{kind} of {group}"
    yield location, element.tag
    for name, value in sorted(element.attrib.items()):
        normalized = names[value] if name == "id" else SVG_ID.sub(lambda match: names.get(match[0], match[0]), value)
        yield f"{name.rpartition('}')[2]} of {location}", normalized
    yield f"words of {location}", (element.text or "").strip()
    for child in element:
        yield from _element_parts(child, names, group)
        yield f"words after {child.tag.rpartition('}')[2]} of {group}", (child.tail or "").strip()


def _pdf_parts(content: bytes) -> Iterator[Part]:
    for number, body in PDF_OBJECT.findall(content):
        # the description of the file, and lengths, which packing decides
        if b"/Producer" in body or body.strip().isdigit():
            continue
        match = PDF_STREAM.match(body)
        head, stream = (match[1], match[2].rstrip(b"\r\n")) if match else (body, b"")
        if b"/FlateDecode" in head:
            stream = zlib.decompressobj().decompress(stream)
        head = re.sub(rb"/Length \d+(?! 0 R)", b"", head)
        location = f"object {number.decode()}"
        yield f"the head of {location}", head.decode("latin-1")
        yield f"the content of {location}", stream.decode("latin-1")


def _png_difference(written: bytes, drawn: bytes) -> str | None:
    import numpy as np
    from matplotlib.image import imread

    try:
        old = imread(io.BytesIO(written), format="png")
    except (OSError, SyntaxError, ValueError) as error:
        return f"it cannot be read as png ({error})"
    new = imread(io.BytesIO(drawn), format="png")
    if old.shape != new.shape:
        return f"the file has {old.shape[1]} x {old.shape[0]} dots, drawn now are {new.shape[1]} x {new.shape[0]}"
    differs = (np.abs(old - new) > MAX_COLOUR_DIFFERENCE / 255).any(axis=-1)
    if not differs.any():
        return None
    y, x = np.argwhere(differs)[0]
    return f"{int(differs.sum())} dots have another colour, the first at column {x}, row {y}"
