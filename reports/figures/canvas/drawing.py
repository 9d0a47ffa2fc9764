"""Shared drawing helpers: output is readable in greyscale, colour-blind safe and byte-identical on every run.

Matplotlib is imported only inside functions, and never pyplot: a figure is an object of its own. Matplotlib's global
settings are changed only inside `settings`, by one thread at a time, and restored.
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
from ...render.style import BAD as BAD
from ...render.style import DASHES, GRID, MAX_TICKS, SERIES_INKS
from ...render.style import FAINT as FAINT
from ...render.style import GOOD as GOOD
from ...render.style import GREY as GREY
from ...render.style import HATCHES as HATCHES
from ...render.style import HEAT_MAP as HEAT_MAP
from ...render.style import INK as INK
from ...render.style import MARKERS as MARKERS
from ...render.style import MISSING as MISSING
from ...render.style import NEUTRAL as NEUTRAL
from ...render.style import axis_label as axis_label
from ...render.style import level_label as level_label
from ...render.style import memory_label as memory_label
from ...render.style import short_integer as short_integer
from .figure_options import STYLE_PRESETS, FigureOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

PANEL_HEIGHT = 2.0  # inches, height of a row of panels
PAGE_WIDTH = 7.2  # inches, width of a page between its margins
POSITION_DECIMALS = 9  # decimals of a position, as a share of the figure's size
NARROW_WIDTH = 5.0  # inches, width of a figure below which panels are stacked
MIN_PANEL_WIDTH = 0.95  # inches, least width of a panel at the font size of the style `paper`

BACKING = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4}
"""Box that keeps text readable over lines; an outline would turn text into paths, which nobody can edit or search."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"

_SHARED: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "atma-sweep",
    # hinted widths at the resolution of the layout are up to 7 % off those of the written file, and texts left it
    "text.hinting": "none",
    # text as text, which a reader can search and a drawing program can edit
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}

_settings_lock = threading.RLock()
_option_stack: list[FigureOptions] = [FigureOptions()]


@contextlib.contextmanager
def settings(options: FigureOptions | None = None) -> Iterator[None]:
    """Apply the matplotlib settings of figure options inside the context, and restore them afterwards.

    They start from matplotlib's defaults, so the user's own matplotlibrc has no effect. A re-entrant lock admits one
    thread at a time. Figures must be built, drawn and saved inside, since the helpers of this module read the settings.

    Args:
        options: Figure options; None: the defaults.

    Raises:
        ReportError: This machine lacks the font.
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
    """Return the figure options of the innermost `settings` of any thread; the defaults outside of any."""
    return _option_stack[-1]


def _rc_parameters(options: FigureOptions) -> dict[str, Any]:
    """Return the matplotlib settings (rcParams) of figure options by name.

    Later ones win: those of all figures, sizes of the style, its further settings, and those of the user's style file.

    Raises:
        ReportError: The font is not installed.
    """
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
    """Return a font size in points; call it inside `settings`.

    Args:
        name: A matplotlib setting of a size such as legend.fontsize; `note` is the size of notes, `small` that of
            numbers next to points (at least 5).
    """
    import matplotlib
    from matplotlib.font_manager import FontProperties

    if name in ("note", "small"):
        return current_options().preset.note if name == "note" else max(5.0, 0.86 * size("xtick.labelsize"))
    parameters: Any = matplotlib.rcParams
    return float(FontProperties(size=parameters[name]).get_size_in_points())


def line_width(points: float) -> float:
    """Return the line width in the current style, in points, of a line that has `points` in the style `paper`."""
    import matplotlib

    return points * float(matplotlib.rcParams["lines.linewidth"]) / STYLE_PRESETS["paper"].stroke


def marker_size() -> float:
    """Return the size of markers in points in the current style."""
    import matplotlib

    return float(matplotlib.rcParams["lines.markersize"])


def diverging() -> Any:
    """Return the colour map from purple for bad (0) over light grey (0.5) to green for good (1)."""
    return colours("good", BAD, NEUTRAL, GOOD)


def page(height: float, width: float = PAGE_WIDTH) -> Figure:
    """Return an empty figure with constrained layout and an Agg canvas; call it inside `settings`.

    Args:
        height: Height in inches in the style `paper`; other styles scale it with their font size.
        width: Preferred width in inches, limited to 7.2; a fixed width of the figure options or style wins.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(current_options().inches(width, PAGE_WIDTH), height * current_options().scale), layout="constrained"
    )
    FigureCanvasAgg(figure)
    return figure


def marker_style(first: int, second: int = 0) -> dict[str, Any]:
    """Return the style of a line by index: keys color, linestyle, marker, markerfacecolor, markeredgecolor.

    Indices beyond the lists start over, with other dashes.

    Args:
        first: Index that chooses colour and marker.
        second: Index that chooses dashes; markers are filled for even ones and hollow for odd ones.
    """
    colour = SERIES_INKS[first % len(SERIES_INKS)]
    return {
        "color": colour,
        "linestyle": DASHES[(second + first // len(SERIES_INKS)) % len(DASHES)],
        "marker": MARKERS[(first + first // len(SERIES_INKS)) % len(MARKERS)],
        "markerfacecolor": "white" if second % 2 else colour,
        "markeredgecolor": colour,
    }


def panels(figure: Figure, titles: Sequence[str], *, columns: int = 3, **sharing: Any) -> list[Axes]:
    """Return one pair of axes per title, row by row, with panel letters if there are several.

    Unused positions stay empty. On a narrow page fewer than `columns` stand in a row, and the figure grows by the
    additional rows.

    Args:
        figure: The figure, high enough for rows of `columns` panels; its size may be changed.
        titles: Titles of the panels, wrapped to their width.
        columns: Maximum number of panels per row.
        sharing: `sharex`, `sharey` and further arguments of `Figure.subplots`.
    """
    width, height = figure.get_size_inches()
    planned = rows_of(len(titles), columns)
    across = columns_of(figure, len(titles), columns)
    down = math.ceil(len(titles) / across)
    figure.set_size_inches(width, height * down / max(1, planned))
    grid = figure.subplots(down, across, squeeze=False, **sharing)
    flat = list(grid.flat)
    room = max(8, int(0.72 * width / across * 72 / (0.6 * size("axes.titlesize"))))
    for index, (axes, title) in enumerate(zip(flat, titles, strict=False)):
        axes.set_title("\n".join(part for line in title.split("\n") for part in textwrap.wrap(line, room)))
        if len(titles) > 1:
            add_panel_letter(axes, index)
    for index in range(len(titles), len(flat)):
        flat[index].set_axis_off()
        # the panel above has no panel below that would carry its labels
        flat[index - across].tick_params(labelbottom=True)
    return flat[: len(titles)]


def panel_column(figure: Figure, count: int, *, narrow: int = 1, wide: int = 2, **sharing: Any) -> list[Axes]:
    """Return the axes of `count` panels, row by row, with letters if there are several.

    The figure becomes as many times as high as there are rows. Unused positions stay empty.

    Args:
        figure: The figure, as high as one row.
        count: Number of panels.
        narrow: Panels per row on a page narrower than 5 inches.
        wide: Panels per row on a wide page.
        sharing: `sharex`, `sharey` and further arguments of `Figure.subplots`.
    """
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
    """Write the letter of the panel with this index above its left corner, in the style's format: (a), or a bold a.

    Styles without letters and panels beyond the 26th get none.
    """
    form = current_options().preset.panel_letter_format
    if form and index < len(LETTERS):
        style: dict[str, Any] = {"ha": "right", "fontsize": size("axes.titlesize") + (form == "{}"), "weight": "bold"}
        note(axes, form.format(LETTERS[index]), (0, 1), (-2, 4), xycoords="axes fraction", **style)


def note(axes: Axes, text: str, at: Any, shift: Any = (0, 0), **more: Any) -> Any:
    """Write small text at `at`, shifted by `shift` points, and return matplotlib's annotation.

    Args:
        axes: The axes.
        text: The text; dollar signs start a formula.
        at: Position (x, y) in data, or in the coordinates `xycoords`.
        shift: Offset (x, y) in points.
        more: Further arguments of `Axes.annotate`, which win over these.
    """
    style = {"xytext": shift, "textcoords": "offset points", "fontsize": size("small")}
    return axes.annotate(text, at, **(style | more))


def points(axes: Axes, x: Any, y: Any, marker: str = "o", **more: Any) -> Any:
    """Draw markers without a line and return matplotlib's line object.

    Args:
        axes: The axes.
        x: Positions in data, or one position.
        y: Positions in data, or one position.
        marker: Marker of matplotlib.
        more: Further arguments of `Axes.plot`; `markersize` and `markeredgewidth` are points in the style `paper`.
    """
    widths: dict[str, Any] = {
        name: line_width(more[name]) for name in ("markersize", "markeredgewidth") if name in more
    }
    return axes.plot(x, y, linestyle="none", marker=marker, **(more | widths))[0]


def key(**properties: Any) -> Any:
    """Return a line or marker for a legend, with properties of matplotlib's Line2D; it is drawn nowhere else."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **properties)


def patch(**properties: Any) -> Any:
    """Return a filled square for a legend, with a grey edge."""
    from matplotlib.patches import Patch

    return Patch(**({"edgecolor": GREY} | properties))


def colours(name: str, *colours: str) -> Any:
    """Return the colour map from the first of these over the others to the last."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, list(colours))


def rows_alone(axes: Axes) -> None:
    """Hide the y axis except the labels of its rows."""
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def bare(axes: Axes) -> None:
    """Hide the grid, ticks and spines of a map."""
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def linear(low: float, high: float, **more: Any) -> Any:
    """Return matplotlib's normalization that maps numbers from `low` to `high` to 0 to 1."""
    from matplotlib.colors import Normalize

    return Normalize(low, high, **more)


def heat(axes: Axes, table: Any, norm: Any, *, colours: Any = HEAT_MAP, bad: str = MISSING, **more: Any) -> Any:
    """Draw a table as a heat map, row 0 on top, and return the image; the axes keep neither grid nor ticks.

    The column index is x and the row index is y, unless `extent` says otherwise.

    Args:
        axes: The axes.
        table: Array [rows, columns]; NaN has the colour `bad`.
        norm: Matplotlib normalization of its numbers.
        colours: Colour map or its name.
        bad: Colour of missing numbers.
        more: Further arguments of `Axes.imshow`.
    """
    import matplotlib

    chart = matplotlib.colormaps.get_cmap(colours).with_extremes(bad=bad)
    image = axes.imshow(table, cmap=chart, norm=norm, aspect="auto", interpolation="nearest", **more)
    bare(axes)
    return image


def colour_bar(figure: Figure, group: Sequence[Axes], mappable: Any, label: str, **more: Any) -> Any:
    """Add a colour bar next to axes and return it; it gets its final position after the layout.

    Args:
        figure: The figure.
        group: Axes that the bar belongs to.
        mappable: Image or mappable that has the colours.
        label: Label of the bar.
        more: Further arguments of `Figure.colorbar`.
    """
    bar: Any = figure.colorbar(mappable, ax=list(group), **more)
    bar.ax.grid(visible=False)
    bar.outline.set_visible(False)
    bar.set_label(label)
    # after the layout, since its aspect ratio is only applied then
    after_layout(figure, lambda: bar.ax.apply_aspect(bar.ax.get_axes_locator()(bar.ax, None)))
    return bar


def columns_of(figure: Figure, count: int, most: int = 3) -> int:
    """Return the number of panels per row, at least 1, so that each has at least 0.95 inches.

    That width is scaled by the font size relative to the style `paper`. A single panel may be narrower.

    Args:
        figure: The figure.
        count: Number of panels.
        most: Maximum number per row.
    """
    fitting = int(figure.get_size_inches()[0] / (MIN_PANEL_WIDTH * current_options().scale))
    return max(1, min(most, max(1, count), fitting))


def rows_of(count: int, columns: int = 3) -> int:
    """Return the number of rows that `count` panels take."""
    return math.ceil(count / min(columns, max(1, count)))


def thin_evenly(values: Sequence[int], most: int = MAX_TICKS) -> list[int]:
    """Return at most `most` of the values, ascending, in equal steps of rank that end at the largest; [] for none."""
    step = math.ceil(len(values) / most)
    return sorted(values)[::-1][::step][::-1] if values else []


def length_axis(axes: Axes, lengths: Sequence[int], trained: int | None = None, *, room: float = 0.25) -> None:
    """Make the x axis one of context lengths, logarithmic to base 2, with as many labels as fit (at most seven).

    It sets the limits and ticks. Lengths without a label have a minor tick. Without lengths there are no ticks, and the
    limits stay.

    Args:
        axes: The axes.
        lengths: Context lengths in tokens, in any order, repetitions allowed.
        trained: Training length in tokens; labels then show multiples of it too. None: lengths alone.
        room: Free space at both ends, in octaves; 1 octave for a single length.
    """
    every = sorted(set(lengths))

    def name(length: int) -> str:
        """Return the tick label of a length, with its multiple of the training length if that is known."""
        return (
            format_length(length)
            if trained is None
            else f"{_multiple_label(length / trained)}\n{format_length(length)}"
        )

    axes.set_xscale("log", base=2)
    if every:
        wide = 1.0 if len(every) == 1 else room
        axes.set_xlim(every[0] / 2**wide, every[-1] * 2**wide)
    most = min(MAX_TICKS, _labels_that_fit(axes, [name(length) for length in every]))
    shown = thin_evenly(every, most)
    if trained in every and trained not in shown:
        # as evenly, but with labels at the training length and at the longest
        step, own = -(-len(every) // most), every.index(trained)
        shown = every[own % step :: step]
        if shown[-1] != trained:
            shown[-1] = every[-1]
    put_ticks(axes.xaxis, {length: name(length) for length in shown})
    axes.set_xticks(every if len(shown) < len(every) else [], minor=True)
    axes.xaxis.set_minor_formatter("")


def ticks_that_fit(axes: Axes, characters: int = 6, most: int = 5) -> int:
    """Return how many tick labels of so many characters fit side by side below the axes: 2 to `most`."""
    return max(2, min(most, _labels_that_fit(axes, ["0" * characters])))


def _labels_that_fit(axes: Axes, labels: Sequence[str]) -> int:
    """Return about how many of these labels fit side by side below the axes, at least 1.

    It is estimated from the longest line of any label, the width of the figure, and its number of panel columns.
    """
    figure, spec = axes.figure, axes.get_subplotspec()
    columns = spec.get_gridspec().ncols if spec is not None else 1
    width = 72 * figure.get_size_inches()[0] / columns  # type: ignore[union-attr]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    return max(1, int((0.86 * width - 12) / (size("xtick.labelsize") * (0.64 * longest + 0.5))))


def log_ticks(axis: Any, most: int | None, subs: Sequence[float] = (1, 2, 5), base: float = 10) -> None:
    """Give a logarithmic axis at most `most` ticks, as plain numbers, and no minor ticks.

    Args:
        axis: Axis of matplotlib, such as `axes.xaxis`.
        most: Maximum number of ticks; None: as matplotlib chooses.
        subs: Multiples of powers of the base at which ticks may stand.
        base: Base of the powers.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def put_ticks(axis: Any, ticks: Mapping[float, str]) -> None:
    """Give an axis exactly these ticks, as labels by position in data, and no minor ticks."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FixedFormatter(list(ticks.values())))


def _multiple_label(ratio: float) -> str:
    """Return a multiple of the training length as text, such as 2×, 1/64× or 0.3×."""
    if ratio < 1 and float(1 / ratio).is_integer():
        return f"1/{1 / ratio:.0f}×"
    return f"{ratio:g}×" if ratio >= 1 and float(ratio).is_integer() else f"{ratio:.3g}×"


def finished(
    figure: Figure, title: str, notes: Sequence[str], handles: Mapping[str, Any], *, columns: int = 4
) -> Figure:
    """Return the same figure with its legend below, and with title and notes if the options show them.

    The figure grows by their height. Call it last, since it sets the rectangle of the layout.

    Args:
        figure: The figure.
        title: Title above the figure.
        notes: Notes below the figure, joined to one paragraph.
        handles: Legend handles by label, or tuples of handles that stand side by side; empty: no legend.
        columns: Maximum number of columns of the legend.
    """
    from matplotlib.legend_handler import HandlerTuple

    width, height = figure.get_size_inches()
    titled = current_options().title
    head = textwrap.wrap(title, _characters_per_line(width, size("figure.titlesize"), 0.66)) if titled else []
    foot = textwrap.wrap(" ".join(notes), _characters_per_line(width, size("note"), 0.61)) if titled else []
    strip = (len(foot) * size("note") * 1.3 + 5) / 72 if foot else 0.0
    keys, below = None, strip
    if handles:
        across = _legend_columns(list(handles), width, columns)
        side_by_side: Any = {tuple: HandlerTuple(ndivide=None, pad=0.0)}
        keys = figure.legend(
            list(handles.values()), list(handles), loc="lower center", ncols=across, borderaxespad=0.2, handler_map=side_by_side,
        )  # fmt: skip
        # the layout reserves no space for it above a note, so that its height is measured here
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
    """Return how many characters fit in a line of the figure, at least 20.

    Args:
        width: Width of the figure in inches.
        points: Font size in points.
        each: Width of a character as a share of the font size.
    """
    return max(20, int((width - 0.1) * 72 / (points * each)))


def _legend_columns(labels: Sequence[str], width: float, most: int) -> int:
    """Return the number of columns of a legend: as many as fit, with as few empty positions as possible.

    Args:
        labels: Labels of the legend.
        width: Width of the figure in inches.
        most: Maximum number of columns.
    """
    if not labels:
        return 1
    each = size("legend.fontsize") / 72 * (0.595 * max(map(len, labels)) + 5.3)
    fitting = max(1, min(most, len(labels), int(width / each)))
    return math.ceil(len(labels) / math.ceil(len(labels) / fitting))


def width_of(count: int, each: float = 2.6, columns: int = 3) -> float:
    """Return the width in inches for `count` panels of `each` inches: from 5.2 to the page's 7.2."""
    return min(PAGE_WIDTH, max(5.2, each * min(count, columns)))


def outer_labels(figure: Figure, horizontal: str, vertical: str) -> None:
    """Write one label below all axes and one at their left, both centred on the axes once the layout is final.

    Args:
        figure: The figure, with its panels.
        horizontal: Label below.
        vertical: Label at the left.
    """
    vertical_label(figure, vertical)
    figure.supxlabel(horizontal, fontsize=size("axes.labelsize"))


def vertical_label(figure: Figure, text: str) -> None:
    """Write one label at the left of all axes."""
    figure.supylabel(text, fontsize=size("axes.labelsize"))


_layout_callbacks: weakref.WeakKeyDictionary[Figure, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def after_layout(figure: Figure, act: Callable[[], None]) -> None:
    """Register a function for `finalize_layout`, for labels that search free space among what is drawn.

    Functions of a figure run once, in the order of registration.
    """
    _layout_callbacks.setdefault(figure, []).append(act)


def finalize_layout(figure: Figure) -> None:
    """Fix the layout of a figure, run the functions of `after_layout`, and centre the common labels on the axes.

    The layout engine is switched off and positions are rounded. A second call runs no function again.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    _round_positions(figure)
    for act in _layout_callbacks.pop(figure, []):
        act()
    _centre_outer_labels(figure)


def _centre_outer_labels(figure: Figure) -> None:
    """Centre the common labels on the axes; the lower one stands right below the lowest tick labels."""
    shown = [axes for axes in figure.axes if axes.axison]
    boxes = [axes.get_position() for axes in shown]
    if (label := _outer_label(figure, figure.get_supylabel(), 90)) is not None:
        label.set_y((min(box.y0 for box in boxes) + max(box.y1 for box in boxes)) / 2)
    if (label := _outer_label(figure, figure.get_supxlabel(), 0)) is not None:
        renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        lowest = min(axes.get_tightbbox(renderer).y0 for axes in shown)  # type: ignore[union-attr]
        height = figure.get_size_inches()[1] * figure.dpi
        label.set_x((min(box.x0 for box in boxes) + max(box.x1 for box in boxes)) / 2)
        label.set_y(lowest / height - 2 / 72 * figure.dpi / height)
        label.set_verticalalignment("top")


def _outer_label(figure: Figure, content: str, angle: int) -> Text | None:
    """Return the text of a figure with that content and rotation in degrees; None without one or for no content."""
    texts = [text for text in figure.texts if (text.get_text(), text.get_rotation()) == (content, angle)]
    return texts[0] if content and texts else None


def _round_positions(figure: Figure) -> None:
    """Round the positions of all axes of a figure and its subfigures to nine decimals, in place.

    The layout's solver may change their last digits from run to run, and ids in the file are derived from them.
    """
    for part in figure.subfigs:
        box = part.bbox_relative
        box.p0, box.p1 = box.p0.round(POSITION_DECIMALS), box.p1.round(POSITION_DECIMALS)
        _round_positions(part)  # type: ignore[arg-type]
    for axes in figure.get_axes():
        if axes.figure is figure:
            x, y, width, height = (round(bound, POSITION_DECIMALS) for bound in axes.get_position(original=True).bounds)
            axes.set_position((x, y, width, height))


def shortened(text: str, most: int) -> str:
    """Return the text, cut to `most` characters of which the last is then an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return (unit, its length in seconds) in which to print a duration: days, hours, minutes or seconds.

    It is the largest unit of which the duration has at least two.
    """
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return unit, size
    return "seconds", 1.0


def off_first(level: str) -> int:
    """Return a sort key that puts the level "off" first, so that it has the same style in every figure."""
    return 0 if level == "off" else 1
