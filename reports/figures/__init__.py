"""The figures of the appendix, from the database: collected into a tidy frame, then drawn.

`make_figure("needle", store)` collects, `rendered(made, "svg")` draws. By number: 1 needle accuracy, 2a count map,
2b state norm. Matplotlib is imported when a figure is drawn, not before.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from ...results.store.store import Store
from ...results.text import choice, cleaned, plain
from ..data import Lengths, ReportError
from .base import Collected, digest
from .files import FORMATS, rendered, renderings, trace_in

__all__ = [
    "FIGURES",
    "FORMATS",
    "NUMBERS",
    "Collected",
    "FigureSpec",
    "digest",
    "drawn",
    "figure_name",
    "make_figure",
    "rendered",
    "renderings",
    "trace_in",
]


@dataclass(frozen=True)
class FigureSpec:
    """Where a figure is collected and where it is drawn (`module:function`), and what it shows."""

    collect: str
    draw: str
    shows: str


FIGURES: dict[str, FigureSpec] = {
    "needle": FigureSpec("collect:needle", "draw:needle", "needle accuracy over context length"),
    "count-map": FigureSpec(
        "collect:count_map", "draw:count_map", "what m keys of one weight come to in Polar attention"
    ),
    "state-norm": FigureSpec("collect:state_norm", "draw:state_norm", "size of the memory's state over context length"),
    "length": FigureSpec("collect:losses", "draw:losses", "clean and junk loss over context length"),
    "loss": FigureSpec("collect:loss", "draw:loss", "training loss over tokens and time"),
    "effects": FigureSpec("compare:effects", "draw_compare:effects", "what every level does, with intervals"),
    "interactions": FigureSpec("compare:interactions", "draw_compare:interactions", "means by two axes"),
    "pareto": FigureSpec("compare:quality_speed", "draw_compare:quality_speed", "quality against speed"),
    "timeline": FigureSpec("collect:timeline", "draw:timeline", "which machine ran what when"),
}
NUMBERS = {"1": "needle", "2a": "count-map", "2b": "state-norm"}
"""By the paper's number: the figure's name."""


WITHOUT_LENGTHS = ("count-map", "loss", "timeline")
"""Figures in which no context length plays a part."""


def figure_name(name: str) -> str:
    """The name of the figure of that name or number. Raises ReportError."""
    found = NUMBERS.get(name.lower(), name.lower())
    if found not in FIGURES:
        raise ReportError(f"there is no figure {name}; {choice(found, [*NUMBERS, *FIGURES])}")
    return found


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


def make_figure(
    name: str, store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Collected:
    """What the figure of that name or number shows of a sweep (None: the one launched last), at the context lengths that
    the launch asked for and `lengths` besides.

    Raises ReportError for an unknown name, for lengths where none play a part and for a figure that the data cannot
    give, SweepUnknown, StoreError.
    """
    found = figure_name(name)
    if found in WITHOUT_LENGTHS and lengths:
        raise ReportError(f"figure {found} is not about context lengths; leave --length out")
    options = {} if found in WITHOUT_LENGTHS else {"lengths": lengths}
    made: Collected = _function(FIGURES[found].collect)(store, sweep, revision=revision, **options)
    return made


def drawn(made: Collected) -> Any:
    """The matplotlib Figure, laid out for good; to be called and used inside `style.settings`."""
    from .style import settle

    figure = _function(FIGURES[made.name].draw)(_shown(made))
    # once: finding the places takes longer than drawing, and so they are the same in every format
    settle(figure)
    return figure


def _drawable(text: str) -> str:
    # XML forbids control characters, and two dollars would begin a formula of matplotlib's
    return plain(text).replace("$", r"\$")


def _shown(made: Collected) -> Collected:
    """The figure with its words as they can be drawn."""
    frame = made.frame.copy(deep=False)
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            frame[name] = frame[name].map(lambda one: cleaned(one, _drawable))
    title, notes, about = cleaned((made.title, made.notes, dict(made.about)), _drawable)
    return replace(made, title=title, notes=notes, frame=frame, about=about)
