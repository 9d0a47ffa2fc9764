"""Tests of the table of colours, marks and names, with an independent model of colour blindness and of contrast."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from atma_sweep.model.registry import MEMORIES, MIXERS, REGULARIZERS
from atma_sweep.reports.figures.canvas.base import FigureData
from atma_sweep.reports.render import style

# Machado, Oliveira and Fernandes 2009, severity 1
COLOUR_BLINDNESS = {
    "normal": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip


def linear(colour: str) -> np.ndarray:
    """Return the linear sRGB channels of #rrggbb."""
    channels = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def cielab(channels: np.ndarray) -> np.ndarray:
    """Return CIE L*a*b* (D65) of linear sRGB channels."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(channels, 0, 1) / np.array([0.9505, 1.0, 1.089])
    root = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("sight", COLOUR_BLINDNESS)
def test_mixer_inks_stay_apart_for_colour_blind(sight: str) -> None:
    """A difference of 10 (CIE 1976) is seen at a glance; 2.3 is just noticeable."""
    seen = {name: cielab(COLOUR_BLINDNESS[sight] @ linear(ink)) for name, ink in style.MIXER_INKS.items()}
    apart = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in combinations(seen, 2)}
    first_five = set(list(style.MIXER_INKS)[:5])
    assert min(distance for pair, distance in apart.items() if set(pair) <= first_five) > 20
    assert min(apart.values()) > 5


def test_inks_contrast_with_white() -> None:
    inks = [*style.MIXER_INKS.values(), *style.STATE_INKS.values(), style.INK, style.GREY, style.GOOD, style.BAD]
    contrasts = [1.05 / (float(np.dot([0.2126, 0.7152, 0.0722], linear(ink))) + 0.05) for ink in inks]
    assert min(contrasts) >= 4.5
    assert [style.contrast(ink) for ink in inks] == pytest.approx(contrasts)
    assert style.contrast("#000000") == pytest.approx(21)


def test_ink_on_dark_contrasts_with_dark_page() -> None:
    dark = float(np.dot([0.2126, 0.7152, 0.0722], linear(style.DARK_BACKGROUND)))
    for ink in style.MIXER_INKS.values():
        light = float(np.dot([0.2126, 0.7152, 0.0722], linear(style.ink_on_dark(ink))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_every_registered_part_has_a_style() -> None:
    assert set(MIXERS) <= set(style.MIXER_INKS)
    assert {name for axis, name in style.LEVEL_NAMES if axis == "attn_type"} >= set(MIXERS)
    assert set(MEMORIES) <= set(style.MEMORY_DASHES)
    assert {"baseline", *REGULARIZERS} == set(style.REGULARIZER_LIGHTNESS)
    assert len(set(style.MIXER_INKS.values())) == len(style.MIXER_INKS)


def test_mixer_inks_give_plugins_unused_ones() -> None:
    inks = style.mixer_inks(["mine", "polar", "yours"])
    assert inks["polar"] == style.MIXER_INKS["polar"]
    assert len(set(inks.values())) == 3


def test_regularizer_ink_changes_lightness_alone() -> None:
    """Five regularizers give five lightnesses of one hue."""
    shades = [style.regularizer_ink("#186bec", level) for level in style.REGULARIZER_LIGHTNESS]
    lightness = [float(cielab(linear(shade))[0]) for shade in shades]
    assert min(abs(a - b) for a, b in combinations(lightness, 2)) > 7
    assert style.mixed("#000000", "#ffffff", 0.5) == "#808080"


def test_print_size_fits_the_width() -> None:
    assert [style.print_size(width).width_mm for width in (60, 89, 119, 120, 183, 300)] == [89, 89, 89, 120, 183, 183]
    assert min(size.note for size in style.PRINT_SIZES) >= style.MIN_TEXT_SIZE


def test_style_imports_no_drawing_library() -> None:
    code = "import sys; import atma_sweep.reports.render.style; print({'matplotlib', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_caption_explains_a_name_once_in_a_document() -> None:
    """The names come from the text; a caption has their meanings before its last note, less what is explained."""
    names = style.glossary("PoLAR against RoPE, with memory")
    assert list(names) == ["PoLAR", "RoPE", "memory"]
    figure = FigureData(name="x", title="X", frame=pd.DataFrame(), notes=("A.", "Sweep y."), glossary=names, trace={})
    assert figure.caption_notes({"PoLAR", "memory"}) == ["A.", "RoPE: rotary positions.", "Sweep y."]
    assert figure.caption_notes(names) == ["A.", "Sweep y."]
    assert figure.as_json()["notes"][1] == "; ".join(f"{name}: {style.LONG_NAMES[name]}" for name in names) + "."
