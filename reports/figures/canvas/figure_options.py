"""Options of a drawn figure: style preset, width, title, highlighted cells.

They are plain data, so that a figure's trace can store them and `report --check` can draw the same picture again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ....results.console.text import choices_hint, did_you_mean
from ....results.store.records import AXES
from ...render.style import PORTABLE_FONTS, PRINT_SIZES, SANS_FONTS, print_size
from ...sweep_data import ReportError, SweepData

MM = 25.4  # millimetres of an inch
UNITS = {"": 1.0, "mm": 1.0, "cm": 10.0, "in": MM, "pt": MM / 72}
NARROWEST, WIDEST = 40.0, 600.0  # millimetres, limits of a figure's width
LENGTH = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(mm|cm|in|pt|)")
STYLE_FILE_SUFFIXES = (".mplstyle",)
ALLOWED_GROUPS = ("axes", "font", "grid", "hatch", "legend", "lines", "mathtext", "patch", "text", "xtick", "ytick")
FORBIDDEN_SETTINGS = ("axes.prop_cycle", "text.usetex", "text.latex.preamble", "axes.formatter.use_mathtext")
"""Settings that a style file may not change: figures choose colours themselves, and LaTeX would run code of the
file.
"""
MAX_HINTS = 5


@dataclass(frozen=True, kw_only=True)
class StylePreset:
    """Style of a venue: fonts, font sizes in points, line widths, figure width, panel letters and further settings.

    `fonts` are names in order of preference; the first that the machine has is used, else the last. `text`, `title`,
    `ticks` and `note` are font sizes in points, `marker` is the size of markers in points.
    """

    fonts: tuple[str, ...]
    fallback_fonts: str
    """Fonts that an SVG names after these, for a machine that has none of them."""
    text: float
    title: float
    ticks: float
    note: float
    stroke: float = 1.5
    """Width of a line in points; thinner lines scale with it."""
    marker: float = 4.0
    width_mm: float | None = None
    """Width of every figure in millimetres; None: as wide as each figure needs, at most a page."""
    panel_letter_format: str = "({})"
    """Format of a panel's letter; empty: no letters."""
    shows_title: bool = True
    """True if a figure shows its title and notes; journals put them into the caption."""
    extra_settings: Mapping[str, Any] = field(default_factory=dict)


STYLE_PRESETS: dict[str, StylePreset] = {
    # DejaVu Sans and STIX come with matplotlib, so every machine draws the same
    "paper": StylePreset(
        fonts=PORTABLE_FONTS, fallback_fonts="Verdana, sans-serif", text=PRINT_SIZES[-1].text, title=PRINT_SIZES[-1].title,
        ticks=PRINT_SIZES[-1].ticks, note=PRINT_SIZES[-1].note, stroke=PRINT_SIZES[-1].stroke, marker=PRINT_SIZES[-1].marker,
    ),
    "nature": StylePreset(
        fonts=SANS_FONTS, fallback_fonts="sans-serif", text=6.5, title=7.0, ticks=6.0, note=5.5, stroke=1.0, marker=3.0,
        width_mm=89.0, panel_letter_format="{}", shows_title=False, extra_settings={"axes.linewidth": 0.5, "grid.linewidth": 0.4},
    ),
    "neurips": StylePreset(
        fonts=("STIXGeneral",), fallback_fonts="'Times New Roman', Times, serif", text=9.0, title=9.5, ticks=8.0, note=7.5,
        stroke=1.3, width_mm=5.5 * MM, shows_title=False, extra_settings={"mathtext.fontset": "stix"},
    ),
    "screen": StylePreset(
        fonts=PORTABLE_FONTS, fallback_fonts="Verdana, sans-serif", text=14.0, title=15.0, ticks=12.0, note=10.5,
        stroke=2.6, marker=7.0, width_mm=10 * MM, panel_letter_format="", extra_settings={"axes.linewidth": 1.2, "grid.linewidth": 1.0},
    ),
}  # fmt: skip
"""Presets by name. nature: one column, 5 to 7 points; neurips: its text width and a Times font; screen: for
slides.
"""


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """Options of a drawn figure. `draw(figure_data, look)` receives them; helpers read them by `current_options`.

    `style` is "paper", "nature", "neurips" or "screen". `width_mm` is the width in millimetres; None: that of the
    style, else what the figure prefers. `highlight` has the ids of highlighted cells. `title` says whether title and
    notes are in the picture.
    """

    style: str = "paper"
    width_mm: float | None = None
    title: bool = True
    highlight: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)
    """Matplotlib settings of the user's style file, which override those of the style."""
    font: str | None = None
    """Name of the font; None: the first font of the style that this machine has."""

    @property
    def preset(self) -> StylePreset:
        """Preset of the style; that of `paper` has the sizes of its printed width (`print_size`)."""
        preset = STYLE_PRESETS[self.style]
        if self.style != "paper" or self.width_mm is None:
            return preset
        size = print_size(self.width_mm)
        sizes = {name: getattr(size, name) for name in ("text", "title", "ticks", "note", "stroke", "marker")}
        return replace(preset, **sizes)

    @property
    def scale(self) -> float:
        """Font size relative to the style `paper`; heights scale with it."""
        return self.preset.text / STYLE_PRESETS["paper"].text

    def inches(self, preferred: float, page: float) -> float:
        """Return the width of a figure in inches: the fixed one of options or style, else the preferred one.

        Args:
            preferred: Preferred width in inches, limited to `page`.
            page: Width of the page in inches; no limit for a fixed width.
        """
        fixed = self.width_mm or self.preset.width_mm
        return fixed / MM if fixed else min(preferred, page)

    def font_family(self) -> str:
        """Return the name of the font to draw with: the given one, else the first of the style that is installed.

        Raises:
            ReportError: The given font is not installed.
        """
        if self.font is None:
            return first_font(self.preset.fonts)
        if self.font not in installed_fonts():
            raise ReportError(f"the font {self.font} is not installed here; install it, or draw the figure again")
        return self.font

    def as_json(self) -> dict[str, Any]:
        """Return the options as a trace stores them; `options_from_trace` reads them back.

        Keys: style, title, font (the name of the font that is used here), and, where set, width_mm, highlight and own.

        Raises:
            ReportError: The font is not installed.
        """
        fields = {"style": self.style, "title": self.title, "font": self.font_family()}
        more = {"width_mm": self.width_mm, "highlight": list(self.highlight), "own": dict(self.own)}
        return fields | {name: value for name, value in more.items() if value}


def options_from_trace(trace_options: Any) -> FigureOptions:
    """Return the figure options that a trace stores (`FigureOptions.as_json`); the defaults for None.

    Fields that are missing have their defaults. Whether the font is installed is not checked.

    Raises:
        ReportError: The stored options are not valid.
    """
    if trace_options is None:
        return FigureOptions()
    try:
        own = {name: checked_setting(name, value) for name, value in trace_options.get("own", {}).items()}
        fields = {name: trace_options[name] for name in ("style", "title", "font", "width_mm") if name in trace_options}
        options = FigureOptions(**fields, highlight=tuple(map(str, trace_options.get("highlight", ()))), own=own)
        good = (
            options.style in STYLE_PRESETS and isinstance(options.title, bool) and isinstance(options.font, str | None)
        )
        good = good and (options.width_mm is None or NARROWEST <= float(options.width_mm) <= WIDEST)
    except (AttributeError, TypeError, ValueError) as error:
        raise ReportError(f"the style options recorded in the file cannot be read ({error})") from error
    if not good:
        raise ReportError("the style options recorded in the file cannot be read")
    return options


@cache
def installed_fonts() -> frozenset[str]:
    """Return the names of the fonts that matplotlib finds on this machine; cached."""
    from matplotlib import font_manager

    return frozenset(font_manager.get_font_names())


@cache
def first_font(fonts: tuple[str, ...]) -> str:
    """Return the first of these fonts that is installed; the last one, which comes with matplotlib, if none is."""
    return next((font for font in fonts[:-1] if font in installed_fonts()), fonts[-1])


def options_from_cli(style: str | None = None, width: str | None = None, title: bool | None = None) -> FigureOptions:
    """Return the figure options of command-line arguments.

    Args:
        style: Preset "paper", "nature", "neurips" or "screen", or path of a matplotlib style file (.mplstyle), which is
            read and extends "paper"; None or empty: "paper".
        width: Width such as "89mm"; None: that of the preset.
        title: Whether title and notes are in the picture; None: as the preset says.

    Raises:
        ReportError: An argument is not valid, or the file cannot be read.
    """
    name, own = style or "paper", {}
    if Path(name).suffix in STYLE_FILE_SUFFIXES:
        name, own = "paper", read_style_file(Path(name))
    elif name not in STYLE_PRESETS:
        raise ReportError(
            f"unknown style {name!r}; {choices_hint(name, STYLE_PRESETS)}; or a file that ends in "
            f"{STYLE_FILE_SUFFIXES[0]}"
        )
    titled = STYLE_PRESETS[name].shows_title if title is None else title
    return FigureOptions(style=name, width_mm=None if width is None else millimetres(width), title=titled, own=own)


def millimetres(text: str) -> float:
    """Return a width such as 89mm, 8.9 cm, 3.5in, 252pt or 89 (millimetres) in millimetres, rounded to four decimals.

    Raises:
        ReportError: The text is not a width, or outside 40 to 600 mm.
    """
    match = LENGTH.fullmatch(text.strip().lower())
    if match is None:
        raise ReportError(f"--width needs a number and mm, cm, in or pt, such as 89mm, not {text[:40]!r}")
    width = float(match[1]) * UNITS[match[2]]
    if not NARROWEST <= width <= WIDEST:
        raise ReportError(
            f"--width {text}: a figure must be {NARROWEST:g} to {WIDEST:g} mm wide; a journal column is 89mm"
        )
    return round(width, 4)


def read_style_file(file: Path) -> dict[str, Any]:
    """Return the settings of a matplotlib style file, one `name: value` per line, as checked plain data by name.

    Empty lines and comments (# to the end of a line without quotation marks) are skipped; a later line wins.

    Raises:
        ReportError: The file cannot be read, or a line (which the message names) is not valid.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read the style {file}: {error}") from error
    settings = {}
    for number, line in enumerate(lines, 1):
        bare = line.split("#")[0].strip() if '"' not in line else line.strip()
        if not bare:
            continue
        name, colon, value = (part.strip() for part in bare.partition(":"))
        if not colon:
            raise ReportError(f"{file}, line {number}: one setting per line expected, such as font.size: 7")
        try:
            settings[name] = checked_setting(name, value.strip('"'))
        except ValueError as error:
            raise ReportError(f"{file}, line {number}: {error}") from error
    return settings


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of a matplotlib setting as plain data (JSON types), converted by matplotlib.

    Args:
        name: Name of the setting. Permitted groups are axes, font, grid, hatch, legend, lines, mathtext, patch, text,
            xtick and ytick, without axes.prop_cycle, text.usetex, text.latex.preamble and
            axes.formatter.use_mathtext.
        value: Its value, as text or plain data.

    Raises:
        ValueError: A style file may not change the setting, or the value is not valid.
    """
    import matplotlib

    if (
        name.partition(".")[0] not in ALLOWED_GROUPS
        or name in FORBIDDEN_SETTINGS
        or name not in matplotlib.rcParamsDefault
    ):
        allowed = [
            setting
            for setting in matplotlib.rcParamsDefault
            if setting.partition(".")[0] in ALLOWED_GROUPS and setting not in FORBIDDEN_SETTINGS
        ]
        raise ValueError(f"{name} cannot be set in a style file{did_you_mean(name, allowed)}")
    parameters: Any = matplotlib.RcParams()
    try:
        parameters[name] = value
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from error
    plain_value = json.loads(json.dumps(parameters[name]))
    if isinstance(plain_value, float) and not math.isfinite(plain_value):
        raise ValueError(f"{name} must be a number")
    return plain_value


def with_highlight(options: FigureOptions, data: SweepData, selectors: Sequence[str]) -> FigureOptions:
    """Return the options with highlighted cells in place of the present ones.

    Args:
        options: The options.
        data: The sweep.
        selectors: Each a slug, a cell's id or at least its first four characters, or levels such as "polar,memory=on".
            Cells that match any of them are highlighted.

    Raises:
        ReportError: A selector matches no cell.
    """
    cells = [cell for word in selectors for cell in _cells_of_selector(data, word)]
    return replace(options, highlight=tuple(dict.fromkeys(cells)))


def _cells_of_selector(data: SweepData, selector: str) -> list[str]:
    """Return the ids of all cells that a selector matches, in the grid's order.

    Tried in this order until any cell matches: slug or id, the beginning of an id (at least four characters), levels.

    Raises:
        ReportError: No cell matches.
    """
    cells = [cell.cell_id for cell in data.cells if selector in (cell.cell_id, cell.slug)]
    cells = cells or [cell.cell_id for cell in data.cells if len(selector) > 3 and cell.cell_id.startswith(selector)]
    cells = cells or _cells_at_levels(data, selector)
    if cells:
        return cells
    slugs = [cell.slug for cell in data.cells]
    more = ", ..." if len(slugs) > MAX_HINTS else ""
    hint = did_you_mean(selector, slugs) or f"; cells are {', '.join(slugs[:MAX_HINTS])}{more}"
    raise ReportError(
        f"--highlight {selector[:60]}: no cell of sweep {data.sweep} has this slug, id or levels (such as "
        f"polar,memory=on){hint}"
    )


def _cells_at_levels(data: SweepData, selector: str) -> list[str]:
    """Return the ids of the cells at all of these comma-separated levels; [] if there are none or the text is empty.

    A part is `axis=level` (seed is an axis too), or a level of any axis other than "on" and "off". Levels are compared
    as text, as the cells spell them.
    """
    parts = [part.strip() for part in selector.split(",") if part.strip()]

    def stands(cell: Any, part: str) -> bool:
        axis, equals, level = part.partition("=")
        levels = {**cell.axes, **{name: cell.levels[name] for name in AXES}, "seed": str(cell.seed)}
        return levels.get(axis) == level if equals else part in levels.values() and part not in ("on", "off")

    return [cell.cell_id for cell in data.cells if parts and all(stands(cell, part) for part in parts)]
