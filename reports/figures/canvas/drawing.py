"""One look for all figures: readable in grey and by the colour-blind, the same bytes every time.

Matplotlib is imported only inside functions, and never pyplot: a figure is an object of its own. What matplotlib keeps
in its global settings is changed only inside `settings`, by one thread at a time, and put back.
"""

from __future__ import annotations

import contextlib
import math
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...number_format import format_length
from .figure_options import STYLE_PRESETS, FigureOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
"""The colours of Okabe and Ito without yellow, which paper swallows; neighbours differ in lightness too."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.8)), (0, (1.4, 1.4)), (0, (6, 1.6, 1.4, 1.6)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
COLOUR_MAP = "cividis"
"""Colours of heat maps: lightness rises all the way, and the colour-blind see the same order."""
MISSING = "#e8e2da"  # of a map, where there is no number
FAINT, GREY = "#b8b8b8", "#707070"
PANEL_HEIGHT = 2.0  # inches of height that a row of panels gets
PAGE_WIDTH = 7.2  # inches of a page between its margins
MAX_TICKS = 7
POSITION_DECIMALS = 9  # decimals of a place, as parts of the figure's size
NARROW_WIDTH = 5.0  # inches of width below which panels stand over each other
MIN_PANEL_WIDTH = 0.95  # inches of width that a panel gets at least, at the letters of the style `paper`

BACKING = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4}
"""The box that keeps letters readable over lines; an outline would make them drawings, which nobody can edit or search."""

GOOD, BAD, NEUTRAL = "#0072B2", "#D55E00", "#f4f4f4"
"""The two ends of every diverging map, whichever sign is the better one, and what lies between them."""

LEVEL_LABELS = {
    ("attn_type", "polar"): "PoLAR",
    ("attn_type", "nope"): "NoPE",
    ("attn_type", "rope"): "RoPE",
    ("attn_type", "alibi"): "ALiBi",
    ("attn_type", "tra"): "TRA",
    ("attn_type", "wall"): "Wall",
    ("attn_type", "fox"): "FoX",
    ("attn_type", "cope"): "CoPE",
    ("attn_type", "diff"): "Diff",
    ("attn_type", "rel"): "REL",
    ("reg_mode", "baseline"): "no regularizer",
    ("distractor", "on"): "with distractor loss",
    ("distractor", "off"): "no distractor loss",
    ("memory", "on"): "with memory",
    ("memory", "off"): "no memory",
    ("memory", "deltanet"): "DeltaNet",
    ("memory", "kda"): "KDA",
    ("memory", "omega"): "Omega",
    ("memory", "atlas"): "ATLAS",
    ("window", "on"): "with window",
    ("window", "off"): "no window",
}
"""By axis and level: how a figure names it. What stands here not, a stranger's level, is shown as it is."""
AXIS_LABELS = {
    "attn_type": "mixer",
    "reg_mode": "regularizer",
    "distractor": "distractor loss",
    "model.positions": "positions",
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"

_SHARED: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "atma-sweep",
    # letters, which a reader can search, and a drawing program can edit
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}

_settings_lock = threading.RLock()
_option_stack: list[FigureOptions] = [FigureOptions()]


@contextlib.contextmanager
def settings(options: FigureOptions | None = None) -> Iterator[None]:
    """The settings of a look inside, for one thread at a time; before and after, those of the program around us.

    Raises ReportError for a font that this machine lacks.
    """
    import matplotlib

    options = options or FigureOptions()
    with _settings_lock, matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(_rc_parameters(options))
        _option_stack.append(options)
        try:
            yield
        finally:
            _option_stack.pop()


def current_options() -> FigureOptions:
    """The look of the `settings` around; the usual one outside of any."""
    return _option_stack[-1]


def _rc_parameters(options: FigureOptions) -> dict[str, Any]:
    preset = options.preset
    sizes = {
        "font.family": [options.font_family()],
        "font.size": preset.text,
        "axes.titlesize": preset.title,
        "axes.labelsize": preset.text,
        "xtick.labelsize": preset.ticks,
        "ytick.labelsize": preset.ticks,
        "legend.fontsize": (preset.text + preset.ticks) / 2,
        "figure.titlesize": preset.title + 1,
        "lines.linewidth": preset.stroke,
        "lines.markersize": preset.marker,
        "lines.markeredgewidth": preset.stroke / 1.5,
    }
    return _SHARED | sizes | dict(preset.extra_settings) | dict(options.own)


def size(name: str) -> float:
    """Points of a setting such as legend.fontsize, inside `settings`; `note` and `small` are those of notes and of numbers
    beside a point."""
    import matplotlib
    from matplotlib.font_manager import FontProperties

    if name in ("note", "small"):
        return current_options().preset.note if name == "note" else max(5.0, 0.86 * size("xtick.labelsize"))
    parameters: Any = matplotlib.rcParams
    return float(FontProperties(size=parameters[name]).get_size_in_points())


def line_width(points: float) -> float:
    """The width of a line that has so many points in the style `paper`."""
    import matplotlib

    return points * float(matplotlib.rcParams["lines.linewidth"]) / STYLE_PRESETS["paper"].stroke


def level_label(level: str, axis: str = "attn_type") -> str:
    """How a level is named in a figure: PoLAR, with memory; one that the package does not know as it is, after its axis where
    it would say nothing alone."""
    label = LEVEL_LABELS.get((axis, level))
    if label is not None:
        return label
    return level if axis in ("attn_type", "reg_mode") else f"{AXIS_LABELS.get(axis, axis)} {level}"


def memory_label(level: str) -> str:
    """How a memory is named beside others, where "with memory" would not say which."""
    return "gated delta" if level == "on" else level_label(level, "memory")


def axis_label(axis: str) -> str:
    """How an axis is named in a figure."""
    return AXIS_LABELS.get(axis, axis)


def diverging() -> Any:
    """The colour map from BAD over NEUTRAL to GOOD: 0 is bad, 1 is good, wherever more is better or less."""
    return colours("good", BAD, NEUTRAL, GOOD)


def page(height: float, width: float = PAGE_WIDTH) -> Figure:
    """An empty figure whose parts find their places by themselves: inches in the style `paper`; another look has its own
    width, and heights in proportion to its letters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(current_options().inches(width, PAGE_WIDTH), height * current_options().scale), layout="constrained"
    )
    FigureCanvasAgg(figure)
    return figure


def look(first: int, second: int = 0) -> dict[str, Any]:
    """How a line is drawn: `first` chooses colour and marker, `second` dashes and whether markers are filled."""
    ink = COLOURS[first % len(COLOURS)]
    return {
        "color": ink,
        "linestyle": DASHES[(second + first // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[(first + first // len(COLOURS)) % len(MARKERS)],
        "markerfacecolor": "white" if second % 2 else ink,
        "markeredgecolor": ink,
    }


COLOUR_PAIRS = (("#0072B2", "#56B4E9"), ("#D55E00", "#E69F00"), ("#000000", "#8c8c8c"), ("#009E73", "#6fcfb0"))
"""Colours of lines that two axes tell apart: one of the pair by the second axis, the pair by the first."""


def line_style(first: int, second: int, seconds: int, firsts: int = 1) -> dict[str, Any]:
    """How a line of two axes is drawn, of which they have so many levels: its colour, its mark and its dashes are its own
    as long as there are enough of them."""
    index = first * seconds + second
    fits = seconds <= 2 and first < len(COLOUR_PAIRS) and firsts <= len(COLOUR_PAIRS)
    ink = COLOUR_PAIRS[first][second] if fits else COLOURS[index % len(COLOURS)]
    return {
        "color": ink,
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markerfacecolor": "white" if second % 2 else ink,
        "markeredgecolor": ink,
    }


def panels(figure: Figure, titles: Sequence[str], *, columns: int = 3, **sharing: Any) -> list[Axes]:
    """One pair of axes for each title, row by row, with a letter where there are several; places that are left over stay empty.

    On a narrow page fewer than `columns` stand in a row, and the figure grows by the rows that this makes.
    """
    width, height = figure.get_size_inches()
    planned = rows_of(len(titles), columns)
    across = columns_of(figure, len(titles), columns)
    down = math.ceil(len(titles) / across)
    figure.set_size_inches(width, height * down / max(1, planned))
    grid = figure.subplots(down, across, squeeze=False, **sharing)
    flat = list(grid.flat)
    room = max(8, int(0.85 * width / across * 72 / (0.6 * size("axes.titlesize"))))
    for index, (axes, title) in enumerate(zip(flat, titles, strict=False)):
        axes.set_title("\n".join(textwrap.wrap(title, room)))
        if len(titles) > 1:
            add_panel_letter(axes, index)
    for index in range(len(titles), len(flat)):
        flat[index].set_axis_off()
        # the panel above has none below it that would carry its labels
        flat[index - across].tick_params(labelbottom=True)
    return flat[: len(titles)]


def panel_column(figure: Figure, count: int, *, narrow: int = 1, wide: int = 2, **sharing: Any) -> list[Axes]:
    """Axes of so many panels, each with its letter: `wide` of them side by side, on a narrow page `narrow`; the figure grows by
    the rows that this makes."""
    width, height = figure.get_size_inches()
    across = min(count, narrow if width < NARROW_WIDTH else wide)
    down = -(-count // across)
    figure.set_size_inches(width, height * down)
    grid = list(figure.subplots(down, across, squeeze=False, **sharing).flat)
    for index, axes in enumerate(grid):
        if index >= count:
            axes.set_axis_off()
        elif count > 1:
            add_panel_letter(axes, index)
    return grid[:count]


def add_panel_letter(axes: Axes, index: int) -> None:
    """Writes the letter of the panel at this place left above it: (a), or a bold a."""
    form = current_options().preset.panel_letter_format
    if form and index < len(LETTERS):
        look: dict[str, Any] = {"ha": "right", "fontsize": size("axes.titlesize") + (form == "{}"), "weight": "bold"}
        note(axes, form.format(LETTERS[index]), (0, 1), (-2, 4), xycoords="axes fraction", **look)


def note(axes: Axes, text: str, at: Any, shift: Any = (0, 0), **more: Any) -> Any:
    """Write small letters so many points beside a place, which is in data or in the coordinates `xycoords`."""
    how = {"xytext": shift, "textcoords": "offset points", "fontsize": size("small")}
    return axes.annotate(text, at, **(how | more))


def points(axes: Axes, x: Any, y: Any, marker: str = "o", **more: Any) -> Any:
    """Draw marks without a line; `markersize` and `markeredgewidth` are points in the style `paper`."""
    widths: dict[str, Any] = {
        name: line_width(more[name]) for name in ("markersize", "markeredgewidth") if name in more
    }
    return axes.plot(x, y, linestyle="none", marker=marker, **(more | widths))[0]


def key(**how: Any) -> Any:
    """Return a line or mark for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **how)


def patch(**how: Any) -> Any:
    """Return a filled square for a legend, with a grey edge."""
    from matplotlib.patches import Patch

    return Patch(**({"edgecolor": GREY} | how))


def colours(name: str, *inks: str) -> Any:
    """Return the colour map from the first of these over the others to the last."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, list(inks))


def rows_alone(axes: Axes) -> None:
    """Leave out the vertical axis but for the words of its rows."""
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def bare(axes: Axes) -> None:
    """Leave out what frames a map: grid, ticks and spines."""
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def linear(low: float, high: float, **more: Any) -> Any:
    """Return what maps numbers between these two to shares of a colour map."""
    from matplotlib.colors import Normalize

    return Normalize(low, high, **more)


def heat(axes: Axes, table: Any, norm: Any, *, colours: Any = COLOUR_MAP, bad: str = MISSING, **more: Any) -> Any:
    """Draw the table, row 0 on top; NaN has the colour `bad`. The axes keep neither grid nor ticks."""
    import matplotlib

    chart = matplotlib.colormaps.get_cmap(colours).with_extremes(bad=bad)
    image = axes.imshow(table, cmap=chart, norm=norm, aspect="auto", interpolation="nearest", **more)
    bare(axes)
    return image


def colour_bar(figure: Figure, group: Sequence[Axes], mappable: Any, label: str, **more: Any) -> Any:
    """Add the bar that says which colour is which number beside these axes, in the place that its shape asks for."""
    bar: Any = figure.colorbar(mappable, ax=list(group), **more)
    bar.ax.grid(visible=False)
    bar.outline.set_visible(False)
    bar.set_label(label)
    # once the layout is done: until then it stands where there is room
    after_layout(figure, lambda: bar.ax.apply_aspect(bar.ax.get_axes_locator()(bar.ax, None)))
    return bar


def columns_of(figure: Figure, count: int, most: int = 3) -> int:
    """How many of so many panels stand side by side in a figure, each as wide as it needs at least."""
    fitting = int(figure.get_size_inches()[0] / (MIN_PANEL_WIDTH * current_options().scale))
    return max(1, min(most, max(1, count), fitting))


def rows_of(count: int, columns: int = 3) -> int:
    """How many rows so many panels take."""
    return math.ceil(count / min(columns, max(1, count)))


def thin_evenly(values: Sequence[int], most: int = MAX_TICKS) -> list[int]:
    """At most so many of the sorted values, evenly taken, the last among them."""
    step = math.ceil(len(values) / most)
    return sorted(values)[::-1][::step][::-1] if values else []


def length_axis(axes: Axes, lengths: Sequence[int], trained: int | None = None, *, room: float = 0.25) -> None:
    """A horizontal axis of context lengths in steps of two, which begins and ends `room` octaves beside them; with `trained`,
    as multiples of that length above them."""
    every = sorted(set(lengths))

    def name(length: int) -> str:
        return (
            format_length(length)
            if trained is None
            else f"{_multiple_label(length / trained)}\n{format_length(length)}"
        )

    axes.set_xscale("log", base=2)
    if every:
        wide = 1.0 if len(every) == 1 else room
        axes.set_xlim(every[0] / 2**wide, every[-1] * 2**wide)
    shown = thin_evenly(every, min(MAX_TICKS, _labels_that_fit(axes, [name(length) for length in every])))
    put_ticks(axes.xaxis, {length: name(length) for length in shown})
    axes.set_xticks(every if len(shown) < len(every) else [], minor=True)
    axes.xaxis.set_minor_formatter("")


def _labels_that_fit(axes: Axes, labels: Sequence[str]) -> int:
    """How many of these labels stand below the axes side by side, by a rough measure."""
    figure, spec = axes.figure, axes.get_subplotspec()
    columns = spec.get_gridspec().ncols if spec is not None else 1
    width = 72 * figure.get_size_inches()[0] / columns  # type: ignore[union-attr]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    return max(1, int((0.86 * width - 12) / (size("xtick.labelsize") * (0.64 * longest + 0.5))))


def log_ticks(axis: Any, most: int | None, subs: Sequence[float] = (1, 2, 5), base: float = 10) -> None:
    """Give a logarithmic axis at most so many ticks, at these multiples of powers of the base, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def put_ticks(axis: Any, ticks: Mapping[float, str]) -> None:
    """Give an axis these ticks and no others."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FixedFormatter(list(ticks.values())))


def _multiple_label(ratio: float) -> str:
    return f"{ratio:g}×" if ratio >= 1 and float(ratio).is_integer() else f"{ratio:.2g}×"


def finished(
    figure: Figure, title: str, notes: Sequence[str], handles: Mapping[str, Any], *, columns: int = 4
) -> Figure:
    """The figure with its legend below, for which it grows; where the look has titles, with the title above and the notes
    below."""
    width, height = figure.get_size_inches()
    titled = current_options().title
    head = textwrap.wrap(title, _characters_per_line(width, size("figure.titlesize"), 0.66)) if titled else []
    foot = textwrap.wrap(" ".join(notes), _characters_per_line(width, size("note"), 0.61)) if titled else []
    strip = (len(foot) * size("note") * 1.3 + 5) / 72 if foot else 0.0
    keys, below = None, strip
    if handles:
        across = _legend_columns(list(handles), width, columns)
        keys = figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=across, borderaxespad=0.2)
        # the layout gives it no room of its own above a note, so that its room is measured here
        keys.set_in_layout(False)
        renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        below += keys.get_window_extent(renderer).height / figure.dpi + 0.04
    height += below + 1.2 * size("figure.titlesize") / 72 * len(head)
    figure.set_size_inches(width, height)
    if head:
        figure.suptitle("\n".join(head), x=0.06 / width, ha="left", weight="bold")
    if keys is not None:
        keys.set_bbox_to_anchor((0.5, strip / height), figure.transSubfigure)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.06, h_pad=0.05, rect=(0, below / height, 1, 1 - below / height))
    if foot:
        note = figure.text(
            0.06 / width,
            3 / 72 / height,
            "\n".join(foot),
            fontsize=size("note"),
            color=GREY,
            va="bottom",
            linespacing=1.25,
        )
        note.set_in_layout(False)
    return figure


def _characters_per_line(width: float, points: float, each: float) -> int:
    """How many letters of that size stand in a line of a figure, each so much of the size wide."""
    return max(20, int((width - 0.1) * 72 / (points * each)))


def _legend_columns(labels: Sequence[str], width: float, most: int) -> int:
    """How many columns a legend gets: as many as fit, with as few places left over as that allows."""
    if not labels:
        return 1
    each = size("legend.fontsize") / 72 * (0.595 * max(map(len, labels)) + 5.3)
    fitting = max(1, min(most, len(labels), int(width / each)))
    return math.ceil(len(labels) / math.ceil(len(labels) / fitting))


def width_of(count: int, each: float = 2.6, columns: int = 3) -> float:
    """Inches of width for so many panels: the whole page for as many as stand in a row, less for fewer."""
    return min(PAGE_WIDTH, max(5.2, each * min(count, columns)))


def outer_labels(figure: Figure, horizontal: str, vertical: str) -> None:
    """The same words for all axes, once below and once at the left."""
    vertical_label(figure, vertical)
    bottom: dict[Any, Axes] = {}
    for axes in figure.axes:
        if axes.axison:
            bottom[axes.get_subplotspec().colspan.start] = axes  # type: ignore[union-attr]
    middle = bottom[sorted(bottom)[len(bottom) // 2]] if len(bottom) % 2 else None
    for axes in bottom.values():
        axes.tick_params(labelbottom=True)
    if middle is not None:
        middle.set_xlabel(horizontal)
    else:
        bottom[sorted(bottom)[0]].set_xlabel(horizontal, loc="left")


def vertical_label(figure: Figure, text: str) -> None:
    """The same words for all axes, at the left."""
    figure.supylabel(text, fontsize=size("axes.labelsize"))


_layout_callbacks: weakref.WeakKeyDictionary[Figure, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def after_layout(figure: Figure, act: Callable[[], None]) -> None:
    """Has this done once every axes has found its place: for words that look for room among what is drawn."""
    _layout_callbacks.setdefault(figure, []).append(act)


def finalize_layout(figure: Figure) -> None:
    """Lays the figure out for good, and puts the words beside all axes at the middle of the axes, not of the page."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    _round_positions(figure)
    for act in _layout_callbacks.pop(figure, []):
        act()
    label = getattr(figure, "_supylabel", None)
    if label is not None:
        boxes = [axes.get_position() for axes in figure.axes if axes.axison]
        label.set_y((min(box.y0 for box in boxes) + max(box.y1 for box in boxes)) / 2)


def _round_positions(figure: Figure) -> None:
    """Rounds every place: the layout's solver adds in an order of its own, so that last digits vary, of which ids are made."""
    for part in figure.subfigs:
        box = part.bbox_relative
        box.p0, box.p1 = box.p0.round(POSITION_DECIMALS), box.p1.round(POSITION_DECIMALS)
        _round_positions(part)  # type: ignore[arg-type]
    for axes in figure.get_axes():
        if axes.figure is figure:
            x, y, width, height = (round(bound, POSITION_DECIMALS) for bound in axes.get_position(original=True).bounds)
            axes.set_position((x, y, width, height))


def shortened(text: str, most: int) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that so many seconds are told in, and its size in seconds."""
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return unit, size
    return "seconds", 1.0


def off_first(level: str) -> int:
    """A key to sort levels by, so that "off" looks alike in every figure."""
    return 0 if level == "off" else 1
