"""Visual language of figures, dashboard and LaTeX: colours, dashes, markers, names of levels, sizes and fonts.

Hue is the mixer, dash and fill the memory, marker the attention window, lightness the regularizer; another axis has
further markers and widths. Dotted grey lines are no results of runs, and a ring is around what a key names. Every ink has a
contrast of at least 4.5:1 on white, so that text may have it; `tint` gives the lighter variant for areas. Plain data
and small functions: the module imports nothing of the package and no drawing library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MIXER_INKS: Mapping[str, str] = {
    "polar": "#1259cc",
    "nope": "#ab5d2b",
    "rope": "#161616",
    "wall": "#09471f",
    "fox": "#69037b",
    "tra": "#5e5303",
    "alibi": "#7f45dd",
    "cope": "#046f87",
    "diff": "#bb2c54",
    "ssmax": "#415b3b",
    "rel": "#747474",
    "path": "#392620",
    "polysketch": "#0b6b5d",
}
"""Ink of each mixer. Colour-blind readers (protan, deutan, tritan) keep the first five apart by colour alone; more
mixers in one panel need the direct labels or markers that the figures add.
"""
SERIES_INKS = tuple(MIXER_INKS.values())
"""Inks by index for series that are not mixers, such as memories in a panel of their own or layers."""
FREE_INKS = ("#c8102e", "#00707a", "#a3168f", "#4a6a00", "#3d3d99", "#8a3a00")
"""Inks by index for what stands beside mixers and is none, such as memories or trials; no mixer has one of them."""

INK, GREY, FAINT, GRID, MISSING = "#161616", "#666666", "#b8b8b8", "#e3e3e3", "#e8e2da"
"""Text and axes; secondary text; lines in the background; grid lines; a missing number of a heat map."""
GOOD, BAD, NEUTRAL = "#1b7837", "#762a83", "#f4f4f4"
"""Both ends of every diverging scale, whichever sign is better, and its middle: no hue of PoLAR, NoPE or RoPE."""
BACKGROUND, DARK_BACKGROUND = "#ffffff", "#16171b"
HEAT_MAP = "cividis"
"""Colour map of heat maps: its lightness rises monotonically, so that colour-blind readers see the same order."""
MIN_CONTRAST = 4.5
"""Least contrast of text with its background (WCAG 2, level AA)."""

STATE_INKS: Mapping[str, str] = {
    "done": "#0b5a2e",
    "running": "#186bec",
    "waiting": "#666666",
    "interrupted": "#6b5c00",
    "diverged": "#7a1a8c",
    "failed": "#b3261e",
}
"""Ink of the state of a cell or attempt, the same in timeline, dashboard and pages."""

DASHES: tuple[Any, ...] = (
    "-",
    (0, (4.2, 1.8)),
    (0, (1.4, 1.4)),
    (0, (6, 1.6, 1.4, 1.6)),
    (0, (7, 2.4)),
    (0, (2.6, 1.2, 2.6, 3)),
    (0, (6, 1.6, 1.4, 1.6, 1.4, 1.6)),
)
"""Dashes in the notation of matplotlib: "-" or (offset, (on, off, ...)) in widths of the line."""
MEMORY_DASHES: Mapping[str, int] = {
    "on": 0,
    "off": 1,
    "deltanet": 2,
    "kda": 3,
    "omega": 4,
    "atlas": 5,
    "gated_delta": 0,
}
"""Index in DASHES and HATCHES by level of `memory`: solid and filled with memory, dashed and hollow without."""
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "----")
"""Fill of bars by the same index, in the notation of matplotlib."""
FREE_WIDTHS = (1.5, 0.7, 2.4, 1.0)
"""Widths of lines, in points of a printed page, by level of an axis that has no look of its own."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WINDOW_MARKERS: Mapping[str, int] = {"off": 0, "on": 1}
"""Index in MARKERS by level of `window`: a circle for full attention, a square for a window."""
REGULARIZER_LIGHTNESS: Mapping[str, float] = {
    "baseline": 0.0,
    "weak": 0.22,
    "strong": -0.35,
    "discrete": 0.4,
    "zipfian": -0.6,
}
"""Share of white (positive) or black (negative) in the ink by level of `reg_mode`."""

LEVEL_NAMES: Mapping[tuple[str, str], str] = {
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
    ("attn_type", "ssmax"): "SSMax",
    ("attn_type", "path"): "PaTH",
    ("attn_type", "polysketch"): "PolySketch",
    ("attn_type", "none"): "no attention",
    ("reg_mode", "baseline"): "no regularizer",
    ("reg_mode", "zipfian"): "Zipfian",
    ("distractor", "on"): "with distractor loss",
    ("distractor", "off"): "no distractor loss",
    ("memory", "on"): "with memory",
    ("memory", "off"): "no memory",
    ("memory", "gated_delta"): "gated delta",
    ("memory", "deltanet"): "DeltaNet",
    ("memory", "kda"): "KDA",
    ("memory", "omega"): "Omega",
    ("memory", "atlas"): "ATLAS",
    ("window", "on"): "with window",
    ("window", "off"): "no window",
    ("model.positions", "ape"): "APE",
    ("model.positions", "label"): "Label",
    ("model.positions", "none"): "no positions",
}
"""Name of a level by (axis, level), as the papers spell it; levels that are not listed are shown as they are."""
AXIS_NAMES: Mapping[str, str] = {
    "attn_type": "mixer",
    "reg_mode": "regularizer",
    "distractor": "distractor loss",
    "model.positions": "positions",
    "model.n_layers": "layers",
    "model.n_heads": "heads",
    "model.d_model": "width",
    "model.head_dim": "head size",
    "data.corpus": "corpus",
    "train.tokens": "training tokens",
    "train.seq_len": "training length",
    "train.muon_lr": "Muon learning rate",
    "train.adam_lr": "AdamW learning rate",
    "train.embedding_lr": "embedding learning rate",
    "train.precision": "precision",
    "train.optimizer": "optimizer",
}
"""Name of an axis; others lose what stands before the last dot ("train.warmup" -> "warmup")."""

LONG_NAMES: Mapping[str, str] = {
    "PoLAR": "polar attention (separate direction and magnitude)",
    "NoPE": "softmax attention without positions",
    "RoPE": "rotary positions",
    "Wall": "attention with a forget gate per channel",
    "ALiBi": "linear biases",
    "TRA": "threshold relative attention",
    "FoX": "forgetting attention",
    "CoPE": "contextual position encoding",
    "Diff": "differential attention",
    "REL": "relative position biases",
    "SSMax": "scalable softmax",
    "PaTH": "accumulated Householder transformations",
    "PolySketch": "polynomial attention by random features",
    "APE": "absolute positions",
    "Label": "randomized positions",
    "KDA": "Kimi delta attention, a recurrent memory",
    "DeltaNet": "delta-rule memory without decay",
    "ATLAS": "memory that fits a window of past tokens by Muon steps",
    "MQAR": "multi-query associative recall",
    "ASHA": "asynchronous successive halving",
    "TPE": "tree-structured Parzen estimator",
    "fANOVA": "functional analysis of variance",
    "memory": "a recurrent state beside attention",
    "window": "attention to the last tokens only, in training",
    "distractor loss": "auxiliary loss on attention to random keys",
    "regularizer": "penalty on the distribution of activations (weak, strong, discrete, Zipfian)",
    "needle": "digits planted in a long text, to be repeated at its end",
    "passkey": "digits planted at a depth of a long text, to be repeated at its end",
    "near-replicates": "runs that differ only in a regularizer of negligible weight, in place of seeds",
    "utilization": "operations of the network per second over the device's peak",
    "constant-digit baseline": "score of always answering the most frequent digit",
}
"""Long form of an abbreviated or technical name, for captions (`glossary`)."""

SANS_FONTS = ("Arial", "Helvetica", "Liberation Sans", "Nimbus Sans", "TeX Gyre Heros", "DejaVu Sans")
PORTABLE_FONTS = ("DejaVu Sans",)
"""Fonts in order of preference; DejaVu Sans comes with matplotlib, so every machine draws the same with it."""


@dataclass(frozen=True, kw_only=True)
class PrintSize:
    """Sizes of a printed figure: its width in millimetres, text and strokes in points.

    `text` is the size of labels, `title` of titles of panels, `ticks` of tick labels, `note` of notes and of numbers
    next to points; `stroke` is the width of a line and `marker` the size of a marker.
    """

    width_mm: float
    text: float
    title: float
    ticks: float
    note: float
    stroke: float
    marker: float


PRINT_SIZES = (
    PrintSize(width_mm=89.0, text=7.0, title=7.2, ticks=6.2, note=5.8, stroke=1.1, marker=3.2),
    PrintSize(width_mm=120.0, text=7.4, title=7.6, ticks=6.6, note=6.2, stroke=1.25, marker=3.6),
    PrintSize(width_mm=183.0, text=8.0, title=8.4, ticks=7.0, note=6.6, stroke=1.4, marker=4.0),
)
"""Sizes of one column, one and a half, and two columns of a journal, by width."""
MIN_TEXT_SIZE = 5.0
"""Least size of any text in points."""
MAX_TICKS = 7
"""Largest number of labelled ticks of an axis."""


def print_size(width_mm: float) -> PrintSize:
    """Return the sizes of the widest entry of PRINT_SIZES that is at most this wide; the first for narrower figures."""
    return next((size for size in reversed(PRINT_SIZES) if width_mm >= size.width_mm - 0.5), PRINT_SIZES[0])


def level_label(level: str, axis: str = "attn_type") -> str:
    """Return the name of a level as the papers spell it, such as "PoLAR" or "with memory".

    An unknown level of attn_type or reg_mode is shown as it is, one of another axis as "<axis name> <level>", where
    integers from 10,000 on are abbreviated in powers of 1000 ("training tokens 65.5M").
    """
    name = LEVEL_NAMES.get((axis, level))
    if name is not None:
        return name
    return level if axis in ("attn_type", "reg_mode") else f"{axis_label(axis)} {short_integer(level)}"


def short_integer(level: str) -> str:
    """Return an integer from 10,000 on with three significant digits and K, M, B or T; any other text as it is."""
    if not (level.isascii() and level.isdigit() and 5 <= len(level) <= 15):
        return level
    size = next(power for power in (12, 9, 6, 3) if len(level) > power)
    return f"{float(f'{int(level) / 10**size:.3g}'):g}{'KMBT'[size // 3 - 1]}"


def glossary(text: str) -> dict[str, str]:
    """Return the meaning of each name of LONG_NAMES that the text has, by name.

    A name counts as a whole word, also with a capital first letter, or before a colon as in a list of names.
    """
    return {
        name: meaning
        for name, meaning in LONG_NAMES.items()
        if re.search(rf"\b[{name[0]}{name[0].upper()}]{re.escape(name[1:])}\b", text)
    }


def memory_label(level: str) -> str:
    """Return the name of a memory next to others: "gated delta" for "on", else as `level_label` ("KDA")."""
    return "gated delta" if level == "on" else level_label(level, "memory")


def axis_label(axis: str) -> str:
    """Return the name of an axis, such as "mixer" for attn_type; one without a name from its last dot on, spaced."""
    return AXIS_NAMES.get(axis, axis.rpartition(".")[2].replace("_", " "))


def memory_look(ink: str, memory: str) -> dict[str, Any]:
    """Return the look of a line or mark in an ink by its level of `memory`, as keyword arguments of matplotlib.

    Keys: color, linestyle, marker, markerfacecolor (white without a memory) and markeredgecolor.
    """
    marks = {"marker": MARKERS[0], "markerfacecolor": BACKGROUND if memory == "off" else ink, "markeredgecolor": ink}
    return {"color": ink, "linestyle": DASHES[MEMORY_DASHES.get(memory, 0)]} | marks


def free_marker(index: int) -> int:
    """Return the index in MARKERS for a level of an axis that has no look of its own: one that no window has."""
    first = len(WINDOW_MARKERS)
    return first + index % (len(MARKERS) - first)


def mixer_inks(mixers: Iterable[str]) -> dict[str, str]:
    """Return the ink of each mixer; those of plug-ins take, in their order, inks that none of the others has."""
    names = list(dict.fromkeys(mixers))
    # the rarest mixers first, since a reader knows the inks of the others
    free = [ink for name, ink in reversed(list(MIXER_INKS.items())) if name not in names] or list(SERIES_INKS)
    unlisted = [name for name in names if name not in MIXER_INKS]
    return {name: MIXER_INKS[name] if name in MIXER_INKS else free[unlisted.index(name) % len(free)] for name in names}


def regularizer_ink(ink: str, reg_mode: str) -> str:
    """Return the ink of a mixer in the lightness of a regularizer, for lines and markers; text keeps the ink itself."""
    share = REGULARIZER_LIGHTNESS.get(reg_mode, 0.0)
    return mixed(ink, BACKGROUND if share > 0 else "#000000", abs(share))


def tint(ink: str, share: float = 0.6) -> str:
    """Return the lighter variant of an ink, for areas behind text and bars: `share` of it is white."""
    return mixed(ink, BACKGROUND, share)


def ink_on_dark(ink: str) -> str:
    """Return the ink with as little white as gives a contrast of 4.5:1 on the dark background of a page."""
    shares = (step / 20 for step in range(20))
    return next(
        (mixed(ink, "#ffffff", share) for share in shares if contrast(mixed(ink, "#ffffff", share), DARK_BACKGROUND) >= MIN_CONTRAST),
        "#ffffff",
    )  # fmt: skip


def mixed(colour: str, addition: str, share: float) -> str:
    """Return the colour with `share` (0 to 1) of the addition mixed in, in sRGB; both as #rrggbb."""
    pairs = zip(_channels(colour), _channels(addition), strict=True)
    return "#" + "".join(f"{round(255 * (a + (b - a) * share)):02x}" for a, b in pairs)


def contrast(colour: str, background: str = BACKGROUND) -> float:
    """Return the contrast ratio of two colours, 1 to 21.

    Source: WCAG 2.2, relative luminance and contrast ratio.
    """
    low, high = sorted((_luminance(colour), _luminance(background)))
    return (high + 0.05) / (low + 0.05)


def _channels(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))


def _luminance(colour: str) -> float:
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
