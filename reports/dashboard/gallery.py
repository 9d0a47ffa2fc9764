"""Figures on the page of a sweep: which there are, and each of them drawn as SVG."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from ...results.errors import StoreError
from ...results.exchange.installed_parts import InstalledPartError
from ...results.store.store import Store
from ...results.studies.study_store import search_of
from ..figures import FIGURES, make_figure
from ..sweep_data import ExtraLengths, ReportError

BLOCK_PREFIX = "figure-"
"""Beginning of the id of a figure's block; its name follows."""


@dataclass(frozen=True)
class GalleryPicture:
    """A figure of the gallery: `name` as on the command line, `title`, `caption` (sentences) and `svg` (a document)."""

    name: str
    title: str
    caption: str
    svg: bytes

    def block(self) -> bytes:
        """Return the block of the figure: JSON with title, text and svg."""
        return json.dumps({"title": self.title, "text": self.caption, "svg": self.svg.decode()}).encode()


def figure_titles(store: Store, sweep: str) -> dict[str, str]:
    """Return short titles of the figures that a sweep may have, by name: those of studies for studies alone."""
    searched = search_of(store, sweep) is not None
    titles = {name: spec.shows for name, spec in FIGURES.items() if searched or not spec.study}
    return {name: f"{title[:1].upper()}{title[1:]}" for name, title in titles.items()}


def draw_picture(store: Store, sweep: str, name: str, lengths: ExtraLengths = None) -> GalleryPicture:
    """Draw a figure, which takes up to seconds; a lock of the drawing library admits one thread at a time.

    Args:
        store: The database.
        sweep: Name of the sweep.
        name: Name of the figure.
        lengths: Context lengths to show besides the requested ones, for figures that take them.

    Raises:
        ReportError, StoreError: The sweep has no such figure, or not yet.
        InstalledPartError: The figure is one of an installed package, and fails.
    """
    from ..figures.canvas.figure_options import (
        FigureOptions,
    )  # pandas and matplotlib, which a page without figures spares
    from ..figures.files import renderings

    options = FIGURES[name].select_options({"lengths": lengths})
    figure = make_figure(name, store, sweep, lengths=options.pop("lengths", None), options=options)
    svg = renderings(figure, ("svg",), look=FigureOptions(title=False), trace=False)["svg"]
    return GalleryPicture(name, figure.title, " ".join(figure.caption_notes()), svg)


def drawn_pictures(store: Store, sweep: str, lengths: ExtraLengths = None) -> Iterator[GalleryPicture]:
    """Yield every figure that the sweep has; those that cannot be drawn are left out."""
    for name in figure_titles(store, sweep):
        try:
            yield draw_picture(store, sweep, name, lengths)
        except (ReportError, StoreError, InstalledPartError):
            continue


def block_on_request(store: Store, sweep: str, name: str) -> bytes:
    """Return the block of a figure, drawn now: JSON with title, text and svg, or with `why`, the reason for none."""
    try:
        return draw_picture(store, sweep, name).block()
    except (ReportError, StoreError, InstalledPartError) as error:
        return json.dumps({"why": str(error)}).encode()
